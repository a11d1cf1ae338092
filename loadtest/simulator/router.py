"""One simulated router: the live one's fleet, caches and sessions, and its way to a decision.

What must live here: matching, deciding and observing as in `router.request.story`, as far as
they concern placing. What must not: engines, the order of events. The objects are the router's
own; only their inputs are simulated. The pool's contents are known exactly, as verification
makes them live. Where replicas have roles, what is booked when is as in `router.request.prefill`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from loadtest.simulator.setup import Setup
from loadtest.simulator.stream import SimulatedStream
from policies.cost import costs_of
from policies.policy import Policy
from policies.view import (
    CandidateCost,
    CandidateId,
    Decision,
    Holding,
    ReplicaView,
    RequestView,
    Snapshot,
)
from router.contracts import BlockKey, HashContract
from router.index.block_index import NO_BLOCKS, BlockIndex
from router.index.cache_view import CacheView
from router.index.claims import Claim
from router.records.outcome import Outcome
from router.replicas.fleet import EngineLoad, Fleet
from router.replicas.halves import DECODE, PrefillPlan, choose_halves
from router.replicas.ledger import NOTHING, Booking, InFront, Lease
from router.replicas.replica import Candidate, Replica, ServedModel
from router.scheduling.queue import Queue
from router.scheduling.waiting import Waiting

_EXPIRE_EVERY_S = 1.0  # as router.run does
_PEERS: Final = "nixl"
"""The live router's transfer from replica to replica that the simulation follows: a prompt first,
then its request."""


class Ask(Struct, frozen=True, gc=False):
    """A request as a router sees it: keys of its full blocks, tokens, session, and class."""

    keys: Sequence[BlockKey]
    num_tokens: int
    session_hash: int
    is_batch: bool = False


class Choice(Struct, frozen=True, gc=False):
    """A decision that changed nothing yet."""

    ask: Ask
    candidate: Candidate
    decision: Decision
    snapshot: Snapshot
    view: ReplicaView  # of the chosen one
    plan: PrefillPlan[Choice] | None = None  # None: the candidate computes prompts, too

    @property
    def num_pooled_tokens(self) -> int | None:
        return self.view.num_pool_tokens if self.view.reads_pool else None

    def costs(self) -> tuple[CandidateCost, ...]:
        return costs_of(self.decision, self.snapshot)

    @property
    def prompt(self) -> Choice:
        """The choice of where its prompt is computed: this one, or its plan's."""
        elsewhere = self.plan.choice if self.plan is not None else None
        return self if elsewhere is None else elsewhere


class Placement(Struct, frozen=True, gc=False):
    """A decision that counts, and what has to be given back."""

    replica: int
    choice: Choice
    lease: Lease
    claim: Claim | None  # None: its prompt is not there yet
    num_gpu_tokens: int  # predicted to be reused from the replica's cache
    num_pool_tokens: int  # and beyond those from the pool
    prefill: Placement | None = None  # where its prompt is computed, if elsewhere


class Note(Struct, frozen=True, gc=False):
    """What another router learns of a placement: `router.messages.Began`."""

    ask: Ask
    candidate: CandidateId
    booking: Booking
    num_held_blocks: int | None  # None: it claims no blocks


