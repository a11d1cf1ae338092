"""router.check.mooncake: each fault of the pool is found, with what to do."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from router.check.finding import Level
from router.check.mooncake import PoolModel, PoolSeen, judge
from router.check.seen import ReplicaSeen
from router.pool.catalog import Unreadable
from tests.check.samples import FIGURES, POOL, RANK, REPLICA, facts, gone, info, named, status

UNKNOWN = PoolModel(name="m", layout=None, num_blocks=0, bytes_per_token=None)


def with_figures(**changes: Any) -> PoolSeen:
    return replace(POOL, figures=replace(FIGURES, **changes))


POOL_CASES: list[tuple[PoolSeen, Level, str, str, str]] = [
    (replace(POOL, figures=None, error="gone"), "error", "reachable", "gone", "--metrics_port"),
    (replace(POOL, num_segments=0), "warning", "contents", "no engine gives", "global_segment"),
    (with_figures(capacity_bytes=0), "warning", "contents", "no engine gives", "recompute"),
    (replace(POOL, list_error="cut"), "warning", "keys", "not listed: cut", "--wait"),
    (replace(POOL, models=(UNKNOWN,)), "note", "keys", "m:", "a prompt"),
    (replace(POOL, num_listed=20), "warning", "tenants", "40 objects exist", "cache_prefix"),
    (
        replace(POOL, unreadable={"m": Unreadable("layouts", "several fit", "pool_layout")}),
        "warning", "layouts", "m: several fit", "pool_layout",
    ),
    (
        replace(POOL, unreadable={"m": Unreadable("data types", "two", "x", engines_fail=True)}),
        "error", "data types", "m: two", "x",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "level", "about", "text", "hint"), POOL_CASES)
def test_each_fault_is_one_finding_with_a_hint(
    seen: PoolSeen, level: Level, about: str, text: str, hint: str
) -> None:
    (found,) = [f for f in judge(seen, [REPLICA]) if f.level != "ok"]
    assert (found.subject, found.level, found.about) == ("pool", level, about)
    assert text in found.text
    assert hint in found.hint


def test_a_pool_in_good_order_is_described() -> None:
    findings = list(judge(POOL, [REPLICA]))

    assert [f.about for f in findings if f.level != "ok"] == []
    texts = " ".join(f.text for f in findings)
    for part in ("40 objects", "2 evicted", "2 objects a block", "2 KiB a token", "take part: r1"):
        assert part in texts, part


def test_an_empty_pool_is_well() -> None:
    empty = replace(with_figures(num_keys=0, allocated_bytes=0), models=(UNKNOWN,), num_listed=0)

    for replicas in ([REPLICA], []):
        findings = list(judge(empty, replicas))
        assert [f.about for f in findings if f.level != "ok"] == []


PLAIN = info(key_head="qwen", weights={"quantization": "none", "dtype": "bfloat16"})
FP8 = info(named("r2"), key_head="qwen", weights={"quantization": "fp8", "dtype": "bfloat16"})


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        (FP8, ["quantization, fp8 (r2), none (r1)"]),
        (replace(FP8, models=()), ["quantization, fp8 (r2), none (r1)"]),
        (named("r2", PLAIN), []),
        (info(FP8, key_head="fp8@qwen", weights={"quantization": "fp8"}), []),
        (info(FP8, key_head=None, weights={"quantization": "fp8"}), []),
        (facts(FP8, block_size=32), []),
        (info(FP8, key_head="qwen"), []),
        (replace(FP8, pool=None), []),
    ],
)
def test_different_weights_with_the_same_object_names_are_an_error(
    other: ReplicaSeen, differing: list[str]
) -> None:
    """Not with another prefix, model, connector, block size or pool."""
    found = [f for f in judge(POOL, [PLAIN, other]) if f.about == "weights"]

    assert [f.level for f in found] == ["error"] * len(differing)
    for finding, text in zip(found, differing, strict=True):
        assert f"qwen: replicas whose weights differ in {text}" in finding.text
        assert "cache_prefix" in finding.hint


def test_members_are_known_by_their_reports() -> None:
    """By their stores, metrics or configuration; others are unproven."""
    silent = replace(REPLICA, ranks=(replace(RANK, num_pooled=0),))
    odd = replace(silent, ranks=(replace(RANK, status=status(algorithm="warmroute")),))
    replicas = [
        facts(named("other", silent), has_pool_connector=True),
        info(named("several", silent), transfers=("nixl", "store")),
        replace(named("off", silent, pool=False), pool=None),
        named("maybe", silent),
        named("gone", gone("x")),
        named("odd", odd),
    ]

    findings = {f.text: f for f in judge(POOL, replicas) if f.about in ("members", "hashes")}

    assert "take part: other, several, odd" in findings
    assert "excluded, as configured: off" in findings
    assert any("unproven: maybe;" in text for text in findings)
    assert any("cannot be computed do not match" in text for text in findings)
