"""Shares the state of queues between routers. A router alone shares nothing."""

from __future__ import annotations


class Elsewhere:
    """The queues of other routers, as this router's queue sees them."""

    def num_waiting(self, now_s: float) -> int:
        """Count the requests that wait for room at other routers."""
        return 0

    def first_s(self, now_s: float) -> float | None:
        """Return the place of the first of them, as `LinePosition.key_s`; None: none waits."""
        return None

    def waits(self, num: int, first_s: float | None, now_s: float) -> None:
        """Publish how many wait for room here, and the place of the first; often called."""

    def asked(self, session: int, *, has_room: bool) -> None:
        """Publish that a conversation's next turn has come, and waits here."""


ALONE = Elsewhere()
