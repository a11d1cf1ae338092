"""A decision about a request: before it takes effect (`Plan`), and after (`Placement`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from policies.cost import costs_of
from policies.policy import Policy
from policies.view import CandidateCost, CandidateId, Decision, Holding, ReplicaView, Snapshot
from router.index.claims import Claim
from router.replicas.ledger import Booking, Lease
from router.replicas.replica import Candidate
from router.request.fetch import Fetchable
from router.request.results import Prompt, Tries
from router.scheduling.order import BATCH


def why_here(prompt: Prompt, tries: Tries, plan: Plan) -> str | None:
    """Return why a prompt cannot be computed elsewhere; None: it can be."""
    if prompt.read.num_prompts > 1:
        return "batch"
    if prompt.owner is not None:
        return "owned"  # only the replica that issued the response before has it
    if prompt.read.outline is not None:
        return "body"  # too costly to be taken apart
    if prompt.original is not None:
        return "pool"
    helped = tries.helped
    if helped is not None and helped.result == "failed":
        return "failed" if tries.failed_helper is None else None
    if helped is not None and plan.candidate.replica.transfer == "store":
        return "done"  # a retry: the pool has it
    return None


class PromptMatch(Struct, frozen=True, kw_only=True):
    """What candidates have of one prompt, and what they can fetch."""

    held: dict[CandidateId, Holding]
    fetchable: Mapping[CandidateId, Fetchable]
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
    fetchable: Fetchable | None = None  # None: the candidate shares no cache that is counted on
    helper: Plan | None = None
    split: Split | None = None
    helps: bool = False
    is_guess: bool = False  # what the candidate holds is not known from its blocks

    def costs(self) -> tuple[CandidateCost, ...]:
        return costs_of(self.decision, self.snapshot)

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


class Placement(Struct, kw_only=True):
    """A decision in force, and what the request holds until `Place.end`.

    plan: The decision. What is predicted may be newer: see `Place.rebook`.
    candidate, replica: Where the request goes; the replica's name.
    predicted: What the engine is predicted to reuse.
    state: exact | degraded | blind.
    helper: Where another candidate computes its prompt first.
    slots: Of observers: what each remembers of the lease.
    """

    plan: Plan
    candidate: Candidate
    replica: str
    predicted: Holding
    lease: Lease
    claim: Claim | None
    state: str
    placed_s: float
    helper: Placement | None = None
    slots: dict[object, Any] = {}
    is_ended: bool = False

    @property
    def predicted_ttft_ms(self) -> float:
        """Predict the time from here to the first token, its prompt's elsewhere included."""
        elsewhere = self.helper.lease.predicted_ms if self.helper is not None else 0.0
        return elsewhere + self.lease.predicted_ms

    @property
    def had_others(self) -> bool:
        """Whether there were other replicas to choose from; ranks of one are one."""
        own = self.replica
        for view in self.plan.snapshot.replicas:
            if view.id.partition("#")[0] != own:
                return True
        return False

    @property
    def may_fetch(self) -> bool:
        """Whether the engine will look for something to fetch, whatever was counted on."""
        num_shared = self.predicted.num_pool_tokens
        return num_shared is not None and num_shared > self.predicted.num_own_tokens


def booking_of(prompt: Prompt, plan: Plan) -> Booking:
    """Return what a request adds to the load of the candidate that computes it."""
    read, held, there = prompt.read, plan.view, plan.fetchable
    is_prompt = read.request is not None
    num_gpu, num_cpu, num_cached = held.num_gpu_tokens, held.num_cpu_tokens, held.num_cached_tokens
    num_uncached, is_fetched = 0, num_cached > max(num_gpu, num_cpu)
    if is_prompt:
        num_uncached = max(prompt.num_tokens - num_cached, 0) + prompt.num_more_tokens
    # The whole answer of a helper is its first token. A batch's time teaches nothing.
    has_first_token = plan.helps or (read.streams and is_prompt and read.num_prompts == 1)
    return Booking(
        num_uncached_tokens=num_uncached,
        num_cached_tokens=num_cached,
        num_fetched_tokens=num_cached - num_gpu,
        is_from_pool=is_fetched,
        num_disk_tokens=there.num_disk_tokens(num_gpu, num_cpu) if there and is_fetched else 0,
        streams=has_first_token,
        session_hash=read.whose.session_hash if is_prompt and not plan.helps else None,
        is_batch=prompt.service_class == BATCH,
        num_prompts=read.num_prompts,
    )
