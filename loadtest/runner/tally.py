"""Running figures of one run, for those who wait: cheap enough to keep at every turn."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import Final

from loadtest import results
from loadtest.results import TurnResult

RECENT_S: Final = 10.0


class Tally:
    """Counts turns as they are sent and done. Warm-up turns are counted, but not timed.

    Set by the run: `elapsed_s`, and `span_s` (when an open loop's last turn is due).
    """

    __slots__ = ("_lates", "_recent", "_ttfts", "elapsed_s", "errors", "label",
                 "num_cached_tokens", "num_done", "num_prompt_tokens", "num_sent", "span_s",
                 "total_turns")  # fmt: skip

    def __init__(self, label: str, total_turns: int, span_s: float | None = None) -> None:
        self.label = label
        self.total_turns = total_turns
        self.span_s = span_s
        self.num_sent = 0
        self.num_done = 0
        self.errors: dict[str, int] = {}
        self.num_prompt_tokens = 0  # of turns whose cached tokens are known
        self.num_cached_tokens = 0
        self.elapsed_s = 0.0
        self._ttfts: list[float] = []
        self._lates: list[float] = []
        self._recent: deque[tuple[float, float]] = deque()  # when done, first-token time

    @property
    def num_in_flight(self) -> int:
        """Count the turns that were sent and are not done."""
        return max(0, self.num_sent - self.num_done)

    @property
    def num_errors(self) -> int:
        """Count the turns that failed."""
        return sum(self.errors.values())

    @property
    def num_recomputed_tokens(self) -> int:
        """Count the prompt tokens that were in no cache."""
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def hit_ratio(self) -> float | None:
        """Cached tokens among prompt tokens; None: not known yet."""
        if not self.num_prompt_tokens:
            return None
        return self.num_cached_tokens / self.num_prompt_tokens

    def send(self) -> None:
        """Count a turn that is sent."""
        self.num_sent += 1

    def advance(self, num_turns: int) -> None:
        """Count turns that are done and whose results come later; may be called in a thread."""
        self.num_done += num_turns

    def add(self, result: TurnResult, *, advances: bool = True) -> None:
        """Take a turn's result; without `advances` it was counted before."""
        self.num_done += advances
        insort(self._lates, result.late_s)
        if result.error is not None:
            self.errors[result.error] = self.errors.get(result.error, 0) + 1
            return
        if result.is_warm_up:
            return
        if result.num_cached_tokens is not None and result.num_prompt_tokens is not None:
            self.num_prompt_tokens += result.num_prompt_tokens
            self.num_cached_tokens += result.num_cached_tokens
        if result.ttft_s is not None:
            insort(self._ttfts, result.ttft_s)
            self._recent.append((self.elapsed_s, result.ttft_s))

    def ttft_s(self, share: float) -> float | None:
        """Pick a percentile of all first-token times; None before the first."""
        return percentile(self._ttfts, share)

    def recent_ttfts(self) -> list[float]:
        """Sort the first-token times of the turns done within the last `RECENT_S` seconds."""
        while self._recent and self._recent[0][0] < self.elapsed_s - RECENT_S:
            self._recent.popleft()
        return sorted(ttft_s for _, ttft_s in self._recent)

    def late_s(self, share: float) -> float | None:
        """Pick a percentile of the driver's own lateness; None before the first."""
        return percentile(self._lates, share)

    def left_s(self) -> float | None:
        """Estimate how long it will take still; None: too early to say.

        Open loop: until the last turn is due. Closed loop: as the turns so far took.
        """
        if self.span_s is not None:
            return max(0.0, self.span_s - self.elapsed_s)
        if not self.num_done:
            return None
        return self.elapsed_s / self.num_done * max(0, self.total_turns - self.num_done)


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Pick the nearest-rank percentile of sorted values; None of none: unknown is no 0."""
    return results.percentile(ordered, share) if ordered else None
