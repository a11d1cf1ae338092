"""The last minutes: how requests ended, and tokens by cause.

Requests: how many, failures by reason, times to first token. Tokens are sampled from the counters
of /metrics.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from itertools import pairwise
from time import monotonic
from typing import Any, Final

from msgspec import Struct, field

from router.base.bounded import Bounded
from router.metrics import Metrics
from router.records.record import CAUSE_WORDS, CAUSES, Outcome, advice_for
from router.request.observer import Facts, Observer

WINDOW_S: Final = 60
_MOST_TIMES: Final = 1_000  # of each second; of more, the first
_MOST_IDS: Final = 10_000
_MOST_REASONS: Final = 5
_OF_OTHERS: Final = frozenset(
    {"unknown_route", "method_not_allowed", "invalid_api_key", Outcome.CLIENT_GONE.value}
)
"""Ends that say nothing of the service: a scanner's, or of a client that left."""


class _Second(Struct):
    number: int
    num_requests: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)


class RecentRequests(Observer):
    """Counts requests by the second in which they ended. A client that left is no failure."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S)
        self._counted: Bounded[str, None] = Bounded(_MOST_IDS)  # ended; some are refused, too

    def ended(self, facts: Facts) -> None:
        self._counted.put(facts.read.request_id, None)
        now = self._now()
        now.num_requests += 1
        if facts.first_s is not None and len(now.ttft_s) < _MOST_TIMES:
            now.ttft_s.append(facts.first_s - facts.read.inbound.arrived_s)
        if facts.outcome not in (Outcome.OK, Outcome.CLIENT_GONE):
            at = f" from {facts.placement.replica}" if facts.placement is not None else ""
            what = str(facts.status) if facts.status >= 400 else facts.outcome.value
            now.failures[what + at] += 1

    def refused(self, request_id: str, code: str) -> None:
        if code in _OF_OTHERS or self._counted.pop(request_id, self) is None:
            return
        now = self._now()
        now.num_requests += 1
        now.failures[code] += 1

    def describe(self) -> dict[str, Any]:
        """Return the figures of the last minute; times in seconds, None where there was none."""
        oldest = int(monotonic()) - WINDOW_S
        seconds = [each for each in self._seconds if each.number > oldest]
        num = sum(each.num_requests for each in seconds)
        failures: Counter[str] = sum((each.failures for each in seconds), Counter())
        times = sorted(time for each in seconds for time in each.ttft_s)
        return {
            "window_s": WINDOW_S,
            "requests": num,
            "failed": sum(failures.values()),
            "failures": [list(each) for each in failures.most_common(_MOST_REASONS)],
            "ttft_p50_s": _at(times, 0.5),
            "ttft_p99_s": _at(times, 0.99),
        }

    def _now(self) -> _Second:
        number = int(monotonic())
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        return self._seconds[-1]


def _at(times: list[float], share: float) -> float | None:
    return round(times[min(len(times) - 1, int(share * len(times)))], 3) if times else None


STEP_S: Final = 10.0
NUM_STEPS: Final = 60

COLUMNS: Final = ("cached", *CAUSES)

_ADVICE: Final = {cause: advice_for(cause) for cause in CAUSES}


class TrafficHistory:
    """Sums every 10 s, for 10 minutes."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        begin = time.time(), self.totals()
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque([begin], maxlen=NUM_STEPS + 1)
        self._due_s = time.monotonic() + STEP_S

    def sweep(self, now_s: float) -> None:
        """Record a sample if it is time."""
        if now_s >= self._due_s:
            self._due_s = now_s + STEP_S
            self._samples.append((time.time(), self.totals()))

    def totals(self) -> tuple[int, ...]:
        """Return the tokens of each of `COLUMNS` since the router began."""
        counted = self._metrics.prompt_tokens.values()
        return tuple([int(counted.get((name,), 0.0)) for name in COLUMNS])

    def describe(self) -> dict[str, Any]:
        """Return totals, and what each step added: `[unix seconds at its end, tokens...]`."""
        samples = [*self._samples, (time.time(), self.totals())]
        steps = [
            [round(at), *[n - m for n, m in zip(after, before, strict=True)]]
            for (_, before), (at, after) in pairwise(samples)
        ]
        return {
            "columns": COLUMNS,
            "words": CAUSE_WORDS,
            "advice": _ADVICE,
            "totals": samples[-1][1],
            "step_s": STEP_S,
            "steps": steps,
        }
