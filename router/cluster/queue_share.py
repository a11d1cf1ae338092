"""Shares what queues have in common: turns that wait, and who is the first that waits for room.

Each router has a queue of its own. Which conversations have room follows from notes on requests.
The rest is here. A wait at another router is no pause of its conversation. A conversation that
gives up its room gives it up everywhere. Nobody passes the first that waits for room at any router.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

from msgspec import Meta, Struct

from router.base.wire_types import Count, Number
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.scheduling.conversations import Conversations
from router.scheduling.elsewhere import Elsewhere

_PAUSE_S: Final = 0.1
"""Shortest pause between two notes on prompts that wait. An empty queue is published at once."""

_REPEAT_S: Final = 5.0
"""While prompts wait, the note is sent again after so long: a router that joins has missed it."""

_NOTE_BYTES: Final = 40
_MOST_S: Final = 86_400.0


class TurnWaits(Struct, frozen=True, array_like=True, tag="turn_waits"):
    """A conversation's next turn waits at a router: its pause is over."""

    session_hash: Number
    has_room: bool = True  # False: its conversation has none, or no longer any


class WaitingNow(Struct, frozen=True, array_like=True, tag="for_room"):
    """How many requests wait for room at a router, and for how long the first one has."""

    num_waiting: Count = 0
    first_age_s: Annotated[float, Meta(ge=-_MOST_S, le=_MOST_S)] = 0.0
    """Negative if its prompt is long: short ones count as earlier."""


class _Waits(NamedTuple):
    num: int
    first_s: float


class QueueShare(Elsewhere):
    """Connects this router's queue with those of others.

    Args:
        conversations: Those whose turns wait at other routers.
    """

    def __init__(self, conversations: Conversations, *, outbox: Outbox, peers: Peers) -> None:
        self._conversations = conversations
        self._outbox = outbox
        self._peers = peers
        self._waiting: dict[str, _Waits] = {}  # by router
        self._published: tuple[int, float | None] = (0, None)
        self._published_s = 0.0
        peers.notes.register(TurnWaits, self._learn_asked)
        peers.notes.register(WaitingNow, self._learn_waits)

    def num_waiting(self) -> int:
        return sum([each.num for each in self._alive()])

    def first_s(self, now_s: float) -> float | None:
        return min([each.first_s for each in self._alive() if each.num], default=None)

    def waits(self, num: int, first_s: float | None, now_s: float) -> None:
        if (num, first_s) == self._published:
            if not num or now_s < self._published_s + _REPEAT_S:
                return
        elif num and now_s < self._published_s + _PAUSE_S:
            return
        self._published, self._published_s = (num, first_s), now_s
        age_s = 0.0 if first_s is None else now_s - first_s
        note = WaitingNow(num, max(-_MOST_S, min(_MOST_S, age_s)))
        self._outbox.tell_later(note, _NOTE_BYTES)

    def asked(self, session: int, *, has_room: bool) -> None:
        self._outbox.tell(TurnWaits(session, has_room))

    def _alive(self) -> list[_Waits]:
        if not self._waiting:
            return []
        return [self._waiting[name] for name in self._peers.routers if name in self._waiting]

    def _learn_asked(self, note: TurnWaits, _: str, now_s: float) -> None:
        self._conversations.asked(note.session_hash, now_s)
        if not note.has_room:
            self._conversations.leave(note.session_hash)

    def _learn_waits(self, note: WaitingNow, router: str, now_s: float) -> None:
        alive = self._peers.routers
        self._waiting = {name: held for name, held in self._waiting.items() if name in alive}
        self._waiting[router] = _Waits(note.num_waiting, now_s - note.first_age_s)
