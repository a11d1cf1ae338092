"""An engine's idle time, for prompts whose conversation exceeds its cache.

If an engine has idle time, computing a prompt again delays no other request. So such a prompt need
not wait for room. It is sent once the engine has been idle for as long as the prompt costs
(`router.scheduling.queue`). A share of busy time counts as idle: otherwise a fast prompt would wait
as long as a slow one at a busy engine.
"""

from __future__ import annotations

from typing import Final

MAX_MS: Final = 300.0
"""How much idle time is kept for the next prompt: about the work that an engine has ready. With
more, a burst of prompts would use idle time from before it came, and evict what others need
later."""

BUSY_SHARE: Final = 0.2
"""This share of busy time counts as idle. Real engines whose prompts take 0.1 s are hardly ever
seen idle: without it a prompt of 35 ms waited up to 5 s."""


class IdleTime:
    """How long an engine had no prefill since a prompt was last sent for its idle time.

    `BUSY_SHARE` of the other time counts, too. An engine that was never used has `MAX_MS`.
    """

    __slots__ = ("_is_idle", "_saved_ms", "_since_s")

    def __init__(self) -> None:
        self._saved_ms = MAX_MS  # at `_since_s`
        self._since_s: float | None = None  # None: never used
        self._is_idle = True

    def switch(self, is_idle: bool, now_s: float) -> None:
        """Count what follows as idle or busy time."""
        self._saved_ms, self._since_s = self.saved_ms(now_s), now_s
        self._is_idle = is_idle

    def saved_ms(self, now_s: float) -> float:
        """Return how long it was idle, with the share of busy time that counts."""
        if self._since_s is None:
            return self._saved_ms
        share = 1.0 if self._is_idle else BUSY_SHARE
        return self._saved_ms + 1e3 * share * max(0.0, now_s - self._since_s)

    def spend(self, price_ms: float, now_s: float) -> None:
        """Use so much idle time, whether it was there or not."""
        self._saved_ms = min(MAX_MS, self.saved_ms(now_s) - price_ms)
        self._since_s = now_s
