"""Which candidate answers a request, and which computes its prompt, if replicas have roles.

`policies.decode` chooses a replica of role decode. The configured policy chooses among the replicas
of role prefill for the prompt. The decode replica computes the prompt itself if that costs no more
than reading it, or if there is no other place. Both choices use one snapshot and change nothing.

What must live here: that rule. What must not: what is known of a request, how it is sent. The
router and the simulator both choose by it.
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
    """Where the prompt of a decode replica is computed; times are predictions."""

    choice: C | None  # None: at the decode replica
    why: str
    here_ms: float  # to compute its KV at the decode replica, the delay of others included
    there_ms: float  # to compute it elsewhere and read it


def choose_halves(
    candidates: Sequence[Candidate],
    prefillers: Callable[[Replica, float], Sequence[Candidate]],
    policy: Policy,
    choose: Callable[[Sequence[Candidate], Policy], C],
    why_here: Callable[[C], str | None],
) -> tuple[C, PrefillPlan[C] | None]:
    """Choose where a request is answered and, for a decode replica, where its prompt is computed.

    Args:
        candidates: Those that can answer.
        prefillers: Lists those that may compute the prompt for a decode replica, at that time.
        policy: Places prompts, and requests that one replica computes alone.
        choose: Freezes what is known of some candidates, and has a policy choose among them.
        why_here: Returns why a prompt cannot be computed elsewhere; None: it can.
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
