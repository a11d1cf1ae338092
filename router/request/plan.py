"""A decision about a request: before it takes effect (`Plan`), and after (`Placement`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from policies.cost import costs_of
from policies.policy import Policy
from policies.view import CandidateCost, CandidateId, Decision, Holding, ReplicaView, Snapshot
from router.base.contracts import BlockKey, HashContract
from router.index.block_index import BlockIndex
from router.index.claims import Claim
from router.index.hit_length import KvLayout
from router.records.record import AssignmentRecord
from router.replicas.ledger import Booking, Lease
from router.replicas.replica import Candidate
from router.request.results import Prompt
from router.scheduling.classes import BATCH


class PoolMatch(Struct, frozen=True):
    """What the shared pool has of one prompt, under one contract's names, in one layout.

    Candidates that can read the same share one object.
    """

    pool: str  # its name
    directory: str  # of the pool: has the model's name where that has one layout
    contract: HashContract
    chain: Sequence[BlockKey]  # what can be reused at most
    groups: KvLayout | None  # the model's KV groups, where it has several
    num_blocks: int
    num_dropped: int = 0  # of the blocks there, engines drop: the last of each hit (EAGLE, MTP)
    on_disk: Sequence[int] = ()  # of the blocks, the positions of those on SSD only

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.contract.block_size

    def num_disk_tokens(self, num_gpu_tokens: int, num_cpu_tokens: int) -> int:
        """Count the tokens on SSD only that a candidate would read, behind those on its GPU.

        None if the pool has no more than the candidate itself, which then reads its own.
        """
        if not self.on_disk or self.num_tokens <= max(num_gpu_tokens, num_cpu_tokens):
            return 0
        size = self.contract.block_size
        return sum(position * size >= num_gpu_tokens for position in self.on_disk) * size


class Pools(Protocol):
    """What the shared pools have of prompts."""

    def match(
        self,
        prompt: Prompt,
        candidates: Sequence[Candidate],
        contracts: Mapping[HashContract, Sequence[CandidateId]],
        index: BlockIndex,
    ) -> dict[CandidateId, PoolMatch]:
        """Find the content of each candidate's pool; without candidates of no pool."""

    def reads(self, candidate: CandidateId) -> bool:
        """Return whether a candidate can be counted on to fetch what it lacks."""

    def begins_fetch(self, candidate: CandidateId) -> None:
        """Record that a request is sent that is counted on to fetch."""

    def fetched(self, candidate: CandidateId, begun_s: float) -> None:
        """Record that a request that had to fetch got its first token."""

    async def verified(self, prompt: Prompt, plan: Plan) -> bool:
        """Ask whether the pool has what a plan would fetch. False: there was nothing to ask."""

    async def ask_for_all(self, prompt: Prompt, plan: Plan) -> None:
        """Ask about a whole prompt that has just been stored; never fails."""


class Found(Struct, frozen=True, kw_only=True):
    """What candidates and the shared pool have of one prompt."""

    held: dict[CandidateId, Holding]
    pools: Mapping[CandidateId, PoolMatch]  # of candidates in a pool that is counted on
    first_blocks_hash: int | None  # None: not known


class Split(Struct, frozen=True, kw_only=True):
    """Whether another replica computes the prompt of one that decodes; times are predictions."""

    why: str
    here_ms: float  # to compute its KV where it is decoded, the delay of others included
    there_ms: float  # to compute it elsewhere and read it


