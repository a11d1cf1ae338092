"""Routers without HTTP: fleet, caches, sessions, peers; and notes carried between them by hand."""

from __future__ import annotations

from collections.abc import Sequence

from policies import CandidateId, CostModel, Holding, Policy, RequestView, Snapshot
from router.base.contracts import BlockKey
from router.base.messages import Notes, encode
from router.cluster.candidate_source import CandidateNames
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.cluster.shares import QueueShare
from router.config import ReplicaConfig
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.index.candidate_stream import Claim
from router.kv_events.stream import RankStream
from router.metrics import Metrics
from router.observers.sessions.session_ledger import SessionLedger
from router.observers.sessions.turn_share import share_turns
from router.records.record import Outcome
from router.replicas import Booking, Fleet, Lease, Replica, ServedModel
from router.replicas.registry import Registry
from router.scheduling.conversations import Conversations
from tests.engine import BLOCK_SIZE

UNIT = CostModel(base_ms=0.0, ms_per_token=1.0, ms_per_mtoken2=0.0)
NUM_BLOCKS = 4096


class Node:
    """One router of several. `urls` by local name: two nodes may name their replicas differently.

    Args:
        conversations: Its conversations; None: as many as by default.
        settings: Of `Outbox`.
    """

    def __init__(
        self,
        name: str,
        urls: Sequence[str] = ("x", "y"),
        *,
        conversations: Conversations | None = None,
        **settings: int,
    ) -> None:
        self.registry = Registry([ReplicaConfig(url=f"http://{url}") for url in urls])
        self.fleet = Fleet(prior=UNIT, conversations=conversations)
        self.caches = CacheView(BlockIndex())
        self.conversations = self.fleet.conversations
        self.metrics = Metrics()
        names = CandidateNames(self.registry, self.fleet)
        self.peers = Peers(
            name,
            fleet=self.fleet,
            caches=self.caches,
            conversations=self.conversations,
            names=names,
            metrics=self.metrics,
        )
        self.outbox = Outbox(
            caches=self.caches,
            conversations=self.conversations,
            names=names,
            metrics=self.metrics,
            **settings,
        )
        self.queues = QueueShare(self.fleet.conversations, outbox=self.outbox, peers=self.peers)
        self.ledger = SessionLedger()
        share_turns(
            self.ledger,
            index=self.caches.index,
            names=names,
            outbox=self.outbox,
            peers=self.peers,
        )
        for entry in self.registry.entries:
            self.find(entry.name)

    def find(self, name: str, *, num_ranks: int = 1) -> None:
        """Discover a replica."""
        entry = self.registry.find(name)
        assert entry is not None
        self.fleet.members.add(
            Replica(
                name=name,
                url=entry.replica.url,
                models=(ServedModel(id="m"),),
                num_ranks=num_ranks,
                block_size=BLOCK_SIZE,
                num_blocks=NUM_BLOCKS,
            )
        )
        for status in self.fleet.load.status(0.0):
            if status.replica == name and self.caches.stream(status.id) is None:
                self.caches.add(
                    status.id,
                    RankStream(
                        status.id,
                        self.caches.index,
                        block_size=BLOCK_SIZE,
                        capacity_blocks=NUM_BLOCKS,
                    ),
                )

    def count(self, kind: str) -> float:
        return self.metrics.peer_notes.labels(kind).value

    # -- a request's way ---------------------------------------------------------------------

    def snapshot(self, chain: Sequence[BlockKey], number: int, now_s: float) -> Snapshot:
        candidates = self.fleet.offers.candidates("m", now_s)
        found = self.caches.match(chain, [c.id for c in candidates])
        matches = {
            id_: Holding(m.num_gpu_blocks * BLOCK_SIZE, m.num_cpu_blocks * BLOCK_SIZE)
            for id_, m in found.items()
        }
        return Snapshot(
            now_s=now_s,
            number=number,
            seed=1,
            request=RequestView(num_tokens=len(chain) * BLOCK_SIZE + 1),
            replicas=self.fleet.load.views(candidates, matches, now_s),
        )

    def place(
        self,
        policy: Policy,
        chain: Sequence[BlockKey],
        number: int,
        now_s: float,
    ) -> tuple[Lease, Claim]:
        """Decide as the pipeline does."""
        snapshot = self.snapshot(chain, number, now_s)
        chosen = policy.decide(snapshot).candidate
        return self.begin(chosen, chain, now_s, snapshot)

    def begin(
        self,
        candidate: str,
        chain: Sequence[BlockKey],
        now_s: float,
        snapshot: Snapshot | None = None,
        session_hash: int | None = None,
    ) -> tuple[Lease, Claim]:
        """Send a request to a candidate."""
        shown = snapshot or self.snapshot(chain, 0, now_s)
        view = next(v for v in shown.replicas if v.id == candidate)
        booking = Booking(
            num_uncached_tokens=shown.request.num_tokens - view.num_gpu_tokens,
            num_cached_tokens=view.num_gpu_tokens,
            session_hash=session_hash,
        )
        lease = self.fleet.load.admit(view.id, booking, now_s)
        num_held_blocks = view.num_gpu_tokens // BLOCK_SIZE
        claim = self.caches.claim(view.id, chain, num_held_blocks)
        self.outbox.began(
            lease,
            claim=claim,
            num_held_blocks=num_held_blocks,
            session_hash=session_hash,
        )
        return lease, claim

    def first_token(self, lease: Lease, now_s: float) -> None:
        self.fleet.load.first_token(lease, now_s)
        self.outbox.answered(lease, now_s)

    def end(self, lease: Lease, claim: Claim, now_s: float, outcome: Outcome = Outcome.OK) -> None:
        computed = outcome is Outcome.OK
        self.fleet.load.end(lease, now_s, outcome)
        self.outbox.ended(lease, computed=computed)
        self.caches.release(claim, computed=computed, now_s=now_s)

    # -- notes -------------------------------------------------------------------------------

    def take_notes(self) -> Notes:
        """Take the notes that are due, over the wire."""
        notes = (*self.outbox.take(), *self.outbox.take_later())
        return self.peers.notes.decode(encode(Notes(self.peers.name, notes)))

    def receive(self, *others: Node, now_s: float) -> None:
        """Receive at once the notes of others."""
        for other in others:
            self.peers.apply(other.take_notes(), now_s)

    # -- questions ---------------------------------------------------------------------------

    def load(self, now_s: float) -> dict[str, tuple[int, int, int, float]]:
        """Return requests, waiting ones, their tokens and the queue, by address."""
        return {
            s.url: (s.num_requests, s.num_waiting, s.num_queued_tokens, s.queue_ms)
            for s in self.fleet.load.status(now_s)
        }

    def held(self, candidate: str, chain: Sequence[BlockKey]) -> int:
        """Count the leading blocks that a candidate is thought to have or to compute."""
        id_ = CandidateId(candidate)
        return self.caches.match(chain, [id_])[id_].num_gpu_blocks

    def leftovers(self) -> list[str]:
        """Say what is left of requests, ours and others'."""
        left = [f"{url}: {load}" for url, load in self.load(1e6).items() if any(load)]
        for candidate, num_blocks in self.caches.index.claimed().items():
            left.append(f"{candidate}: claims on {num_blocks} blocks")
        return left


def chain_of(number: int, num_blocks: int, *, shared: int = 0) -> list[BlockKey]:
    """Make a chain; chains of all numbers share the first blocks."""
    own = range(1_000_000 * (number + 1) + shared, 1_000_000 * (number + 1) + num_blocks)
    return [BlockKey(key) for key in (*range(1, shared + 1), *own)]
