"""What a stream does as time passes: how long blocks count, and when history is read again."""

from __future__ import annotations

from typing import Final

from router.base.backoff import Backoff

BLIND_AFTER_S: Final = 60.0
"""Without a publisher for so long the candidate's blocks do not count any more."""

REREAD_S: Final = (1.0, 300.0)
"""First and longest pause before history is read again after a batch that was not understood.

The engine may have it in one piece. Once its buffer has lost the batch, the rest is right."""


class Presence:
    """Whether the publisher is there."""

    __slots__ = ("_waits_since_s", "gone_s", "why_silent")

    def __init__(self) -> None:
        self.why_silent: str | None = None  # why there was none, for `BLIND_AFTER_S` or longer
        self.gone_s: float | None = None  # since when it is not there any more
        self._waits_since_s: float | None = None  # for the first one

    def came(self) -> None:
        """Record that it is there."""
        self.gone_s = self._waits_since_s = self.why_silent = None

    def went(self, now_s: float) -> None:
        """Record that it is gone; only the first time counts."""
        if self.gone_s is None:
            self.gone_s = now_s

    def not_heard(self, now_s: float, reason: str) -> None:
        """Record that none has answered so far, and why that may be."""
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        elif now_s - self._waits_since_s >= BLIND_AFTER_S:
            self.why_silent = reason

    def is_lost(self, now_s: float) -> bool:
        """Return whether it is gone for so long that its blocks do not count."""
        return self.gone_s is not None and now_s - self.gone_s >= BLIND_AFTER_S


class Rereading:
    """When history is read again, with growing pauses."""

    __slots__ = ("_backoff", "_due_s")

    def __init__(self) -> None:
        self._backoff = Backoff(*REREAD_S)
        self._due_s: float | None = None  # when history is, or was, read again

    def is_due(self, now_s: float) -> bool:
        """Return whether to read now; the first call begins a pause."""
        due_s = self._due_s
        if due_s is not None and now_s < due_s:
            return False
        if due_s is not None and now_s - due_s > REREAD_S[1]:  # long ago
            self._backoff.reset()
        self._due_s = now_s + self._backoff.next_s()
        return due_s is not None
