"""What another release of vLLM changes of what warmroute assumes: a table, and an exit status.

    make compat                                             the newest release, against the
                                                            installed one
    build/venv/bin/python -m tests.engines.compat SOURCE    a wheel, or a folder that has `vllm/`

Only Python runs (tests/engines/overlay.py), so a release can be judged on the day it is published.
It takes a minute, and some 340 MB of download. `breaks`: an assumption does not hold any more, and
the exit status is 1. `new`, `gone`: to be looked at; warmroute does not depend on it.

It cannot see what engines answer, and when they store blocks. tests/engines has that as soon as
there is a CPU build. Prompts are compared by `make prove`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from loadtest.markdown import table
from router.api import routes as served
from router.base.contracts import ALGORITHMS
from router.http import admin
from router.kv_events import wire
from router.tokens.models import modes
from tests.docs_blocks import VLLM_FLAGS
from tests.engines.compat_facts import TEXTS
from tests.engines.overlay import PYTHON, environment, overlay, version_of

ROOT: Final = Path(__file__).resolve().parents[2]
_TIMEOUT_S: Final = 300.0
_MAX_SHOWN: Final = 12
_OWN_ROUTES: Final = frozenset({"/v1/audio/speech"})  # of OpenAI's API: vLLM does not have it yet
_ENGINE_ROUTES: Final = (
    "/health", "/metrics", "/version", "/v1/models", "/tokenize", "/kv_event_sources", "/is_paused",
    "/server_info",
)  # fmt: skip
READ_FIELDS: Final = {
    "ChatCompletionRequest": "messages tools reasoning_effort chat_template_kwargs cache_salt "
    "add_generation_prompt continue_final_message documents kv_transfer_params "
    "truncate_prompt_tokens",
    "CompletionRequest": "prompt cache_salt add_special_tokens truncate_prompt_tokens",
    "ResponsesRequest": "input instructions tools reasoning previous_response_id cache_salt",
    "AnthropicMessagesRequest": "messages system tools thinking output_config cache_salt",
}
READ_SETTINGS: Final = {
    "hash algorithms": set(ALGORITHMS) - {"warmroute"},
    "speculative settings": {"method", "disable_eagle_block_drop"},
    "speculative methods": {"eagle", "eagle3", "mtp", "ngram"},
}


class Row(NamedTuple):
    """One line of the table."""

    verdict: str  # breaks, new, gone
    kind: str
    what: str


def facts_of(sources: Path | None) -> dict[str, Any]:
    """Ask a release by the engines' interpreter; None: the installed one."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "facts.json"
        environ = environment(sources)
        environ["PYTHONPATH"] = f"{environ['PYTHONPATH']}:{ROOT}" if sources else str(ROOT)
        command = [str(PYTHON), "-P", "-m", "tests.engines.compat_facts", str(path)]
        subprocess.run(
            command, env=environ, check=True, timeout=_TIMEOUT_S, stderr=subprocess.DEVNULL
        )
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def judge(old: dict[str, Any], new: dict[str, Any]) -> list[Row]:
    """Compare two releases' facts; what warmroute assumes of the new one comes first."""
    rows: list[Row] = []
    for kind, assumption in ASSUMPTIONS.items():
        before, now = old[kind], new[kind]
        if isinstance(now, str):
            rows.append(Row("breaks", kind, f"cannot be asked any more: {now}"))
        else:
            rows += assumption(kind, now, None if isinstance(before, str) else before)
    return sorted(rows, key=lambda row: row.verdict != "breaks")


# -- one function a kind -------------------------------------------------------------------------


def _recorded(kind: str, now: Any, before: Any) -> Iterator[Row]:
    """Expect what was recorded, of all that this release has."""
    for name, counts in now.items():
        equal, num = re.findall(r"\d+", counts)
        if equal != num and not (name.endswith("lookahead") and equal == "0"):
            yield Row("breaks", kind, f"{name}: {counts}")


def _images(kind: str, now: Any, before: Any) -> Iterator[Row]:
    """Expect the names that were recorded, but for those known to differ from 0.33 on."""
    vectors = json.loads((ROOT / "tests/data/media_vectors.json").read_text())["images"]
    wrong = [
        f"{image['form']} {image['mode']}"
        for (name, named), image in zip(now.items(), vectors, strict=True)
        if named != image["identifier"] and not name.endswith("tRNS")
    ]
    if wrong:
        yield Row("breaks", kind, f"other names: {_shown(wrong)}")


