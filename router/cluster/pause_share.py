"""Tells other routers that a replica was paused, resumed, or ordered to sleep or wake up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from policies.view import CandidateId
from router.base.messages import SharedId
from router.cluster.candidate_names import CandidateNames
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.replicas.entry import Ordered


class OrderNote(Struct, frozen=True, array_like=True, tag="ordered"):
    """A replica confirmed an order; see `Ordered`. `state` None: its metrics say it."""

    stream_id: SharedId
    state: Literal["paused", "awake"] | None
    is_lost: bool


def share_pauses(
    follow: Callable[[Ordered, float], None],
    *,
    names: CandidateNames,
    outbox: Outbox,
    peers: Peers,
) -> Callable[[Ordered], None]:
    """Follow the orders of other routers; return what tells them one of this router's."""

    def tell(order: Ordered) -> None:
        stream_id = names.stream_id_of(CandidateId(order.replica))
        if stream_id is not None:
            outbox.tell(OrderNote(stream_id, order.state, order.is_lost))

    def learn(note: OrderNote, router: str, now_s: float) -> None:
        candidate = names.candidate_of(note.stream_id)
        if candidate is not None:
            replica = candidate.partition("#")[0]
            follow(Ordered(replica, note.state, note.is_lost), now_s)

    peers.notes.register(OrderNote, learn)
    return tell
