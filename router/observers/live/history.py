"""Tokens by cause over the last minutes, sampled from the counters of /metrics."""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from typing import Any, Final

from router.metrics import Metrics
from router.records.computed import CAUSES
from router.records.words import CAUSE_WORDS, advice_for

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