def _events(kind: str, now: Any, before: Any) -> Iterator[Row]:
    """Expect maps with the fields that are read; report fields that the decoder does not know."""
    for name, struct in (
        ("BlockStored", wire.BlockStored),
        ("BlockRemoved", wire.BlockRemoved),
        ("AllBlocksCleared", wire.AllBlocksCleared),
    ):
        known = f"{name} (map, tag {name})"
        if known not in now:
            yield Row("breaks", kind, f"{name} has another form: {_shown(list(now))}")
            continue
        fields = [field for field in struct.__struct_fields__ if field != "lookahead_token_ids"]
        if missing := [field for field in fields if field not in now[known]]:
            yield Row("breaks", kind, f"{name} lacks {_shown(missing)}")
        read = {*struct.__struct_fields__, *(before or {}).get(known, ())}
        if more := [field for field in now[known] if field not in read]:
            yield Row("new", kind, f"{name}: {_shown(more)}")
    if now["EventBatch"][:3] != ["ts", "events", "data_parallel_rank"]:
        yield Row("breaks", kind, f"EventBatch has {_shown(now['EventBatch'])}")


def _among(needed: Callable[[], set[str]]) -> Callable[[str, Any, Any], Iterator[Row]]:
    """Expect names to be there; report others that came or went."""

    def compare(kind: str, now: Any, before: Any) -> Iterator[Row]:
        if missing := sorted(needed() - set(now) - _never(needed(), before)):
            yield Row("breaks", kind, f"gone: {_shown(missing)}")
        yield from _changes(kind, "", now, before, needed())

    return compare


def _never(needed: set[str], before: Any) -> set[str]:
    """List names that the installed release lacks as well: of a newer, or built otherwise."""
    return needed - set(before) if before is not None else set()


def _changes(kind: str, name: str, now: Any, before: Any, needed: set[str]) -> Iterator[Row]:
    if before is None:
        return
    for verdict, names in (
        ("new", set(now) - set(before)),
        ("gone", set(before) - set(now) - needed),
    ):
        if names:
            yield Row(verdict, kind, f"{name}: " * bool(name) + _shown(sorted(names)))


def _fields(kind: str, now: Any, before: Any) -> Iterator[Row]:
    """Expect the fields of requests that are read."""
    for name, read in READ_FIELDS.items():
        needed = set(read.split())
        earlier = (before or {}).get(name)
        if missing := sorted(needed - set(now[name]) - _never(needed, earlier)):
            yield Row("breaks", kind, f"{name} lacks {_shown(missing)}")
        yield from _changes(kind, name, now[name], earlier, needed)


def _registries(kind: str, now: Any, before: Any) -> Iterator[Row]:
    """Expect what is configured and read by name; a mode that is not known may render otherwise."""
    for name, found in now.items():
        if missing := sorted(READ_SETTINGS.get(name, set()) - set(found)):
            yield Row("breaks", kind, f"{name}: gone: {_shown(missing)}")
        if name == "modes by architecture":
            known = {*modes._BY_ARCHITECTURE.values(), "terratorch"}
            if strange := sorted(set(found) - known):
                yield Row("breaks", kind, f"{name}: not in models/modes.py: {_shown(strange)}")
        earlier = (before or {}).get(name)
        yield from _changes(kind, name, found, earlier, READ_SETTINGS.get(name, set()))


# -- what is needed ------------------------------------------------------------------------------


def needed_routes() -> set[str]:
    orders = {admin.path_of(route) for route in admin.ROUTES}
    return {*served.KNOWN, *orders, *_ENGINE_ROUTES} - _OWN_ROUTES


def needed_metrics() -> set[str]:
    """List the metrics that the router reads, without what Prometheus adds to their names."""
    named = {
        name
        for path in sorted((ROOT / "router").rglob("*.py"))
        for name in re.findall(r'"(vllm:[a-z0-9_]+[a-z0-9])"', path.read_text())
    }
    return {re.sub(r"_(total|sum|count|bucket)$", "", name) for name in named}


ASSUMPTIONS: Final[dict[str, Callable[[str, Any, Any], Iterator[Row]]]] = {
    "hashes": _recorded,
    "image_names": _images,
    "events": _events,
    "hit_lengths": _recorded,
    "store_keys": _recorded,
    "flags": _among(lambda: set(VLLM_FLAGS)),
    "routes": _among(needed_routes),
    "metrics": _among(needed_metrics),
    "request_fields": _fields,
    "registries": _registries,
    "texts": _among(lambda: set(TEXTS)),
}


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more


def main() -> None:
    """Print the table."""
    sources = overlay(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    rows = judge(facts_of(None), facts_of(sources))
    print(f"vLLM {version_of(sources)}, compared with {version_of(None)}:\n")
    print(table(("verdict", "kind", "what"), rows) if rows else "nothing has changed")
    num_broken = sum(row.verdict == "breaks" for row in rows)
    print(f"\n{num_broken} assumptions broken, {len(ASSUMPTIONS)} kinds compared")
    sys.exit(num_broken > 0)


if __name__ == "__main__":
    main()
