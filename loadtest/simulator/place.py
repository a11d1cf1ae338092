"""Place simulated requests: the seam to `router.request.place`, in virtual time.

`plan`, `commit` and `end` do what the methods of the same names do there, with the live router's
own fleet and caches. They stay apart because the live ones read the clock, and place
requests with bodies and token ids; a simulated request has only the keys of its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from loadtest.engine_model.pool import BlockPool
from loadtest.simulator.setup import Setup
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
from router.contracts import BlockKey
from router.index.block_index import NO_BLOCKS
from router.index.cache_view import CacheView
from router.index.claim import Claim
from router.records.outcome import Outcome
from router.replicas.fleet import Fleet
from router.replicas.halves import DECODE, PrefillPlan, choose_halves
from router.replicas.ledger import NOTHING, Booking, InFront, Lease
from router.replicas.replica import Candidate

_FIRST_BLOCKS_TOKENS = 2048  # of `first_blocks_hash`, as in router.config


class Ask(Struct, frozen=True, gc=False):
    """A request as a router sees it; `keys` names its full blocks."""

    keys: Sequence[BlockKey]
    num_tokens: int
    session_hash: int
    is_batch: bool = False


class Plan(Struct, frozen=True, gc=False):
    """A decision that changed nothing yet."""

    ask: Ask
    candidate: Candidate
    decision: Decision
    snapshot: Snapshot
    view: ReplicaView  # of the candidate
    halves: PrefillPlan[Plan] | None = None  # None: the candidate computes prompts, too

    @property
    def num_pooled_tokens(self) -> int | None:
        return self.view.num_pool_tokens if self.view.reads_pool else None

    def costs(self) -> tuple[CandidateCost, ...]:
        return costs_of(self.decision, self.snapshot)

    @property
    def prompt(self) -> Plan:
        """Return the plan of where its prompt is computed: this one, or another one."""
        elsewhere = self.halves.choice if self.halves is not None else None
        return self if elsewhere is None else elsewhere

    @property
    def num_own_tokens(self) -> int:
        return max(self.view.num_gpu_tokens, self.view.num_cpu_tokens)

    @property
    def num_pool_tokens(self) -> int:
        """Count the tokens that the candidate reads from the pool, beyond its own."""
        return max(0, (self.view.num_pool_tokens or 0) - self.num_own_tokens)


class Placement(Struct, frozen=True, gc=False):
    """A decision in force, and the claims to release at its end."""

    replica: int
    plan: Plan
    lease: Lease
    claim: Claim | None  # None: its prompt is not there yet
    num_gpu_tokens: int  # predicted to be reused from the replica's cache
    num_pool_tokens: int  # and beyond those from the pool
    prefill: Placement | None = None  # where its prompt is computed, if elsewhere


class Place:
    """Plans, commits and ends placements.

    Args:
        policy: Decides.
        setup: The simulation.
        block_size: Tokens in a block.
        fleet, caches: The live router's objects.
        numbers: Of the fleet's replicas.
        pool: Its contents are known exactly, as verification makes them live. None: there is none.
    """

    def __init__(
        self,
        policy: Policy,
        setup: Setup,
        block_size: int,
        fleet: Fleet,
        caches: CacheView,
        numbers: Mapping[CandidateId, int],
        pool: BlockPool | None,
    ) -> None:
        self._policy = policy
        self._seed = setup.seed
        self._model = setup.model
        self._block_size = block_size
        self._num_first_blocks = max(1, _FIRST_BLOCKS_TOKENS // block_size)
        self._fleet = fleet
        self._caches = caches
        self._numbers = numbers
        self._pool = pool
        self._num_decisions = 0

    def plan(self, ask: Ask, now_s: float, in_front_ms: InFront) -> Plan:
        """Decide where a request goes now.

        `in_front_ms`: Work that waits in the queue and goes to candidates before the request.
        """
        candidates = self._fleet.candidates(self._model, now_s)
        if not self._fleet.is_split:
            return self._choose(ask, candidates, self._policy, now_s, in_front_ms)
        plan, halves = choose_halves(
            candidates,
            lambda reader, at_s: self._fleet.prefillers(self._model, reader, at_s),
            self._policy,
            lambda some, by: self._choose(ask, some, by, now_s, in_front_ms),
            lambda _: None,
        )
        return plan if halves is None else replace(plan, halves=halves)

    def commit(self, plan: Plan, now_s: float) -> Placement:
        """Put a plan into effect: from here on the request's load and blocks count."""
        self._num_decisions += 1
        ask = plan.ask
        if plan.prompt is plan:
            placement = self._book(plan, _booking(plan), now_s)
        else:
            booking = replace(_booking(plan.prompt), session_hash=None)
            prefill = self._book(plan.prompt, booking, now_s)
            booking = Booking(  # until its prompt is there, it only has its place
                num_uncached_tokens=0,
                num_cached_tokens=ask.num_tokens,
                streams=False,
                session_hash=ask.session_hash,
                is_batch=ask.is_batch,
            )
            placement = self._book(plan, booking, now_s, prefill)
        return placement

    def rebook(self, placement: Placement, now_s: float) -> Placement:
        """Book a request again at its decode replica: its prompt is computed by now."""
        first = placement.plan
        plan = self._choose(first.ask, (first.candidate,), DECODE, now_s)
        self._fleet.end(placement.lease, now_s, Outcome.CLIENT_GONE)  # counts neither way
        booking = _booking(plan)
        if first.candidate.replica.transfer != "store":
            booking = booking.sent(plan.view.num_gpu_tokens)
        booked = self._book(plan, booking, now_s)
        return replace(booked, plan=first, prefill=placement.prefill)

    def first_token(self, placement: Placement, now_s: float) -> None:
        """Record a first token, and learn from its time."""
        self._fleet.first_token(placement.lease, now_s)

    def end(self, placement: Placement, now_s: float) -> None:
        """Release a request's load and claims."""
        self._fleet.end(placement.lease, now_s, Outcome.OK)
        if placement.claim is not None:
            self._caches.release(placement.claim, computed=True, now_s=now_s)

    def has_room(self, plan: Plan) -> bool:
        """Return whether the engine chosen has blocks for the prompt."""
        return self._caches.has_room(plan.ask.keys, plan.view.id, plan.ask.num_tokens)

    def _choose(
        self,
        ask: Ask,
        candidates: Sequence[Candidate],
        policy: Policy,
        now_s: float,
        in_front_ms: InFront = NOTHING,
    ) -> Plan:
        """Freeze the state of candidates, and have a policy choose among them."""
        ids = [candidate.id for candidate in candidates]
        session = self._fleet.conversations.get(ask.session_hash, now_s)
        first_blocks = ask.keys[: self._num_first_blocks]
        sets = self._fleet.conversations
        sets.expire(now_s)
        snapshot = Snapshot(
            now_s=now_s,
            number=self._num_decisions,
            seed=self._seed,
            request=RequestView(
                num_tokens=ask.num_tokens,
                session_hash=ask.session_hash,
                session_candidate=session.candidate if session is not None else None,
                first_blocks_hash=first_blocks[-1] if first_blocks else None,
            ),
            replicas=self._fleet.views(candidates, self._match(ask, ids), now_s, in_front_ms),
            num_sessions=sets.num_sessions(ids, ask.session_hash),
            arrivals_per_s=sets.arrivals_per_s(now_s),
        )
        decision = policy.decide(snapshot)
        number = ids.index(decision.candidate)
        view = snapshot.replicas[number]
        num_blocks = view.num_gpu_tokens // self._block_size
        num_left = self._caches.surviving(ask.keys, view.id, num_blocks)
        if num_left < num_blocks:  # there is no cpu tier
            num_tokens = num_left * self._block_size
            view = replace(view, num_gpu_tokens=num_tokens, num_cpu_tokens=num_tokens)
        return Plan(ask, candidates[number], decision, snapshot, view)

    def _match(self, ask: Ask, ids: Sequence[CandidateId]) -> dict[CandidateId, Holding]:
        """Count leading tokens that each replica can reuse, capped as the engine caps."""
        size = self._block_size
        chain = ask.keys[: (ask.num_tokens - 1) // size]
        num_pool = None if self._pool is None else self._pool.match(chain) * size
        matches: dict[CandidateId, Holding] = {}
        last, match = NO_BLOCKS, Holding(0, 0, num_pool)
        for id_, found in self._caches.match(chain, ids).items():
            if found is not last:  # candidates with equal matches share one
                last = found
                match = Holding(found.num_gpu_blocks * size, found.num_cpu_blocks * size, num_pool)
            matches[id_] = match
        return matches

    def _book(
        self, plan: Plan, booking: Booking, now_s: float, prefill: Placement | None = None
    ) -> Placement:
        view = plan.view
        lease = self._fleet.admit(view.id, booking, now_s)
        claim = None
        if prefill is None:
            num_held = view.num_gpu_tokens // self._block_size
            claim = self._caches.claim(view.id, plan.ask.keys, num_held)
        return Placement(
            replica=self._numbers[view.id],
            plan=plan,
            lease=lease,
            claim=claim,
            num_gpu_tokens=view.num_gpu_tokens,
            num_pool_tokens=plan.num_pool_tokens,
            prefill=prefill,
        )


def _booking(plan: Plan) -> Booking:
    """Return what a request adds to the load of the candidate that computes it."""
    ask, num_pooled = plan.ask, plan.num_pool_tokens
    num_cached = plan.num_own_tokens + num_pooled
    return Booking(
        num_uncached_tokens=max(ask.num_tokens - num_cached, 0),
        num_cached_tokens=num_cached,
        num_fetched_tokens=num_cached - plan.view.num_gpu_tokens,
        session_hash=ask.session_hash,
        is_batch=ask.is_batch,
        is_from_pool=num_pooled > 0,
    )
