"""Differences with their spread: what may be called one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.demo.compare import compare, num_differing_prompts
from tests.loadtest.demo_samples import made_run, turn


def test_same_results_are_no_difference() -> None:
    """A policy against itself: ratio 1, within the spread."""
    results = made_run("a").results

    found = compare("mean TTFT", "a", "b", [results], [results])

    assert found is not None
    assert found.ratio == found.low == found.high == 1.0
    assert found.verdict == "within the spread"


def test_half_in_every_session_is_less_and_the_other_way_more() -> None:
    """What holds for every session holds for any draw of them."""
    ours, theirs = made_run("a", ttft_s=0.1).results, made_run("b", ttft_s=0.2).results

    less = compare("mean TTFT", "a", "b", [ours], [theirs])
    more = compare("mean TTFT", "b", "a", [theirs], [ours])

    assert less is not None
    assert more is not None
    assert less.verdict == "less"
    assert more.verdict == "more"
    assert round(less.ratio, 6) == 0.5


def test_one_session_does_not_make_a_difference() -> None:
    """A total that one session carries is within the spread."""
    theirs = [turn(f"s{s}", 0, ttft_s=5.0 if s == 0 else 0.1) for s in range(20)]
    ours = [turn(f"s{s}", 0, ttft_s=0.1) for s in range(20)]

    found = compare("mean TTFT", "a", "b", [ours], [theirs])

    assert found is not None
    assert found.ratio < 0.5
    assert found.verdict == "within the spread"


def test_repetitions_must_agree() -> None:
    """One seed out of three that says otherwise, and the difference is spread."""
    fast, slow = made_run("a", ttft_s=0.1).results, made_run("b", ttft_s=0.2).results

    found = compare("mean TTFT", "a", "b", [fast, fast, slow], [slow, slow, fast])

    assert found is not None
    assert found.repetitions == (0.5, 0.5, 2.0)
    assert found.verdict == "within the spread"


def test_only_turns_that_succeeded_under_both_count() -> None:
    """A turn that failed under one policy makes neither look better."""
    ours = [turn("s0", 0, cached=500), turn("s0", 1, error="timeout"), turn("s1", 0, cached=500)]
    theirs = [turn("s0", 0, cached=0), turn("s0", 1, cached=0), turn("s1", 0, error="timeout")]

    found = compare("recomputed tokens", "a", "b", [ours], [theirs])

    assert found is not None
    assert found.ratio == 0.5


def test_sub_agents_count_with_their_parent() -> None:
    """Sessions are drawn as wholes: one root is one unit, so the interval has no width."""
    ours = [turn("s0", 0, ttft_s=0.1), turn("s0.1.0", 0, ttft_s=0.9)]
    theirs = [turn("s0", 0, ttft_s=0.2), turn("s0.1.0", 0, ttft_s=0.3)]

    found = compare("mean TTFT", "a", "b", [ours], [theirs])

    assert found is not None
    assert found.low == found.high == found.ratio


def test_nothing_to_compare_is_nothing() -> None:
    """No common turn, or nothing recomputed at all: no ratio."""
    failed = [turn("s0", 0, error="timeout")]
    all_cached = [turn("s0", 0, cached=1000)]

    assert compare("mean TTFT", "a", "b", [failed], [failed]) is None
    assert compare("recomputed tokens", "a", "b", [all_cached], [all_cached]) is None
    assert compare("mean turn", "a", "b", [], []) is None


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 10.0), min_size=2, max_size=30), st.integers(0, 2**31))
def test_interval_is_an_interval_and_the_seed_decides(ttfts: list[float], seed: int) -> None:
    """The interval is ordered, and the same seed draws the same."""
    ours = [turn(f"s{s}", 0, ttft_s=ttft) for s, ttft in enumerate(ttfts)]
    theirs = [turn(f"s{s}", 0, ttft_s=1.0) for s in range(len(ttfts))]

    found = compare("mean TTFT", "a", "b", [ours], [theirs], seed=seed)

    assert found is not None
    assert min(ttfts) * 0.999 <= found.low <= found.high <= max(ttfts) * 1.001
    assert found == compare("mean TTFT", "a", "b", [ours], [theirs], seed=seed)


def test_another_prompt_under_another_policy_is_noticed() -> None:
    """Lengths of prompt and reply must be the same in every run; failed turns say nothing."""
    one = [turn("s0", 0), turn("s0", 1, prompt=1200), turn("s1", 0)]
    two = [turn("s0", 0), turn("s0", 1, prompt=1300), turn("s1", 0, error="timeout")]

    assert num_differing_prompts([one, one]) == 0
    assert num_differing_prompts([one, two]) == 1
