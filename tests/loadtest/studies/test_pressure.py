from __future__ import annotations

import pytest
from msgspec.structs import replace

from loadtest.studies import pressure
from loadtest.studies.pressure import SETUP, points, report, siblings, zipf
from loadtest.studies.pressure_map import Point


def test_the_working_set_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of a quarter of the caches fit, of eight times the caches do not."""
    assert SETUP.num_blocks is not None
    cache_blocks = SETUP.num_blocks * SETUP.num_replicas

    for ratio in (0.25, 8.0):
        # Requests enough that even, without skew, nearly all contexts are asked for.
        monkeypatch.setattr(pressure, "NUM_REQUESTS", 4000)
        drawn = zipf(ratio, 0.0, 0)
        contexts = {turn.hash_ids[:16] for turn in drawn.turns}
        assert 16 * len(contexts) == pytest.approx(ratio * cache_blocks, rel=0.1)


def test_siblings_share_what_is_new() -> None:
    """A burst's members have most of their blocks in common, with no other burst."""
    drawn = siblings(4, 0)

    first, second = drawn.turns[0], drawn.turns[1]
    common = set(first.hash_ids) & set(second.hash_ids)
    assert len(common) > 0.9 * len(first.hash_ids)


def test_map_and_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point for every policy and setting; on bursts one more, without speculation."""
    monkeypatch.setattr(pressure, "NUM_REQUESTS", 48)
    monkeypatch.setattr(pressure, "SEEDS", (0,))
    monkeypatch.setattr(pressure, "SKEWS", (0.0,))
    monkeypatch.setattr(pressure, "RATIOS", (0.25, 1.0))
    monkeypatch.setattr(pressure, "NUM_SIBLINGS", (4,))
    monkeypatch.setattr(pressure, "SETUP", replace(SETUP, num_replicas=2, num_blocks=100))

    found = points()

    assert len(found) == 2 * len(pressure.POLICIES) + len(pressure.POLICIES) + 1
    assert all(0.0 <= point.good_ratio <= 1.0 and point.ttft_mean_s > 0.0 for point in found)
    text = report(found)
    assert "| policy | 0.25x caches | 1x caches |" in text
    assert f"`{pressure.NO_SPECULATION}`" in text


def test_speculation_is_what_keeps_siblings_together() -> None:
    """Without it members of a burst scatter, and their prefix is computed again and again."""
    drawn = siblings(8, 0)
    drawn = replace(drawn, turns=drawn.turns[:160])
    pair = pressure._points(
        "siblings", 8, [drawn], ("kv_aware", pressure.NO_SPECULATION), lambda num: None
    )

    with_it, without = pair
    assert isinstance(with_it, Point)
    assert with_it.num_computed_tokens < 0.8 * without.num_computed_tokens
