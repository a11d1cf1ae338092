"""One simulated router: the live one's fleet, caches and sessions, and its way to a decision.

What must live here: matching, deciding and observing as in `router.data_path.pipeline`, as far as
they concern placing. What must not: engines, the order of events. The objects are the router's
own; only their inputs are simulated. The pool's contents are known exactly, as verification
makes them live.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from loadtest.simulator.setup import Setup
from loadtest.simulator.stream import SimulatedStream
from policies.cost import costs_of
from policies.policy import Policy
from policies.view import CandidateCost, CandidateId, Decision, ReplicaView, RequestView, Snapshot
from router.contracts import BlockKey, HashContract
from router.index.block_index import NO_BLOCKS, BlockIndex
from router.index.cache_view import CacheView, Claim
from router.records.outcome import Outcome
from router.replicas.fleet import NO_MATCH, Fleet, Match
from router.replicas.ledger import Booking, Lease
from router.replicas.replica import Replica, ServedModel
from router.replicas.sessions import Sessions
from router.scheduling.queue import Queue

_EXPIRE_EVERY_S = 1.0  # as router.run does


class Ask(Struct, frozen=True, gc=False):
    """A request as a router sees it: the keys of its full blocks, its tokens, its session."""

    keys: Sequence[BlockKey]
    num_tokens: int
    session_hash: int


class Choice(Struct, frozen=True, gc=False):
    """A decision that changed nothing yet."""

    ask: Ask
    decision: Decision
    snapshot: Snapshot
    view: ReplicaView  # of the chosen one

    def costs(self) -> tuple[CandidateCost, ...]:
        return costs_of(self.decision, self.snapshot)


class Placement(Struct, frozen=True, gc=False):
    """A decision that counts, and what has to be given back."""

    replica: int
    decision: Decision
    snapshot: Snapshot
    lease: Lease
    claim: Claim
    num_gpu_tokens: int  # predicted to be reused from the replica's cache
    num_pool_tokens: int  # and beyond those from the pool


class Note(Struct, frozen=True, gc=False):
    """What another router learns of a placement: `router.messages.Began`."""

    ask: Ask
    candidate: CandidateId
    booking: Booking
    num_held_blocks: int


class Router:
    """Decides by a policy, on what it knows."""

    def __init__(self, policy: Policy, setup: Setup, block_size: int) -> None:
        self._policy = policy
        self._seed = setup.seed
        self._model = setup.model
        self._speculates = setup.speculates
        self._block_size = block_size
        self._num_first_blocks = max(1, setup.first_blocks_tokens // block_size)
        self.num_decisions = 0
        self._fleet = Fleet()
        self._sessions = Sessions()
        index = BlockIndex()
        self._caches = CacheView(index)
        self._expire_s = 0.0
        num_blocks = setup.cache_blocks(block_size)
        contract = HashContract(algorithm="warmroute", block_size=block_size)
        self.streams: list[SimulatedStream] = []
        for number in range(setup.num_replicas):
            replica = Replica(
                name=f"r{number + 1}",
                url=f"http://r{number + 1}",
                models=(ServedModel(id=setup.model),),
                block_size=block_size,
                num_blocks=num_blocks,
                publishes_events=True,
            )
            self._fleet.add(replica)
            stream = SimulatedStream(
                CandidateId(replica.name), index, contract=contract, capacity_blocks=num_blocks
            )
            self._caches.add(stream.candidate, stream)
            self.streams.append(stream)
        self._ids = [stream.candidate for stream in self.streams]
        self._number_of = {id_: number for number, id_ in enumerate(self._ids)}
        self.queue: Queue[Choice] | None = None
        if setup.queue is not None:
            self.queue = Queue(
                setup.queue,
                self._fleet.working_sets,
                idle_s=self._fleet.idle_s,
                capacity=self._fleet.capacity_tokens,
            )

    def choose(self, ask: Ask, num_pool_blocks: int | None, now_s: float) -> Choice:
        """Decide where a request would go now.

        `num_pool_blocks`: leading blocks that the pool has; None: there is no pool.
        """
        self._catch_up(now_s)
        snapshot = self._snapshot(ask, num_pool_blocks, now_s)
        decision = self._policy.decide(snapshot)
        number = self._number_of[decision.candidate]
        return Choice(ask, decision, snapshot, snapshot.replicas[number])

    def place(self, choice: Choice, now_s: float) -> Placement:
        """Send a request where it was chosen to go; from here on its load and its blocks count."""
        ask, decision, snapshot, view = choice.ask, choice.decision, choice.snapshot, choice.view
        self.num_decisions += 1
        num_pooled = max(0, (snapshot.num_pool_tokens or 0) - _own_tokens(view))
        num_cached = _own_tokens(view) + num_pooled
        booking = Booking(
            num_uncached_tokens=max(ask.num_tokens - num_cached, 0),
            num_cached_tokens=num_cached,
            num_fetched_tokens=num_cached - view.num_gpu_tokens,
            session_hash=ask.session_hash,
            is_from_pool=num_pooled > 0,
        )
        lease = self._fleet.admit(view.id, booking, now_s)
        num_held_blocks = view.num_gpu_tokens // self._block_size
        claim = self._claim(view.id, ask, num_held_blocks)
        self._sessions.note(ask.session_hash, view.id, now_s)
        return Placement(
            replica=self._number_of[view.id],
            decision=decision,
            snapshot=snapshot,
            lease=lease,
            claim=claim,
            num_gpu_tokens=view.num_gpu_tokens,
            num_pool_tokens=num_pooled,
        )

    def first_token(self, placement: Placement, now_s: float) -> None:
        """Note a first token, and learn from its time."""
        self._fleet.first_token(placement.lease, now_s)

    def end(self, placement: Placement, now_s: float) -> None:
        """Release a request's claims."""
        self._fleet.end(placement.lease, now_s, Outcome.OK)
        self._caches.release(placement.claim, computed=True, now_s=now_s)

    # -- other routers' requests ---------------------------------------------------------------

    def note_of(self, ask: Ask, placement: Placement) -> Note:
        """Return what other routers learn of a placement."""
        lease = placement.lease
        return Note(
            ask=ask,
            candidate=lease.candidate,
            booking=replace(lease.booking, is_ours=False),
            num_held_blocks=placement.num_gpu_tokens // self._block_size,
        )

    def began_elsewhere(self, note: Note, now_s: float) -> tuple[Lease, Claim]:
        """Book what another router sent, as `router.cluster.peers` does."""
        lease = self._fleet.admit(note.candidate, note.booking, now_s)
        claim = self._claim(note.candidate, note.ask, note.num_held_blocks)
        self._sessions.note(note.ask.session_hash, note.candidate, now_s)
        return lease, claim

    def answered_elsewhere(self, lease: Lease, ttft_s: float, now_s: float) -> None:
        """Note the first token of another router's request."""
        self._fleet.first_token_elsewhere(lease, now_s, 1e3 * ttft_s)

    def ended_elsewhere(self, lease: Lease, claim: Claim, now_s: float) -> None:
        """Release another router's lease and claim."""
        self._fleet.end(lease, now_s, None)
        self._caches.release(claim, computed=True, now_s=now_s)

    # -- inside ----------------------------------------------------------------------------------

    def _claim(self, candidate: CandidateId, ask: Ask, num_held_blocks: int) -> Claim:
        num_claimed_from = num_held_blocks if self._speculates else len(ask.keys)
        return self._caches.claim(candidate, ask.keys, num_claimed_from)

    def _catch_up(self, now_s: float) -> None:
        for stream in self.streams:
            stream.catch_up(now_s)
        if now_s >= self._expire_s:
            self._caches.expire_claims(now_s)
            self._expire_s = now_s + _EXPIRE_EVERY_S

    def _snapshot(self, ask: Ask, num_pool_blocks: int | None, now_s: float) -> Snapshot:
        size = self._block_size
        candidates = self._fleet.candidates(self._model, now_s)
        session = self._sessions.get(ask.session_hash, now_s)
        first_blocks = ask.keys[: self._num_first_blocks]
        sets = self._fleet.working_sets
        sets.expire(now_s)
        return Snapshot(
            now_s=now_s,
            number=self.num_decisions,
            seed=self._seed,
            request=RequestView(
                num_tokens=ask.num_tokens,
                session_hash=ask.session_hash,
                session_candidate=session.candidate if session is not None else None,
                first_blocks_hash=first_blocks[-1] if first_blocks else None,
            ),
            replicas=self._fleet.views(candidates, self._match(ask), now_s),
            num_pool_tokens=None if num_pool_blocks is None else num_pool_blocks * size,
            num_sessions=sets.num_sessions([each.id for each in candidates], ask.session_hash),
            arrivals_per_s=sets.arrivals_per_s(now_s),
        )

    def _match(self, ask: Ask) -> dict[CandidateId, Match]:
        """Count leading tokens that each replica can reuse, capped as the engine caps."""
        size = self._block_size
        chain = ask.keys[: (ask.num_tokens - 1) // size]
        matches: dict[CandidateId, Match] = {}
        last, match = NO_BLOCKS, NO_MATCH
        for id_, found in self._caches.match(chain, self._ids).items():
            if found is not last:  # those who have alike have the same one
                last, match = found, Match(found.num_gpu_blocks * size, found.num_cpu_blocks * size)
            matches[id_] = match
        return matches


def _own_tokens(view: ReplicaView) -> int:
    return max(view.num_gpu_tokens, view.num_cpu_tokens)
