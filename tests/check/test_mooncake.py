"""router.check.mooncake: what is wrong with the pool is found, with what to do."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from router.check.finding import Level
from router.check.mooncake import PatternSeen, PoolSeen, differing_weights, judge
from router.check.replica import ReplicaSeen
from router.pool.catalog import Unreadable
from tests.check.samples import POOL, RANK, REPLICA

POOL_CASES: list[tuple[PoolSeen, Level, str, str, str]] = [
    (replace(POOL, error="gone"), "error", "reachable", "gone", "--metrics_port"),
    (replace(POOL, num_segments=0), "warning", "contents", "no engine gives", "global_segment"),
    (replace(POOL, max_bytes=0), "warning", "contents", "no engine gives", "recompute"),
    (replace(POOL, list_error="cut"), "warning", "keys", "not listed: cut", "--wait"),
    (replace(POOL, models=(PatternSeen(model="m", text=None),)), "note", "keys", "m:", "a prompt"),
    (replace(POOL, num_listed=20), "warning", "tenants", "40 objects exist", "cache_prefix"),
]


@pytest.mark.parametrize(("seen", "level", "about", "text", "hint"), POOL_CASES)
def test_what_is_wrong_with_the_pool_is_found(
    seen: PoolSeen, level: Level, about: str, text: str, hint: str
) -> None:
    """Beside the usual note on load failures."""
    findings = [f for f in judge(seen, [REPLICA]) if f.about != "load failures"]

    (found,) = [f for f in findings if f.level != "ok"]
    assert (found.subject, found.level, found.about) == ("pool", level, about)
    assert text in found.text
    assert hint in found.hint


def test_a_pool_as_it_should_be_has_one_note() -> None:
    """What engines do when an object vanishes cannot be seen: every report has it."""
    findings = list(judge(POOL, [REPLICA]))

    assert [(f.level, f.about) for f in findings if f.level != "ok"] == [("note", "load failures")]
    assert findings[-1].hint.startswith('"kv_load_failure_policy": "recompute"')
    texts = " ".join(f.text for f in findings)
    for part in ("40 objects", "2 evicted", "2 objects a block", "2 KiB a token", "take part: r1"):
        assert part in texts, part


def test_an_empty_pool_is_well() -> None:
    """Nothing is there that could be known."""
    empty = replace(
        POOL,
        num_objects=0,
        num_evicted=None,
        used_bytes=0,
        models=(PatternSeen(model="m", text=None), PatternSeen(model="n", text="n@", num_ranks=1)),
    )

    for replicas in ([REPLICA], []):
        findings = list(judge(empty, replicas))

        assert [f.about for f in findings if f.level != "ok"] == ["load failures"]


def test_blocks_that_are_not_credited_are_reported_with_the_reason() -> None:
    """An error if engines fail, too."""
    reasons = (
        ("m", Unreadable("layouts", "several fit", "pool_layout")),
        ("n", Unreadable("data types", "two types", "cache_prefix", engines_fail=True)),
    )
    found = list(judge(replace(POOL, unreadable=reasons), [REPLICA]))

    assert [(f.level, f.about, f.text, f.hint) for f in found if f.text[:3] in ("m: ", "n: ")] == [
        ("warning", "layouts", "m: several fit", "pool_layout"),
        ("error", "data types", "n: two types", "cache_prefix"),
    ]


def test_weights_that_share_names_are_an_error() -> None:
    """Engines would answer by another model's KV; the field and whose it is are named."""
    pool = replace(POOL, weights=(("qwen", "dtype", "bfloat16 (r1), float16 (r2)"),))
    (found,) = [f for f in judge(pool, [REPLICA]) if f.level == "error"]

    assert found.about == "weights"
    assert "qwen: replicas whose weights differ in dtype, bfloat16 (r1), float16 (r2)" in found.text
    assert "cache_prefix" in found.hint


PLAIN = replace(REPLICA, key_head="qwen", weights={"quantization": "none", "dtype": "bfloat16"})
FP8 = replace(PLAIN, name="r2", weights={"quantization": "fp8", "dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        (FP8, [("qwen", "quantization", "fp8 (r2), none (r1)")]),
        (replace(FP8, models=()), [("qwen", "quantization", "fp8 (r2), none (r1)")]),
        (replace(PLAIN, name="r2"), []),
        (replace(FP8, key_head="fp8@qwen"), []),
        (replace(FP8, key_head=None), []),
        (replace(FP8, block_size=32), []),
        (replace(FP8, weights={}), []),
    ],
)
def test_weights_may_differ_where_objects_are_not_named_alike(
    other: ReplicaSeen, differing: list[tuple[str, str, str]]
) -> None:
    """Of another prefix, model, connector or block size; whatever the models are served as."""
    assert list(differing_weights([PLAIN, other])) == differing


def test_members_are_known_by_their_word_or_taken_for_such() -> None:
    """By their stores, their metrics, the configuration; the rest is only believed."""
    silent = replace(REPLICA, ranks=(replace(RANK, num_pooled=0),))
    replicas = [
        replace(silent, name="other", has_pool_connector=True),
        replace(silent, name="several", transfers=("nixl", "store")),
        replace(silent, name="off", pool=None, reads_pool=False),
        replace(silent, name="maybe"),
        replace(silent, name="gone", error="x"),
        replace(silent, name="odd", ranks=(replace(RANK, algorithm="warmroute"),)),
    ]

    findings = {f.text: f for f in judge(POOL, replicas) if f.about in ("members", "hashes")}

    assert "take part: other, several, odd" in findings
    assert "excluded, as configured: off" in findings
    assert any("unproven: maybe;" in text for text in findings)
    assert any("cannot be computed do not match" in text for text in findings)
