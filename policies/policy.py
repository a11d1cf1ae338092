"""What every policy is."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from policies.view import Decision, Snapshot


class Policy(Struct, frozen=True, kw_only=True):
    """A rule that places one request.

    A policy is an immutable value: its fields are its parameters (units in their descriptions,
    ranges checked by msgspec), its docstring is its documentation. `decide` is pure: the same
    snapshot gives the same decision, in every process. Randomness is a hash of the snapshot's
    seed and number, so a recorded decision can be replayed.
    """

    name: ClassVar[str]

    def decide(self, snapshot: Snapshot) -> Decision:
        """Choose one of `snapshot.replicas`; needs at least one."""
        raise NotImplementedError
