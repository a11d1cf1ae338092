"""Ask a policy; one that fails again and again is replaced, so that requests are answered.

A policy is pure, and so a fault of its code comes back with each prompt of the same kind.
"""

from __future__ import annotations

import logging
from typing import Final

from msgspec import Struct

from policies.policy import Policy
from policies.view import Decision, Snapshot
from router.base.supervisor import blamed

logger = logging.getLogger(__name__)

MOST_FAILURES: Final = 5
"""Failures in a row after which `least_loaded` decides in a policy's place."""


class _Failing(Struct):
    policy: Policy
    num: int = 0
    reason: str = ""


class Deciders:
    """Policies as they are asked, and those that are replaced.

    Args:
        plain: Decides in the place of a policy that fails.
    """

    def __init__(self, plain: Policy) -> None:
        self._failing: dict[int, _Failing] = {}  # by identity
        self._plain = plain

    @property
    def replaced(self) -> list[tuple[str, str]]:
        """Name the policies that failed too often, and why."""
        return [
            (found.policy.name, found.reason)
            for found in self._failing.values()
            if found.num >= MOST_FAILURES
        ]

    def reset(self) -> None:
        """Ask all policies again."""
        self._failing.clear()

    def decide(self, policy: Policy, snapshot: Snapshot) -> tuple[Policy, Decision, int]:
        """Ask a policy, or the one in its place; return which it was, and the replica's position.

        Raises:
            Exception: whatever the policy raises; RuntimeError: it chose what was not offered.
        """
        found = self._failing.get(id(policy)) if self._failing else None
        if found is not None and found.num >= MOST_FAILURES:
            return _asked(self._plain, snapshot)
        try:
            asked = _asked(policy, snapshot)
        except Exception as exc:
            found = self._failing.setdefault(id(policy), _Failing(policy))
            found.num += 1
            found.reason = blamed(exc)
            if found.num == MOST_FAILURES:
                fields = {"policy": policy.name, "reason": found.reason}
                logger.error("policy fails: least_loaded decides in its place", extra=fields)
            raise
        if found is not None:
            del self._failing[id(policy)]
        return asked


def _asked(policy: Policy, snapshot: Snapshot) -> tuple[Policy, Decision, int]:
    decision = policy.decide(snapshot)
    for index, replica in enumerate(snapshot.replicas):
        if replica.id == decision.candidate:
            return policy, decision, index
    raise RuntimeError(f"policy {policy.name!r} chose {decision.candidate!r}, not offered")
