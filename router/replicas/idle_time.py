"""An engine's idle time, saved up for prompts whose conversation does not fit its cache.

Where engines have time to spare, computing a prompt again costs no other request anything: such a
prompt need not wait for room. But an engine that is always busy answers late, so a share of all
time is kept back. The figures are those of a study on simulated engines (docs/studies.md).
"""

from __future__ import annotations

from typing import Final

MAX_MS: Final = 300.0
"""Saved up at most: about what an engine has ready. Idle time is for prompts that come while it
passes: with ten times as much, a crowd goes for what was idle before it came, and each turn of it
throws out what others need for long after."""

_KEPT: Final = 0.15  # share of all time that is not saved: the engine is to stay idle for so long


class IdleTime:
    """How long an engine had no prefill at work, beyond the share that is kept back.

    Idle time adds to it, busy time takes off, down to `-MAX_MS`; spending may take more, which is
    owed then. An engine that was never asked has all that can be saved.
    """

    __slots__ = ("_is_idle", "_saved_ms", "_since_s")

    def __init__(self) -> None:
        self._saved_ms = MAX_MS  # at `_since_s`
        self._since_s: float | None = None  # None: never asked
        self._is_idle = True

    def switch(self, is_idle: bool, now_s: float) -> None:
        """Count what follows as idle or busy time."""
        self._saved_ms, self._since_s = self.saved_ms(now_s), now_s
        self._is_idle = is_idle

    def saved_ms(self, now_s: float) -> float:
        """Return what is saved up; negative: what is owed."""
        if self._since_s is None:
            return self._saved_ms
        passed_ms = 1e3 * max(0.0, now_s - self._since_s)
        if self._is_idle:
            return min(MAX_MS, self._saved_ms + (1.0 - _KEPT) * passed_ms)
        return max(min(-MAX_MS, self._saved_ms), self._saved_ms - _KEPT * passed_ms)

    def can_spend(self, price_ms: float, now_s: float) -> bool:
        """Return whether there is so much; of a price above what can be saved: all that can."""
        return self.saved_ms(now_s) >= min(price_ms, MAX_MS)

    def spend(self, price_ms: float, now_s: float) -> None:
        """Take a price off, whether there is so much or not."""
        self._saved_ms, self._since_s = self.saved_ms(now_s) - price_ms, now_s
