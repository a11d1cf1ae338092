"""A decision about a request: before it takes effect (`Plan`), and after (`Placement`).

`Matcher` says what a decision sees: how much of a prompt each candidate holds, and how much it can
fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from policies.cost import costs_of
from policies.policy import Policy
from policies.view import (
    NOTHING_HELD,
    CandidateCost,
    CandidateId,
    Decision,
    Holding,
    ReplicaView,
    Snapshot,
)
from router.base.contracts import HashContract
from router.index.block_index import NO_BLOCKS
from router.index.cache_view import CacheView
from router.index.candidate_stream import Claim
from router.replicas.ledger import Booking, Lease
from router.replicas.replica import Candidate
from router.request.fetch import Fetchable, Fetches
from router.request.results import Prompt, Tries
from router.scheduling.conversations import Conversation
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


FIRST_BLOCKS_TOKENS: Final = 2048
"""The prompt tokens that policy prefix_hash hashes."""

_ByContract = dict[HashContract, list[CandidateId]]


class Matcher:
    """Finds what candidates have of a prompt, and what they can fetch.

    Args:
        fetches: None: no caches are shared.
    """

    def __init__(self, caches: CacheView, *, fetches: Fetches | None) -> None:
        self.caches = caches
        self.fetches = fetches

    def match(self, prompt: Prompt, candidates: Sequence[Candidate]) -> PromptMatch:
        """Count the leading prompt tokens that each candidate has or can fetch.

        None where an engine will not look into its cache, nor fetch.
        """
        if prompt.read.request is not None and not prompt.read.request.reads_cache:
            first_blocks = self._first_blocks(prompt, candidates)
            return PromptMatch(held={}, fetchable={}, first_blocks_hash=first_blocks)
        same = same_names(prompt, [each for each in candidates if each.replica.caches_prefixes])
        contracts = self._by_contract(prompt, same)
        held = self._held(prompt, contracts)
        if prompt.read.inbound.api.ranks_since is not None:
            anywhere = [each for each in candidates if not prompt.is_placed_at(each)]
            held = _of_any_rank(held, anywhere)
        fetchable: dict[CandidateId, Fetchable] = {}
        if self.fetches is not None and contracts:
            fetchable = self.fetches.look(prompt, same, contracts, self.caches.index)
            _add_fetchable(held, fetchable, self.fetches.reads)
        return PromptMatch(
            held=held,
            fetchable=fetchable,
            first_blocks_hash=self._first_blocks(prompt, candidates),
        )

    def has_room(self, prompt: Prompt, candidate: Candidate) -> bool:
        """Return whether an engine could begin a prompt now, beside what it has."""
        contract = self.caches.contract(candidate.id)
        if prompt.tokens is None or contract is None or not prompt.is_placed_at(candidate):
            return True
        return self.caches.has_room(prompt.keys(contract), candidate.id, prompt.num_tokens)

    def _held(self, prompt: Prompt, contracts: _ByContract) -> dict[CandidateId, Holding]:
        """Count the leading prompt tokens each candidate can reuse, capped as the engine caps.

        The chain is computed once per contract.
        """
        held: dict[CandidateId, Holding] = {}
        for contract, ids in contracts.items():
            keys, size = prompt.keys(contract), contract.block_size
            # The engine recomputes at least the last token, hence a whole block of a full hit.
            reusable = (prompt.num_tokens - 1) // size
            last, holding = NO_BLOCKS, NOTHING_HELD
            for cid, found in self.caches.match(keys, ids, prompt.found, reusable).items():
                if found is not last:  # candidates that hold as much have the same one
                    last = found
                    holding = Holding(found.num_gpu_blocks * size, found.num_cpu_blocks * size)
                held[cid] = holding
        return held

    def _by_contract(self, prompt: Prompt, candidates: Sequence[Candidate]) -> _ByContract:
        """Group candidates by how their blocks are named; those not known at all are left out.

        Empty where the tokens are not known.
        """
        if prompt.tokens is None:
            return {}
        return self.caches.by_contract([candidate.id for candidate in candidates])

    def _first_blocks(self, prompt: Prompt, candidates: Sequence[Candidate]) -> int | None:
        """Digest the prompt's first blocks: the key of the last of them, for it is chained."""
        contract = self.caches.contract(candidates[0].id)
        keys = prompt.keys(contract) if contract is not None else []
        if contract is None or not keys:
            return None
        num_blocks = max(1, FIRST_BLOCKS_TOKENS // contract.block_size)
        return keys[min(num_blocks, len(keys)) - 1]


def same_names(prompt: Prompt, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Leave out candidates that have a request's adapter from another path.

    Digests include it, so nothing is known there of the blocks (vLLM 0.32 v1/core/kv_cache_utils.py
    `_gen_lora_extra_hash_keys`). It happens while an adapter is reloaded, one replica at a time.
    """
    if prompt.extra.lora is None:
        return candidates
    name, path = prompt.extra.lora
    return [each for each in candidates if each.replica.adapter_path(name) == path]


def _add_fetchable(
    held: dict[CandidateId, Holding],
    fetchable: Mapping[CandidateId, Fetchable],
    reads: Callable[[CandidateId], bool],
) -> None:
    """Add what candidates can fetch to what they hold themselves, and whether they do fetch."""
    last: tuple[Holding, Fetchable, bool] | None = None
    holding = NOTHING_HELD
    for cid, there in fetchable.items():
        own, is_reader = held.get(cid, NOTHING_HELD), reads(cid)
        if last is None or own is not last[0] or there is not last[1] or is_reader is not last[2]:
            last = own, there, is_reader
            gpu, cpu = own.num_gpu_tokens, own.num_cpu_tokens
            on_disk = there.num_disk_tokens(gpu, cpu) if is_reader else 0
            holding = Holding(gpu, cpu, there.num_tokens, on_disk, is_reader)
        held[cid] = holding  # candidates that have as much have the same one


def _of_any_rank(
    held: dict[CandidateId, Holding], candidates: Sequence[Candidate]
) -> dict[CandidateId, Holding]:
    """Return for each rank what its replica's ranks have in the mean: the engine will choose one.

    Rounded down to blocks. So replicas compare by what can be expected of them.
    """
    ranks: dict[str, list[Candidate]] = {}
    for each in candidates:
        if each.rank is not None:
            ranks.setdefault(each.replica.name, []).append(each)
    for group in ranks.values():
        found = [held.get(each.id, NOTHING_HELD) for each in group]
        size = len(group) * (group[0].replica.block_size or 1)
        gpu = sum(each.num_gpu_tokens for each in found) // size * size // len(group)
        cpu = sum(each.num_cpu_tokens for each in found) // size * size // len(group)
        held |= {each.id: Holding(gpu, cpu) for each in group}
    return held


def with_last_turn(
    prompt: Prompt, session: Conversation, held: dict[CandidateId, Holding]
) -> tuple[dict[CandidateId, Holding], CandidateId | None]:
    """Credit a session's last replica with its last prompt, if no more of this one is known.

    A guess, for prompts with unnamed media and for models without a tokenizer.

    Returns:
        The holdings, and the replica that was credited. None: more is known.
    """
    home = session.candidate
    known = held.get(home, NOTHING_HELD)
    num_tokens = min(session.num_tokens, prompt.num_tokens - 1)
    if num_tokens <= known.num_gpu_tokens:
        return held, None
    credited = replace(
        known, num_gpu_tokens=num_tokens, num_cpu_tokens=max(known.num_cpu_tokens, num_tokens)
    )
    return {**held, home: credited}, home
