"""How a request ended: what a decision record says, and what health is judged by."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """How a request ended, seen from the replica."""

    OK = "ok"
    CLIENT_ERROR = "client_error"  # 4xx: the client's fault
    CLIENT_GONE = "client_gone"  # the client left before the end
    ROUTER_FAILED = "router_failed"  # we could not send it
    REPLICA_FAILED = "replica_failed"  # 5xx, time-out, broken answer
    OVERDUE = "overdue"  # left for another, its first token being late
    POOL_OVERDUE = "pool_overdue"  # the same, of a request that had to read from the pool
    REPLICA_UNREACHABLE = "replica_unreachable"  # no connection: nothing listens

    @staticmethod
    def of_status(status: int) -> Outcome:
        """Return how a request ended that was answered with a status."""
        if status >= 500:
            return Outcome.REPLICA_FAILED
        return Outcome.CLIENT_ERROR if status >= 400 else Outcome.OK
