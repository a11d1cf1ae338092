"""What is said of a next release of vLLM: which of its changes break an assumption."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from router.kv_events import wire
from tests.docs_blocks import VLLM_FLAGS
from tests.engines import compat
from tests.engines.compat import Row, judge

IMAGES = json.loads((compat.ROOT / "tests/data/media_vectors.json").read_text())["images"]


def release() -> dict[str, Any]:
    """The facts of a release that is all that warmroute assumes."""
    return {
        "hashes": {
            "hash sha256": "120 of 120 equal",
            "lookahead sha256 lookahead": "0 of 20 equal",
        },
        "image_names": {
            f"{number} {image['form']} {image['mode']}": image["identifier"]
            for number, image in enumerate(IMAGES)
        },
        "events": {
            "EventBatch": ["ts", "events", "data_parallel_rank"],
            **{
                f"{struct.__name__} (map, tag {struct.__name__})": list(struct.__struct_fields__)
                for struct in (wire.BlockStored, wire.BlockRemoved, wire.AllBlocksCleared)
            },
        },
        "hit_lengths": {"coordinator": "1920 of 1920 equal"},
        "store_keys": {"listings": "20 of 20 equal"},
        "flags": sorted(VLLM_FLAGS),
        "routes": sorted(compat.needed_routes()),
        "metrics": sorted(compat.needed_metrics()),
        "request_fields": {name: read.split() for name, read in compat.READ_FIELDS.items()},
        "registries": {
            "modes by architecture": ["deepseek_v32"],
            "tool parsers": ["hermes"],
            **{name: sorted(needed) for name, needed in compat.READ_SETTINGS.items()},
        },
        "texts": sorted(compat.TEXTS),
    }


def test_the_same_release_again_breaks_nothing() -> None:
    """The table is empty."""
    assert judge(release(), release()) == []


STORED = "BlockStored (map, tag BlockStored)"
BROKEN: list[tuple[str, Any, str]] = [
    ("hashes", {"hash sha256": "119 of 120 equal"}, "119 of 120"),
    ("hashes", {"lookahead sha256 lookahead": "19 of 20 equal"}, "19 of 20"),
    ("image_names", {f"0 {IMAGES[0]['form']} {IMAGES[0]['mode']}": "x"}, "PNG RGB"),
    ("events", {STORED: ["block_hashes"]}, "lacks parent_block_hash"),
    ("events", {"EventBatch": ["events", "ts"]}, "EventBatch has"),
    ("hit_lengths", {"coordinator": "1900 of 1920 equal"}, "1900"),
    ("store_keys", {"listings": "0 of 20 equal"}, "0 of 20"),
    ("flags", "ImportError: moved", "cannot be asked any more: ImportError"),
    ("request_fields", {"CompletionRequest": ["prompt"]}, "CompletionRequest lacks"),
    ("registries", {"hash algorithms": ["sha256"]}, "sha256_cbor"),
    ("registries", {"modes by architecture": ["unheard_of"]}, "unheard_of"),
]


@pytest.mark.parametrize(("kind", "change", "said"), BROKEN)
def test_what_breaks_is_named(kind: str, change: Any, said: str) -> None:
    """Each kind has a verdict of its own, first in the table."""
    new = copy.deepcopy(release())
    new[kind] = change if isinstance(change, str) else {**new[kind], **change}

    row = judge(release(), new)[0]

    assert (row.verdict, row.kind) == ("breaks", kind)
    assert said in row.what


def test_a_new_field_of_events_is_named() -> None:
    """What it means has to be read: it may be part of a block's name."""
    new = release()
    new["events"][STORED].append("drafted_by")

    assert judge(release(), new) == [Row("new", "events", "BlockStored: drafted_by")]
