"""Shares what queues have in common: turns that wait, how many, and idle time that one took.

Each router has a queue of its own. A replica's room and window follow from notes on requests. The
rest is here. A wait at another router is no pause of its conversation: if it were, the usual pause
would grow, and with it the room that silent conversations keep. A replica's idle time may be spent
once, whichever router spends it. The price of a prompt grows with all that wait for the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct

from policies.view import CandidateId
from router.base.messages import SharedId
from router.base.wire_types import Count, Number, Seconds
from router.cluster.candidate_names import CandidateNames
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.replicas.elsewhere import Elsewhere
from router.replicas.fleet import Fleet

_PAUSE_S: Final = 0.1
"""Shortest pause between two notes on prompts that wait. An empty queue is published at once."""

_ENTRY_BYTES: Final = 40


class IdleSpent(Struct, frozen=True, array_like=True, tag="idle"):
    """A prompt was sent for so much idle time of a candidate."""

    stream_id: SharedId
    idle_ms: Seconds


class TurnWaits(Struct, frozen=True, array_like=True, tag="turn_waits"):
    """A conversation's next turn waits at a router: its pause is over."""

    session_hash: Number


class WaitingNow(Struct, frozen=True, array_like=True, tag="waits"):
    """How many interactive prompts wait at a router, by candidate; those not named: none."""

    num_waiting: Annotated[tuple[tuple[SharedId, Count], ...], Meta(max_length=65_536)]


class QueueShare(Elsewhere):
    """Connects this router's queue with those of others.

    Args:
        fleet: Whose idle time other routers spend, and whose conversations go on there.
    """

    def __init__(
        self, fleet: Fleet, *, names: CandidateNames, outbox: Outbox, peers: Peers
    ) -> None:
        self._load = fleet.load
        self._conversations = fleet.conversations
        self._names = names
        self._outbox = outbox
        self._peers = peers
        self._waiting: dict[str, dict[CandidateId, int]] = {}  # by router
        self._published: Mapping[CandidateId, int] = {}
        self._published_s = 0.0
        peers.notes.register(TurnWaits, self._learn_asked)
        peers.notes.register(IdleSpent, self._learn_spent)
        peers.notes.register(WaitingNow, self._learn_waits)

    def num_waiting(self, candidate: CandidateId) -> int:
        if not self._waiting:
            return 0
        found = [self._waiting.get(router) for router in self._peers.routers]
        return sum([counts.get(candidate, 0) for counts in found if counts is not None])

    def waits(self, count: Callable[[], Mapping[CandidateId, int]], now_s: float) -> None:
        num_waiting = count()
        if num_waiting == self._published or (num_waiting and now_s < self._published_s + _PAUSE_S):
            return
        self._published, self._published_s = num_waiting, now_s
        named = [(self._names.stream_id_of(id_), num) for id_, num in num_waiting.items()]
        note = WaitingNow(tuple([(name, num) for name, num in named if name is not None]))
        self._outbox.tell_later(note, _ENTRY_BYTES * (1 + len(named)))

    def asked(self, session: int) -> None:
        self._outbox.tell(TurnWaits(session))

    def spent(self, candidate: CandidateId, idle_ms: float) -> None:
        stream_id = self._names.stream_id_of(candidate)
        if stream_id is not None:
            self._outbox.tell(IdleSpent(stream_id, idle_ms))

    def _learn_asked(self, note: TurnWaits, _: str, now_s: float) -> None:
        self._conversations.asked(note.session_hash, now_s)

    def _learn_spent(self, note: IdleSpent, _: str, now_s: float) -> None:
        candidate = self._names.candidate_of(note.stream_id)
        if candidate is not None:
            self._load.spend_idle_time(candidate, note.idle_ms, now_s)

    def _learn_waits(self, note: WaitingNow, router: str, _: float) -> None:
        named = [(self._names.candidate_of(name), num) for name, num in note.num_waiting]
        alive = self._peers.routers
        self._waiting = {name: held for name, held in self._waiting.items() if name in alive}
        self._waiting[router] = {id_: num for id_, num in named if id_ is not None}
