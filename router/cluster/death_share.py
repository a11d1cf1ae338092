"""Shares the requests that were at replicas when these went down.

Each router publishes what it notices. It publishes all it knows when another router is found.
"""

from __future__ import annotations

from policies.view import CandidateId
from router.base.messages import Cleared
from router.base.messages import Lost as LostNote
from router.cluster.candidate_names import CandidateNames
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.replicas.deaths import Body, Deaths, Lost


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

    def receive(note: LostNote | Cleared, now_s: float) -> None:
        body = Body(note.body)
        if isinstance(note, Cleared):
            deaths.clear(body, is_told=True)
            return
        candidate = names.candidate_of(note.stream_id)
        replica = candidate.partition("#")[0] if candidate is not None else note.stream_id
        died_s = now_s - note.age_s
        lost = Lost(replica=replica, body=body, is_answered=note.is_answered, died_s=died_s)
        deaths.learn(lost, now_s)

    deaths.on_lost = tell
    deaths.on_cleared = lambda body: outbox.tell(Cleared(body))
    peers.on_lost, peers.on_found = receive, tell_all
