"""Shares the requests that were at replicas when these went down.

Each router publishes what it notices. It publishes all it knows when another router is found.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from policies.view import CandidateId
from router.base.messages import SharedId
from router.base.wire_types import Seconds
from router.cluster.candidate_names import CandidateNames
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.replicas.deaths import Body, Deaths, Lost

Digest = Annotated[bytes, Meta(min_length=1, max_length=32)]


class LostNote(Struct, frozen=True, array_like=True, tag="lost"):
    """A request was at a replica that was found down `age_s` ago; see router.replicas.deaths."""

    stream_id: SharedId
    body: Digest
    is_answered: bool
    age_s: Seconds


class ClearedNote(Struct, frozen=True, array_like=True, tag="cleared"):
    """A request that was lost has been answered, or an operator allows it."""

    body: Digest


def share_deaths(deaths: Deaths, *, names: CandidateNames, outbox: Outbox, peers: Peers) -> None:
    """Connect the deaths of this router with those of others."""

    def tell(lost: Lost, now_s: float) -> None:
        stream_id = names.stream_id_of(CandidateId(lost.replica))
        if stream_id is not None:
            age_s = max(0.0, now_s - lost.died_s)
            outbox.tell(LostNote(stream_id, lost.body, lost.is_answered, age_s))

    def tell_all(now_s: float) -> None:
        for lost in deaths.all_lost():
            tell(lost, now_s)

    def learn(note: LostNote, router: str, now_s: float) -> None:
        candidate = names.candidate_of(note.stream_id)
        replica = candidate.partition("#")[0] if candidate is not None else note.stream_id
        died_s = now_s - note.age_s
        body = Body(note.body)
        lost = Lost(replica=replica, body=body, is_answered=note.is_answered, died_s=died_s)
        deaths.learn(lost, now_s)

    def clear(note: ClearedNote, router: str, now_s: float) -> None:
        deaths.clear(Body(note.body), is_told=True)

    deaths.on_lost = tell
    deaths.on_cleared = lambda body: outbox.tell(ClearedNote(body))
    peers.on_found = tell_all
    peers.notes.register(LostNote, learn)
    peers.notes.register(ClearedNote, clear)
