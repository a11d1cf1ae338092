"""Which candidate answers a request, and which computes its prompt, where replicas have roles.

A replica of role decode is chosen by `policies.decode`. Its prompt is computed at a replica of role
prefill, by the configured policy on those alone; or where it is decoded, if that costs no more than
reading it there, or if no other place can be had. Both are chosen from one look, and nothing is
changed.

What must live here: that rule. What must not: what is known of a request, how it is sent. The
router and the simulator choose by it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from msgspec import Struct

from policies.decode import DecodeLoad, local_ms, transfer_ms
from policies.policy import Policy
from policies.view import ReplicaView, Snapshot
from router.replicas.replica import Candidate, Replica

DECODE: Final = DecodeLoad()


class Chosen(Protocol):
    """A decision that changed nothing yet."""

    @property
    def candidate(self) -> Candidate: ...

    @property
    def view(self) -> ReplicaView: ...

    @property
    def snapshot(self) -> Snapshot: ...


C = TypeVar("C", bound=Chosen)


class PrefillPlan(Struct, Generic[C], frozen=True, kw_only=True):
    """Where a prompt is to be computed that a decode replica answers; times are predictions."""

    choice: C | None  # None: where it is decoded
    why: str
    here_ms: float  # to have its KV where it is decoded, computed there; others' delay included
    there_ms: float  # and read there


def choose_halves(
    candidates: Sequence[Candidate],
    prefillers: Callable[[Replica, float], Sequence[Candidate]],
    policy: Policy,
    choose: Callable[[Sequence[Candidate], Policy], C],
    why_here: Callable[[C], str | None],
) -> tuple[C, PrefillPlan[C] | None]:
    """Choose where a request is answered and, if a decode replica does, where its prompt is.

    Args:
        candidates: That can answer.
        prefillers: Lists those that may compute the prompt for a decode replica, at a time.
        policy: Places prompts, and requests that one replica computes alone.
        choose: Freezes what is known of some candidates, and has a policy choose among them.
        why_here: Returns why a prompt cannot be computed elsewhere, whatever it costs, or None.
    """
    decodes = any(candidate.replica.role == "decode" for candidate in candidates)
    choice = choose(candidates, DECODE if decodes else policy)
    replica, snapshot = choice.candidate.replica, choice.snapshot
    if replica.role != "decode":
        return choice, None
    here_ms, there_ms = local_ms(snapshot, choice.view), transfer_ms(snapshot, choice.view)
    why, elsewhere = why_here(choice), None
    if why is None and here_ms <= there_ms:
        why = "cheaper"
    if why is None:
        others = prefillers(replica, snapshot.now_s)
        if others:
            elsewhere = choose(others, policy)
        else:
            why = "no_replica"
    return choice, PrefillPlan(
        choice=elsewhere, why=why or "chosen", here_ms=here_ms, there_ms=there_ms
    )
