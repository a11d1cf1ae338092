"""An engine's idle time, for prompts whose conversation does not fit its cache.

Where engines have time to spare, computing a prompt again costs no other request anything: such a
prompt need not wait for room. One goes when the engine has been idle for as long as the prompt's
price is (`router.scheduling.queue`) since the last one that went so. Of an engine that is busy all
the time a part counts as idle, or a small price would be waited for as long as a large one.
"""

from __future__ import annotations

from typing import Final

MAX_MS: Final = 300.0
"""What may be left for the next one: about what an engine has ready. Idle time is for prompts that
come while it passes: with more, a crowd goes for what was idle before it came, and each turn of it
throws out what others need for long after."""

BUSY_SHARE: Final = 0.2
"""Of busy time, so much counts as idle. Real engines whose prompts take 0.1 s are hardly ever seen
idle: without it a price of 35 ms was waited for up to 5 s."""


class IdleTime:
    """How long an engine had no prefill at work since a prompt last went for that.

    Of the time in which it had, `BUSY_SHARE` counts. An engine that was never asked has as much as
    may be left.
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
        """Return how long it was idle, with the part of busy time that counts."""
        if self._since_s is None:
            return self._saved_ms
        share = 1.0 if self._is_idle else BUSY_SHARE
        return self._saved_ms + 1e3 * share * max(0.0, now_s - self._since_s)

    def spend(self, price_ms: float, now_s: float) -> None:
        """Let a prompt go for so much, whether it was idle for so long or not."""
        self._saved_ms = min(MAX_MS, self.saved_ms(now_s) - price_ms)
        self._since_s = now_s
