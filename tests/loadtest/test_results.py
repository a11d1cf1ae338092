"""Sums of turns, and what the router's headers say."""

from __future__ import annotations

from loadtest.results import TurnResult, summarize


def test_summary_counts_good_turns_only() -> None:
    """Times, tokens and the hit ratio leave failed turns out; nothing at all gives zeros."""
    good = TurnResult(session_id="s", number=0, start_s=1.0, total_s=2.0, ttft_s=0.5,
                      num_prompt_tokens=100, num_cached_tokens=75)  # fmt: skip
    bad = TurnResult(session_id="s", number=1, start_s=4.0, total_s=1.0, error="connect")

    summary = summarize([good, bad])

    assert (summary.num_turns, summary.num_errors, summary.errors) == (2, 1, {"connect": 1})
    assert (summary.hit_ratio, summary.num_computed_tokens) == (0.75, 25)
    assert (summary.ttft_p50_s, summary.ttft_p99_s, summary.total_mean_s) == (0.5, 0.5, 2.0)
    assert summary.span_s == 4.0
    assert summarize([]).hit_ratio == 0.0