class Router:
    """Decides by a policy, on what it knows."""

    def __init__(self, policy: Policy, setup: Setup, block_size: int) -> None:
        self._policy = policy
        self._seed = setup.seed
        self._model = setup.model
        self._speculates = setup.speculates
        self._is_always_apart = setup.halves is not None and setup.halves.always_apart
        self._block_size = block_size
        self._num_first_blocks = max(1, setup.first_blocks_tokens // block_size)
        self.num_decisions = 0
        self._fleet = Fleet()
        index = BlockIndex()
        self._caches = CacheView(index)
        self._expire_s = 0.0
        contract = HashContract(algorithm="warmroute", block_size=block_size)
        self.streams: list[SimulatedStream] = []
        for name, role in setup.roles:
            num_blocks = setup.cache_blocks(block_size, role)
            replica = Replica(
                name=name,
                url=f"http://{name}",
                role=role,
                transfer=_PEERS if setup.moves_by_peers else "store",
                models=(ServedModel(id=setup.model),),
                block_size=block_size,
                num_blocks=num_blocks,
                publishes_events=True,
            )
            self._fleet.add(replica)
            stream = SimulatedStream(
                CandidateId(replica.name),
                index,
                contract=contract,
                capacity_blocks=num_blocks + 1,  # the null block among them
            )
            self._caches.add(stream.candidate, stream)
            self.streams.append(stream)
        self._number_of = {stream.candidate: number for number, stream in enumerate(self.streams)}
        self.queue: Queue[Choice] | None = None
        if setup.queue is not None:
            self.queue = Queue(
                setup.queue,
                self._fleet.conversations,
                self._fleet,
                self._has_room,
            )

    def choose(
        self,
        ask: Ask,
        num_pool_blocks: int | None,
        now_s: float,
        in_front_ms: InFront = NOTHING,
    ) -> Choice:
        """Decide where a request would go now.

        `num_pool_blocks`: leading blocks that the pool has; None: there is no pool.
        `in_front_ms`: what waits in the router's queue, and goes to candidates before it.
        """
        self._catch_up(now_s)
        candidates = self._fleet.candidates(self._model, now_s)
        if not self._fleet.is_split:
            return self._choose(ask, candidates, self._policy, num_pool_blocks, now_s, in_front_ms)
        choice, plan = choose_halves(
            candidates,
            lambda reader, at_s: self._fleet.prefillers(self._model, reader, at_s),
            self._policy,
            lambda some, by: self._choose(ask, some, by, num_pool_blocks, now_s, in_front_ms),
            lambda _: None,
        )
        if plan is not None and plan.why == "cheaper" and self._is_always_apart:
            others = self._fleet.prefillers(self._model, choice.candidate.replica, now_s)
            prompt = self._choose(ask, others, self._policy, num_pool_blocks, now_s)
            plan = replace(plan, choice=prompt, why="chosen")
        return choice if plan is None else replace(choice, plan=plan)

    def _choose(
        self,
        ask: Ask,
        candidates: Sequence[Candidate],
        policy: Policy,
        num_pool_blocks: int | None,
        now_s: float,
        in_front_ms: InFront = NOTHING,
    ) -> Choice:
        """Freeze what is known of candidates, and have a policy choose among them."""
        ids = [candidate.id for candidate in candidates]
        snapshot = self._snapshot(ask, candidates, ids, num_pool_blocks, now_s, in_front_ms)
        decision = policy.decide(snapshot)
        number = ids.index(decision.candidate)
        view = snapshot.replicas[number]
        num_blocks = view.num_gpu_tokens // self._block_size
        num_left = self._caches.surviving(ask.keys, view.id, num_blocks)
        if num_left < num_blocks:  # there is no cpu tier
            num_tokens = num_left * self._block_size
            view = replace(view, num_gpu_tokens=num_tokens, num_cpu_tokens=num_tokens)
        return Choice(ask, candidates[number], decision, snapshot, view)

    def place(self, choice: Choice, now_s: float) -> Placement:
        """Send a request where it was chosen to go; from here on its load and its blocks count."""
        self.num_decisions += 1
        ask, plan = choice.ask, choice.plan
        prefill = None
        if plan is not None and plan.choice is not None:
            prefill = self._book(
                plan.choice, replace(_booking(plan.choice), session_hash=None), now_s
            )
            booking = Booking(  # until its prompt is there, it only has its place
                num_uncached_tokens=0,
                num_cached_tokens=ask.num_tokens,
                streams=False,
                session_hash=ask.session_hash,
                is_batch=ask.is_batch,
            )
        else:
            booking = _booking(choice)
        return self._book(choice, booking, now_s, prefill)

    def _book(
        self, choice: Choice, booking: Booking, now_s: float, prefill: Placement | None = None
    ) -> Placement:
        view = choice.view
        lease = self._fleet.admit(view.id, booking, now_s)
        claim = None
        if prefill is None:
            claim = self._claim(view.id, choice.ask, view.num_gpu_tokens // self._block_size)
        return Placement(
            replica=self._number_of[view.id],
            choice=choice,
            lease=lease,
            claim=claim,
            num_gpu_tokens=view.num_gpu_tokens,
            num_pool_tokens=_num_pooled(choice),
            prefill=prefill,
        )

    def rebook(self, placement: Placement, num_pool_blocks: int | None, now_s: float) -> Placement:
        """Book a request anew where it is answered: its prompt is computed elsewhere by now."""
        self._catch_up(now_s)
        planned = placement.choice
        choice = self._choose(planned.ask, (planned.candidate,), DECODE, num_pool_blocks, now_s)
        self._fleet.end(placement.lease, now_s, Outcome.CLIENT_GONE)  # counts neither way
        booking = _booking(choice)
        if planned.candidate.replica.transfer != "store":
            booking = booking.sent(choice.view.num_gpu_tokens)
        booked = self._book(choice, booking, now_s)
        return replace(booked, choice=planned, prefill=placement.prefill)

    def first_token(self, placement: Placement, now_s: float) -> None:
        """Note a first token, and learn from its time."""
        self._fleet.first_token(placement.lease, now_s)

    def note_load(self, number: int, load: EngineLoad) -> None:
        """Take over a reading of an engine's metrics."""
        self._fleet.note_engine_load(self.streams[number].candidate, load)

    def end(self, placement: Placement, now_s: float) -> None:
        """Release a request's claims."""
        self._fleet.end(placement.lease, now_s, Outcome.OK)
        if placement.claim is not None:
            self._caches.release(placement.claim, computed=True, now_s=now_s)

    # -- other routers' requests ---------------------------------------------------------------

    def note_of(self, placement: Placement) -> Note:
        """Return what other routers learn of a placement."""
        lease, num_held_blocks = placement.lease, None
        if placement.claim is not None:
            num_held_blocks = placement.num_gpu_tokens // self._block_size
        return Note(
            ask=placement.choice.ask,
            candidate=lease.candidate,
            booking=replace(lease.booking, is_ours=False),
            num_held_blocks=num_held_blocks,
        )

    def began_elsewhere(self, note: Note, now_s: float) -> tuple[Lease, Claim | None]:
        """Book what another router sent, as `router.cluster.peers` does."""
        lease, claim = self._fleet.admit(note.candidate, note.booking, now_s), None
        if note.num_held_blocks is not None:
            claim = self._claim(note.candidate, note.ask, note.num_held_blocks)
        return lease, claim

    def answered_elsewhere(self, lease: Lease, ttft_s: float, now_s: float) -> None:
        """Note the first token of another router's request."""
        self._fleet.first_token(lease, now_s, 1e3 * ttft_s)

    def ended_elsewhere(self, lease: Lease, claim: Claim | None, now_s: float) -> None:
        """Release another router's lease and claim."""
        self._fleet.end(lease, now_s, None)
        if claim is not None:
            self._caches.release(claim, computed=True, now_s=now_s)

    # -- inside ----------------------------------------------------------------------------------

    def _has_room(self, _: Waiting, choice: Choice) -> bool:
        return self._caches.has_room(choice.ask.keys, choice.view.id, choice.ask.num_tokens)

    def _claim(self, candidate: CandidateId, ask: Ask, num_held_blocks: int) -> Claim:
        num_claimed_from = num_held_blocks if self._speculates else len(ask.keys)
        return self._caches.claim(candidate, ask.keys, num_claimed_from)

    def _catch_up(self, now_s: float) -> None:
        for stream in self.streams:
            stream.catch_up(now_s)
        if now_s >= self._expire_s:
            self._caches.expire_claims(now_s)
            self._expire_s = now_s + _EXPIRE_EVERY_S

    def _snapshot(
        self,
        ask: Ask,
        candidates: Sequence[Candidate],
        ids: Sequence[CandidateId],
        num_pool_blocks: int | None,
        now_s: float,
        in_front_ms: InFront,
    ) -> Snapshot:
        session = self._fleet.conversations.get(ask.session_hash, now_s)
        first_blocks = ask.keys[: self._num_first_blocks]
        sets = self._fleet.conversations
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
            replicas=self._fleet.views(
                candidates, self._match(ask, ids, num_pool_blocks), now_s, in_front_ms
            ),
            num_sessions=sets.num_sessions(ids, ask.session_hash),
            arrivals_per_s=sets.arrivals_per_s(now_s),
        )

    def _match(
        self, ask: Ask, ids: Sequence[CandidateId], num_pool_blocks: int | None
    ) -> dict[CandidateId, Holding]:
        """Count leading tokens that each replica can reuse, capped as the engine caps."""
        size = self._block_size
        num_pool = None if num_pool_blocks is None else num_pool_blocks * size
        chain = ask.keys[: (ask.num_tokens - 1) // size]
        matches: dict[CandidateId, Holding] = {}
        last, match = NO_BLOCKS, Holding(0, 0, num_pool)
        for id_, found in self._caches.match(chain, ids).items():
            if found is not last:  # those who have alike have the same one
                last = found
                match = Holding(found.num_gpu_blocks * size, found.num_cpu_blocks * size, num_pool)
            matches[id_] = match
        return matches


def _booking(choice: Choice) -> Booking:
    """Write what a request adds to the load of the candidate that computes it."""
    ask, view, num_pooled = choice.ask, choice.view, _num_pooled(choice)
    num_cached = _own_tokens(view) + num_pooled
    return Booking(
        num_uncached_tokens=max(ask.num_tokens - num_cached, 0),
        num_cached_tokens=num_cached,
        num_fetched_tokens=num_cached - view.num_gpu_tokens,
        session_hash=ask.session_hash,
        is_batch=ask.is_batch,
        is_from_pool=num_pooled > 0,
    )


def _num_pooled(choice: Choice) -> int:
    """Count what the chosen one reads from the pool beyond what it holds itself."""
    return max(0, (choice.view.num_pool_tokens or 0) - _own_tokens(choice.view))


def _own_tokens(view: ReplicaView) -> int:
    return max(view.num_gpu_tokens, view.num_cpu_tokens)