class Plan(Struct, frozen=True, kw_only=True):
    """A decision that changed nothing yet.

    helper: Where another candidate computes the prompt first. None: this candidate does.
    split: How that was decided. None: the candidate computes prompts, too.
    helps: It is such a helper's.
    """

    candidate: Candidate
    view: ReplicaView
    decision: Decision
    snapshot: Snapshot
    policy: Policy
    pools: Mapping[CandidateId, PoolMatch]  # of candidates in a pool that is counted on
    assignment: AssignmentRecord | None = None
    helper: Plan | None = None
    split: Split | None = None
    helps: bool = False
    is_guess: bool = False  # what the candidate holds is not known from its blocks

    def costs(self) -> tuple[CandidateCost, ...]:
        return costs_of(self.decision, self.snapshot)

    @property
    def pool(self) -> PoolMatch | None:
        """The content of the candidate's pool. None: it is in no pool that is counted on."""
        return self.pools.get(self.candidate.id)

    @property
    def prediction(self) -> Holding:
        """What the engine is predicted to reuse. A guess predicts nothing."""
        view = self.view
        if self.is_guess:
            return Holding(num_pool_tokens=view.num_pool_tokens, reads_pool=False)
        return Holding(
            view.num_gpu_tokens,
            view.num_cpu_tokens,
            view.num_pool_tokens,
            view.num_disk_tokens,
            view.reads_pool,
        )

    @property
    def num_pooled_tokens(self) -> int | None:
        """Count the leading tokens in the pool, if the candidate reads it. None: no pool."""
        pool = self.pool
        return pool.num_tokens if pool is not None and self.view.reads_pool else None

    @property
    def num_disk_tokens(self) -> int:
        """Count the tokens on SSD only among those that it would fetch."""
        if self.pool is None or not self.view.reads_pool:
            return 0
        return self.pool.num_disk_tokens(self.view.num_gpu_tokens, self.view.num_cpu_tokens)

    @property
    def num_likely_tokens(self) -> int:
        """Count the leading tokens that the pool has probably been given; 0 if that is no news.

        They are on another candidate that shares the pool, and are more than what this candidate
        holds and more than what the pool is known to have.
        """
        pool = self.pool
        if pool is None or not self.view.reads_pool:
            return 0
        num_known = max(self.view.num_own_tokens, pool.num_tokens)
        num_held = max(
            view.num_gpu_tokens
            for view in self.snapshot.replicas
            if view.reads_pool and self.pools.get(view.id) is pool
        )
        return num_held if num_held > num_known else 0

    @property
    def num_likely_blocks(self) -> int:
        """Count the same in whole blocks."""
        return self.num_likely_tokens // self.pool.contract.block_size if self.pool else 0


class Placement(Struct, kw_only=True):
    """A decision in force, and what the request holds until `Place.end`.

    plan: The decision. What is predicted may be newer: see `Place.rebook`.
    predicted: What the engine is predicted to reuse.
    state: exact | degraded | blind.
    helper: Where another candidate computes its prompt first.
    slots: Of observers: what each remembers of the lease.
    """

    plan: Plan
    predicted: Holding
    lease: Lease
    claim: Claim | None
    state: str
    placed_s: float
    helper: Placement | None = None
    slots: dict[object, Any] = {}
    is_ended: bool = False

    @property
    def candidate(self) -> Candidate:
        """Where the request goes."""
        return self.plan.candidate

    @property
    def replica(self) -> str:
        """Name the replica that it goes to."""
        return self.plan.candidate.replica.name

    @property
    def predicted_ttft_ms(self) -> float:
        """Predict the time from here to the first token, its prompt's elsewhere included."""
        elsewhere = self.helper.lease.predicted_ms if self.helper is not None else 0.0
        return elsewhere + self.lease.predicted_ms

    @property
    def had_others(self) -> bool:
        """Whether there were other replicas to choose from; ranks of one are one."""
        own = self.plan.candidate.replica.name
        for view in self.plan.snapshot.replicas:
            if view.id.partition("#")[0] != own:
                return True
        return False

    @property
    def may_fetch(self) -> bool:
        """Whether the engine will look for something in the pool, whatever was counted on."""
        return (self.predicted.num_pool_tokens or 0) > self.predicted.num_own_tokens


def booking_of(prompt: Prompt, plan: Plan) -> Booking:
    """Return what a request adds to the load of the candidate that computes it."""
    read, held = prompt.read, plan.view
    is_prompt = read.request is not None
    num_pool, num_cached = held.num_fetched_tokens, held.num_cached_tokens
    num_uncached = 0
    if is_prompt:
        num_uncached = max(prompt.num_tokens - num_cached, 0) + prompt.num_more_tokens
    # The whole answer of a helper is its first token. A batch's time teaches nothing.
    has_first_token = plan.helps or (read.streams and is_prompt and read.num_prompts == 1)
    return Booking(
        num_uncached_tokens=num_uncached,
        num_cached_tokens=num_cached,
        num_fetched_tokens=num_cached - held.num_gpu_tokens,
        is_from_pool=num_pool > 0,
        num_disk_tokens=plan.num_disk_tokens if num_pool else 0,
        streams=has_first_token,
        session_hash=read.session_hash if is_prompt and not plan.helps else None,
        is_batch=prompt.service_class == BATCH,
        num_prompts=read.num_prompts,
    )
