"""Match a prompt: how much of it each candidate holds, and how much it can fetch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from policies.view import (
    NOTHING_HELD,
    CandidateId,
    Holding,
)
from router.base.contracts import HashContract
from router.index.block_index import NO_BLOCKS
from router.index.cache_view import CacheView
from router.replicas.replica import Candidate
from router.request.fetch import Fetches
from router.request.results import Fetchable, Prompt
from router.scheduling.conversations import Conversation


class PromptMatch(Struct, frozen=True, kw_only=True):
    """What candidates have of one prompt, and what they can fetch."""

    held: dict[CandidateId, Holding]
    fetchable: Mapping[CandidateId, Fetchable]
    first_blocks_hash: int | None  # None: not known


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
            _add_fetchable(held, fetchable, self.fetches)
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
    fetches: Fetches,
) -> None:
    """Add what candidates can fetch to what they hold themselves, and whether they do fetch."""
    last: tuple[Holding, Fetchable, bool] | None = None
    holding = NOTHING_HELD
    for cid, there in fetchable.items():
        own, is_reader = held.get(cid, NOTHING_HELD), fetches.reads(cid)
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
