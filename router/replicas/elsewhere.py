"""Shares the state of queues between routers. A router alone shares nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from policies.view import CandidateId


class Elsewhere:
    """The queues of other routers, as this router's queue sees them."""

    def num_waiting(self, candidate: CandidateId) -> int:
        """Count the interactive prompts that wait for a candidate at other routers."""
        return 0

    def waits(self, count: Callable[[], Mapping[CandidateId, int]], now_s: float) -> None:
        """Publish how many interactive prompts wait here, by candidate; often called."""

    def asked(self, session: int) -> None:
        """Publish that a conversation's next turn has come, and waits here."""

    def spent(self, candidate: CandidateId, idle_ms: float) -> None:
        """Publish that a prompt was sent for so much idle time of a candidate."""


ALONE = Elsewhere()
