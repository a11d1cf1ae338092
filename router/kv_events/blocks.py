"""The meaning of one rank's events for the index: tiers, KV groups, block sizes, translation.

What must live here: from decoded events to keys in `BlockIndex`. What must not: the search for the
contract (contract_search), sequence numbers and replay (sequence).

Blocks are indexed under the low bits of the engine's own hashes, which need no contract; only a
translated rank is indexed under our own. So nothing waits for the contract to be found.

A limit that events cannot show: for a request that asks for `kv_cache_report_mode: full`, vLLM
reports reused blocks as if they were stored. They are counted as copies; the audit finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from policies.view import CandidateId
from router.contracts import KEY_MASK, BlockKey, HashContract, StoredView, block_key
from router.index.block_index import BlockIndex
from router.index.copies import Tier
from router.index.counters import StreamCounters
from router.kv_events.contract_search import ContractSearch, Phase
from router.kv_events.translation import Translation
from router.kv_events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ExternalHash,
    decode,
)

_TIERS: Final[dict[str | None, Tier]] = {
    None: "gpu",
    "GPU": "gpu",
    "gpu": "gpu",
    "CPU": "cpu",
    "cpu": "cpu",
}

_FULL_ATTENTION: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
# Source: KVCacheSpecKind in vllm/v1/kv_cache_interface.py, 0.32.0


class RankBlocks:
    """Applies one rank's events to the index.

    Args:
        contract: The guess until one is found: configured, or the engine's default.
        seeds: Texts to try as the engine's seed before the defaults.
        lora_paths: Adapter name to path; read at each event, the owner may change it.
        pool_stored: Takes the keys of blocks stored on the cpu tier, which means the shared pool
            for this replica's connector. None: it means the replica's own memory.
    """

    __slots__ = (
        "_candidate",
        "_groups",
        "_index",
        "_is_taken_over",
        "_lora_paths",
        "_pool_stored",
        "_search",
        "_translation",
        "counters",
        "needs_history",
    )

    def __init__(
        self,
        index: BlockIndex,
        candidate: CandidateId,
        counters: StreamCounters,
        *,
        contract: HashContract,
        seeds: Sequence[str] = (),
        lora_paths: Mapping[str, str] | None = None,
        pool_stored: Callable[[Sequence[BlockKey]], None] | None = None,
    ) -> None:
        self._index = index
        self._pool_stored = pool_stored
        self._candidate = candidate
        self._lora_paths = {} if lora_paths is None else lora_paths
        self._search = ContractSearch(contract, seeds, self._lora_paths)
        self._translation: Translation | None = None
        self._groups: dict[int, bool] = {}  # whether a KV group is full attention
        self._is_taken_over = False  # blocks are held whose groups are not known
        self.counters = counters
        self.needs_history = False  # the owner begins an epoch and sets it back

    @property
    def contract(self) -> HashContract:
        """The contract found, or the guess."""
        return self._search.contract

    @property
    def phase(self) -> Phase:
        """How far the search for the contract is."""
        return self._search.phase

    @property
    def wants_tokens(self) -> bool:
        """Whether batches have to be decoded with their tokens."""
        return self._search.phase is not Phase.FOUND

    def take_over(self, contract: HashContract, *, is_verified: bool) -> None:
        """Go on with the blocks that are in the index, as another router named them."""
        self._search.take_over(contract, is_verified=is_verified)
        self._is_taken_over = True

    def restart(self) -> None:
        """Forget what was learned about the engine: it may be another one now."""
        self._search.restart()
        self._translation = None
        self._groups = {}

    def clear(self) -> None:
        """Begin an epoch with nothing held, under the same contract."""
        self._index.clear(self._candidate)
        self._is_taken_over = False
        if self._translation is not None:
            self._translation = Translation(self.contract)

    def apply(self, batch: EventBatch, payload: bytes) -> None:
        """Apply a batch; `payload` is what it was decoded from.

        Stops early with `needs_history` set if the contract turns out to be another one.
        """
        for position, event in enumerate(batch.events):
            if isinstance(event, BlockStored):
                self._store(event, payload, position)
                if self.needs_history:
                    return
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self.counters.num_clears += 1
                self.clear()
            else:
                self.counters.num_unknown_events += 1

    # -- stores ------------------------------------------------------------------------------

    def _store(self, event: BlockStored, payload: bytes, position: int) -> None:
        num_blocks = len(event.block_hashes)
        tier = _TIERS.get(event.medium)
        if tier is None:
            self.counters.num_unknown_medium += num_blocks
            return
        if not self._learns_full_attention(event, tier):
            self.counters.num_other_groups += num_blocks
            return
        if tier == "gpu" and event.parent_block_hash is None and num_blocks:
            self._examine(event, payload, position)
            if self.needs_history:
                return
        to_pool = self._pool_stored if tier == "cpu" else None
        if self._translation is not None:
            if to_pool is not None:  # a pool does not know our keys
                self.counters.num_untranslated += num_blocks
                return
            keys = self._translation.stored(_view(event), self._lora_paths)
            self.counters.num_untranslated += num_blocks - len(keys)
        elif self.phase is Phase.FOUND and event.block_size not in (0, self.contract.block_size):
            self.counters.num_other_sizes += num_blocks
            return
        else:
            keys = _keys(event.block_hashes)
        if to_pool is not None:
            to_pool(keys)
        else:
            self._index.store(self._candidate, keys, tier)
        self.counters.num_stored += len(keys)

    def _learns_full_attention(self, event: BlockStored, tier: Tier) -> bool:
        """Return whether the event's group is indexed; learn the kind where the event has it.

        Events of connectors may lack it.
        """
        group, kind = event.group_idx, event.kv_cache_spec_kind
        if group is None:
            return kind is None or kind in _FULL_ATTENTION
        if kind is not None:
            self._groups[group] = kind in _FULL_ATTENTION
        elif tier == "gpu":
            self._groups.setdefault(group, True)
        return self._groups.get(group, group == 0)

    def _examine(self, event: BlockStored, payload: bytes, position: int) -> None:
        """Learn about the contract from an event that starts a prompt."""
        search = self._search
        view = _view(event)
        if not search.wants(view):
            return
        if not view.token_ids:
            again = decode(payload, with_tokens=True).events[position]
            assert isinstance(again, BlockStored)
            view = _view(again)
        num_misses = search.num_misses
        self.needs_history = search.examine(view)
        self.counters.num_contract_misses += max(0, search.num_misses - num_misses)
        if self.phase is Phase.TRANSLATED:
            self._translation = Translation(search.contract)

    # -- removals ----------------------------------------------------------------------------

    def _remove(self, event: BlockRemoved) -> None:
        num_blocks = len(event.block_hashes)
        tier = _TIERS.get(event.medium)
        if tier is None:
            self.counters.num_unknown_medium += num_blocks
            return
        if not self._may_hold(event.group_idx):
            self.counters.num_other_groups += num_blocks
            return
        self.counters.num_removed += num_blocks
        if tier == "cpu" and self._pool_stored is not None:
            return  # it is one replica's view of the pool
        if self._translation is None:
            keys = _keys(event.block_hashes)
            self.counters.num_missing += self._index.remove(self._candidate, keys, tier)
        else:
            self._remove_translated(self._translation, event.block_hashes, tier)

    def _may_hold(self, group: int | None) -> bool:
        """Return whether blocks of this group may be indexed; too few are better than too many."""
        if group is None:
            return True
        return self._groups.get(group, group == 0 or self._is_taken_over)

    def _remove_translated(
        self, translation: Translation, externals: Sequence[ExternalHash], tier: Tier
    ) -> None:
        for external in externals:
            key = translation.key_of(external)
            if key is None:
                self.counters.num_missing += 1
                continue
            self.counters.num_missing += self._index.remove(self._candidate, (key,), tier)
            if not self._index.holds(self._candidate, key):
                translation.forget((external,))


def _keys(externals: Sequence[ExternalHash]) -> list[BlockKey]:
    """Name blocks, fast where the hashes are ints (0.03 us a block)."""
    try:
        return [external & KEY_MASK for external in externals]  # type: ignore[operator, misc]
    except TypeError:
        return [block_key(external) for external in externals]


def _view(event: BlockStored) -> StoredView:
    return StoredView(
        block_hashes=event.block_hashes,
        parent_block_hash=event.parent_block_hash,
        token_ids=event.token_ids,
        block_size=event.block_size,
        lora_name=event.lora_name,
        extra_keys=event.extra_keys,
    )
