"""The meaning of one rank's events for the index: tiers, KV groups, block sizes, translation.

What must live here: from decoded events to keys in `BlockIndex`. What must not: the search for the
contract (contract_search), sequence numbers and replay (sequence).

Blocks are indexed under the low bits of the engine's own hashes, which need no contract; only a
translated rank is indexed under our own. So nothing waits for the contract to be found. Of a model
with several KV groups, each group's keys differ by its salt (router.index.hit_length).

A limit that events cannot show: for a request that asks for `kv_cache_report_mode: full`, vLLM
reports reused blocks as if they were stored. They are counted as copies; the audit finds them. So
the router does not ask for it (docs/research/lost-history.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Final, cast

from policies.view import CandidateId
from router.base.contracts import KEY_MASK, BlockKey, HashContract, block_key
from router.base.messages import KvGroup, StreamStatus
from router.index.block_index import BlockIndex
from router.index.candidate_stream import BlockCounters
from router.index.copies import Tier
from router.index.hit_length import FULL_ATTENTION
from router.kv_events.contract_search import ContractSearch, Phase, StoredView
from router.kv_events.groups import RankGroups
from router.kv_events.translation import Translation, UnknownKeys
from router.kv_events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ExternalHash,
    KvEvent,
    decode,
)

_UNSEEN: Final = object()

_BLOCKS: Final = attrgetter("block_hashes")
_BUT_BLOCKS: Final = attrgetter("medium", "group_idx", "remaining_copy_counts")

_TIERS: Final[dict[str | None, Tier]] = {
    None: "gpu",
    "GPU": "gpu",
    "gpu": "gpu",
    "CPU": "cpu",
    "cpu": "cpu",
}


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
        "_plain",
        "_pool_stored",
        "_translation",
        "_unexplained",
        "counters",
        "counts_once",
        "needs_history",
        "search",
        "understands_groups",
        "unknown_form",
        "unknown_keys",
    )

    def __init__(
        self,
        index: BlockIndex,
        candidate: CandidateId,
        counters: BlockCounters,
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
        self.search = ContractSearch(contract, seeds, self._lora_paths)
        self._translation: Translation | None = None
        self._groups = RankGroups()
        self._unexplained: BlockStored | None = None  # the last that the search made nothing of
        self.unknown_keys = UnknownKeys()
        self.unknown_form: str | None = None  # of the last key that was found not to be understood
        self._plain: dict[int | None, str | None] = {}
        """How events name the only group, and its kind: full attention. Empty: several, or none."""
        self._is_taken_over = False  # blocks are held whose groups are not known
        self.counters = counters
        self.counts_once = False  # stores may be of blocks that are there already
        self.needs_history = False  # the owner begins an epoch and sets it back
        self.understands_groups = True  # how long a hit is in the model's KV groups is known
        index.forget_layout(candidate)

    @property
    def contract(self) -> HashContract:
        """The contract found, or the guess."""
        return self.search.contract

    @property
    def phase(self) -> Phase:
        """How far the search for the contract is."""
        return self.search.phase

    @property
    def wants_tokens(self) -> bool:
        """Whether batches have to be decoded with their tokens."""
        return self.search.phase is not Phase.FOUND

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """The KV groups of a model that has several, or one that is no full attention."""
        return self._groups.groups

    @property
    def has_cpu_tier(self) -> bool:
        """Whether a cpu tier of the candidate's own has blocks."""
        return self._index.num_blocks(self._candidate, "cpu") > 0

    def take_over(self, status: StreamStatus) -> None:
        """Go on with the blocks that are in the index, as another router named them."""
        self.search.take_over(status.contract, is_verified=status.is_verified)
        self._is_taken_over = True
        self._groups.take_over(status.groups)
        self.unknown_keys = UnknownKeys(status.unknown)
        self._lay_out()

    def restart(self) -> None:
        """Forget what was learned about the engine: it may be another one now."""
        self.emptied()
        self.search.restart()
        self._translation = None
        self._groups = RankGroups()
        self._unexplained = None
        self.unknown_keys = UnknownKeys()
        self._lay_out()

    def clear(self) -> None:
        """Begin an epoch with nothing held, under the same contract."""
        self._index.clear(self._candidate)
        self._is_taken_over = False
        if self._translation is not None:
            self._translation = Translation(self.contract)

    def emptied(self) -> None:
        self._index.emptied(self._candidate)

    def apply(self, batch: EventBatch, payload: bytes) -> None:
        """Apply a batch; `payload` is what it was decoded from.

        Stops early with `needs_history` set if the contract turns out to be another one.
        """
        position = 0
        for kind, group in groupby(batch.events, type):
            events = list(group)
            if kind is BlockRemoved:  # vLLM reports each evicted block by an event of its own
                for _, removals in groupby(cast(list[BlockRemoved], events), _BUT_BLOCKS):
                    self._remove(list(removals))
            elif kind is not AllBlocksCleared and not issubclass(kind, BlockStored):
                self.counters.num_unknown_events += len(events)
            else:
                for number, event in enumerate(events, position):
                    self._apply(event, payload, number)
                    if self.needs_history:
                        return
            position += len(events)

    def _apply(self, event: KvEvent, payload: bytes, position: int) -> None:
        if isinstance(event, BlockStored):
            self._store(event, payload, position)
        else:
            self.counters.num_clears += 1
            self.emptied()
            self.clear()

    # -- stores ------------------------------------------------------------------------------

    def _store(self, event: BlockStored, payload: bytes, position: int) -> None:
        num_blocks = len(event.block_hashes)
        tier = _TIERS.get(event.medium)
        if tier is None:
            self.counters.num_unknown_medium += num_blocks
            return
        salt = 0
        if self._plain.get(event.group_idx, _UNSEEN) != event.kv_cache_spec_kind:
            found = self._salt(event, tier)
            if found is None:
                self.counters.num_other_groups += num_blocks
                return
            salt = found
        if tier == "gpu" and event.parent_block_hash is None and num_blocks:
            self._examine(event, payload, position)
            if self.needs_history:
                return
        to_pool = self._pool_stored if tier == "cpu" else None
        is_plain = self._groups.is_plain
        if self._translation is not None:
            if to_pool is not None or not is_plain:  # a pool does not know our keys
                self.counters.num_untranslated += num_blocks
                return
            keys = self._translation.stored(_view(event), self._lora_paths)
            self.counters.num_untranslated += num_blocks - len(keys)
        elif (
            self.phase is Phase.FOUND
            and event.block_size not in (0, self.contract.block_size)
            and is_plain
        ):
            self.counters.num_other_sizes += num_blocks
            return
        else:
            keys = _keys(event.block_hashes)
            if salt:
                keys = [BlockKey(key ^ salt) for key in keys]
        if to_pool is not None:
            to_pool(keys)
        elif self.counts_once:
            self._index.store(
                self._candidate, self._index.missing(self._candidate, keys, tier), tier
            )
        else:
            self._index.store(self._candidate, keys, tier)
        self.counters.num_stored += len(keys)

    def _salt(self, event: BlockStored, tier: Tier) -> int | None:
        """Add the event's KV group; return what its keys differ by, None: it is not indexed.

        Of what connectors store, only full attention is: their events may lack the kind.
        """
        group, kind = event.group_idx, event.kv_cache_spec_kind
        if tier == "gpu":
            if self._groups.learn(event):
                self._lay_out()
                self._explain()
            return self._salt_of(group, 0 if not group else None)
        is_full = kind in FULL_ATTENTION if kind is not None else not group
        return 0 if self._salt_of(group, 0 if is_full else None) == 0 else None

    def _salt_of(self, group: int | None, otherwise: int | None) -> int | None:
        """Return what the keys of a KV group differ by; `otherwise` where none was seen yet."""
        groups = self._groups
        if groups.is_plain:
            return 0 if group in self._plain else otherwise
        return groups.salts.get(group or 0)

    def _lay_out(self) -> None:
        """Pass the KV groups to the index, or that there is but one of full attention."""
        groups = self._groups
        self.understands_groups = groups.is_plain
        if groups.is_plain:
            self._plain = groups.names
            self._index.forget_layout(self._candidate)
            return
        self._plain = {}
        is_named = self.phase is not Phase.TRANSLATED
        layout = groups.layout(self.contract.block_size) if is_named else None
        self.understands_groups = layout is not None and layout.is_understood
        self._index.lay_out(self._candidate, layout)

    def _examine(self, event: BlockStored, payload: bytes, position: int) -> None:
        """Examine an event that starts a prompt, for the contract and for extra keys."""
        search, view = self.search, self._view(event)
        if view is None:  # beside full attention, a window's event shows nothing
            return
        if self.phase is Phase.SEARCHING:
            self._unexplained = event  # it has its tokens: `wants_tokens`
        wants = search.wants(view)
        checks = self.phase is Phase.FOUND and self.unknown_keys.wants(view, self._lora_paths)
        if not wants and not checks:
            return
        if not view.token_ids:
            again = decode(payload, with_tokens=True).events[position]
            assert isinstance(again, BlockStored)
            view = self._view(again)
            assert view is not None
        if wants:
            self._search(view)
        if checks and self.phase is Phase.FOUND:
            form = self.unknown_keys.examine(view, self.contract, self._lora_paths)
            self.unknown_form = form or self.unknown_form

    def _search(self, view: StoredView) -> None:
        """Examine an event with its tokens, for the contract."""
        search, contract, phase = self.search, self.contract, self.phase
        num_misses = search.num_misses
        self.needs_history = search.examine(view)
        self.counters.num_contract_misses += max(0, search.num_misses - num_misses)
        if search.contract != contract or search.phase is not phase:
            self._lay_out()
        if self.phase is Phase.TRANSLATED:
            self._translation = Translation(search.contract)
        if self.phase is not Phase.SEARCHING:
            self._unexplained = None

    def _explain(self) -> None:
        """Examine an event again that the search made nothing of: what a hash covers was not known.

        The groups of one step come in events of their own, the one with the shortest blocks last.
        """
        event = self._unexplained
        view = self._view(event) if event is not None else None
        if view is not None and self.phase is Phase.SEARCHING:
            self.search.num_misses = 0  # what was missed under another size says nothing
            self._search(view)

    def _view(self, event: BlockStored) -> StoredView | None:
        """Return what the event shows of the contract; None: nothing sure."""
        if self._groups.is_plain:
            return _view(event)
        is_found = self.phase is Phase.FOUND
        return self._groups.view(event, self.contract.block_size if is_found else 0)

    # -- removals ----------------------------------------------------------------------------

    def _remove(self, events: Sequence[BlockRemoved]) -> None:
        """Apply removals that differ in their blocks alone."""
        event = events[0]
        if len(events) > 1 and event.remaining_copy_counts is not None:
            for each in events:
                self._remove([each])
            return
        hashes = event.block_hashes
        if len(events) > 1:
            hashes = list(chain.from_iterable(map(_BLOCKS, events)))
        num_blocks = len(hashes)
        tier = _TIERS.get(event.medium)
        if tier is None:
            self.counters.num_unknown_medium += num_blocks
            return
        salt = 0
        if event.group_idx not in self._plain:
            # Of a group not seen yet, too few blocks are better than too many.
            is_first = event.group_idx == 0 or self._is_taken_over
            found = self._salt_of(event.group_idx, 0 if is_first else None)
            if found is None:
                self.counters.num_other_groups += num_blocks
                return
            salt = found
        self.counters.num_removed += num_blocks
        if tier == "cpu" and self._pool_stored is not None:
            return  # it is one replica's view of the pool
        num_left = event.remaining_copy_counts
        if num_left is not None and len(num_left) != num_blocks:
            num_left = None
        if self._translation is None:
            keys = _keys(hashes)
            if salt:
                keys = [BlockKey(key ^ salt) for key in keys]
            self._take_away(keys, tier, num_left)
        else:
            self._remove_translated(self._translation, hashes, tier, num_left)

    def _take_away(
        self, keys: Sequence[BlockKey], tier: Tier, num_left: Sequence[int | None] | None
    ) -> None:
        self.counters.num_missing += self._index.remove(
            self._candidate,
            keys,
            tier,
            num_left=num_left,
        )

    def _remove_translated(
        self,
        translation: Translation,
        externals: Sequence[ExternalHash],
        tier: Tier,
        num_left: Sequence[int | None] | None,
    ) -> None:
        for position, external in enumerate(externals):
            key = translation.key_of(external)
            if key is None:
                self.counters.num_missing += 1
                continue
            self._take_away((key,), tier, num_left and num_left[position : position + 1])
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
        lookahead=event.lookahead_token_ids,
    )
