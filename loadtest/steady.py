"""A run under constant load in a few numbers: those of a window, after a warm-up.

Turns and sessions count if they end in the window, first tokens if their turn was sent in it. A
driver sends nothing after the window and awaits what is in flight, so the longest wait is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean

from msgspec import Struct

from loadtest.results import TurnResult, percentile
from loadtest.whole_sessions import roots
from loadtest.workload import Workload


class Steady(Struct, frozen=True, kw_only=True):
    """Rates, tokens and times of the window; times in seconds.

    A session takes from its first request to its last answer, pauses included. The first session of
    each lane began in the middle of its life.
    """

    seconds: float
    num_turns: int
    num_errors: int  # of turns that were sent in the window
    output_per_s: float  # tokens
    turns_per_s: float
    num_prompt_tokens: int
    num_computed_tokens: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    longest_wait_s: float
    num_sessions: int
    session_mean_s: float

    @property
    def hits(self) -> float:
        """Share of prompt tokens that came from a cache."""
        if not self.num_prompt_tokens:
            return 0.0
        return 1.0 - self.num_computed_tokens / self.num_prompt_tokens


def steady(turns: Sequence[TurnResult], workload: Workload, begin_s: float, end_s: float) -> Steady:
    """Sum up what happened from `begin_s` to `end_s` of a run of `workload`."""
    good = [turn for turn in turns if turn.error is None]
    ended = [turn for turn in good if begin_s <= turn.start_s + turn.total_s < end_s]
    sent = [turn for turn in turns if begin_s <= turn.start_s < end_s]
    ttfts_s = sorted(turn.ttft_s for turn in sent if turn.ttft_s is not None)
    sessions_s = [
        took_s for took_s, at_s in _ended_sessions(good, workload) if begin_s <= at_s < end_s
    ]
    seconds = end_s - begin_s
    return Steady(
        seconds=seconds,
        num_turns=len(ended),
        num_errors=sum(turn.error is not None for turn in sent),
        output_per_s=sum(turn.num_output_tokens or 0 for turn in ended) / seconds,
        turns_per_s=len(ended) / seconds,
        num_prompt_tokens=sum(turn.num_prompt_tokens or 0 for turn in ended),
        num_computed_tokens=sum(turn.num_computed_tokens for turn in ended),
        ttft_mean_s=fmean(ttfts_s) if ttfts_s else 0.0,
        ttft_p50_s=percentile(ttfts_s, 0.5),
        ttft_p90_s=percentile(ttfts_s, 0.9),
        ttft_p99_s=percentile(ttfts_s, 0.99),
        longest_wait_s=ttfts_s[-1] if ttfts_s else 0.0,
        num_sessions=len(sessions_s),
        session_mean_s=fmean(sessions_s) if sessions_s else 0.0,
    )


def _ended_sessions(
    turns: Iterable[TurnResult], workload: Workload
) -> Iterable[tuple[float, float]]:
    """Yield time and end of each session all of whose turns were answered."""
    root_of = roots({turn.session_id for turn in workload.turns})
    num_left = Counter(root_of[turn.session_id] for turn in workload.turns)
    spans: dict[str, tuple[float, float]] = {}
    for turn in turns:
        root = root_of[turn.session_id]
        num_left[root] -= 1
        begin_s, end_s = spans.get(root, (turn.start_s, 0.0))
        spans[root] = min(begin_s, turn.start_s), max(end_s, turn.start_s + turn.total_s)
    for root, (begin_s, end_s) in spans.items():
        if not num_left[root]:
            yield end_s - begin_s, end_s
