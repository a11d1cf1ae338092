"""What one rank's events show of its model's KV groups: their kinds, windows and block sizes.

What must live here: learning the groups, and the keys of their blocks. What must not: how long a
hit is (router.index.hit_length).

A model of full attention alone has one group, and nothing here costs it anything. A hybrid one has
several; each engine step stores the blocks of all of them, so one prompt shows them.

    seen in an event           so
    group_idx                  which group
    kv_cache_spec_kind         its rule; None: an old release, or a connector's event
    kv_cache_spec_sliding_window  of a window
    block_size                 of the group; less where the end of a prompt is stored in part, so
                               the largest seen is the group's, and what divides all of them is
                               what a hash covers

What no event shows: EAGLE (router.index.last_block), groups that cache no prefix but whose block
size counts for alignment, `prefix_match_unit` as long as no partial block was stored.

Source: vllm/distributed/kv_events.py, vllm/v1/core/block_pool.py (cache_full_blocks,
cache_partial_block), 0.32.0.
"""

from __future__ import annotations

from math import gcd
from typing import Final

from router.base.contracts import MAX_BLOCK_SIZE
from router.base.messages import MAX_GROUPS, KvGroup
from router.index.hit_length import FULL_ATTENTION, KvLayout, make_layout, salt_of
from router.kv_events.contract_search import StoredView
from router.kv_events.wire import BlockStored

_MAX_INDEX: Final = (1 << 16) - 1
_MAX_KIND_CHARS: Final = 64
_MAX_WINDOW: Final = 1 << 40
_MAX_SPARSE_TOKENS: Final = 1 << 15  # hashed to find a contract in an event with gaps


class RankGroups:
    """The KV groups of one rank's engine, as far as its events show them."""

    __slots__ = ("_groups", "_is_whole", "is_plain", "salts", "unit")

    def __init__(self) -> None:
        self._groups: dict[int, KvGroup] = {}  # in the order seen
        self._is_whole = True  # no group was left out
        self.is_plain = True  # at most one group was seen, and that of full attention
        self.salts: dict[int, int] = {}  # what the keys of each group differ by
        self.unit = 0  # tokens that a hash covers, at most; 0: nothing seen

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """The groups in the order seen; none where the model is plain."""
        return () if self.is_plain else tuple(self._groups.values())

    @property
    def names(self) -> dict[int | None, str | None]:
        """How events name the groups, and their kinds; the group 0 may go without a name."""
        names: dict[int | None, str | None] = {
            g.index: g.kind or None for g in self._groups.values()
        }
        return {None: names[0], **names} if 0 in names else names

    def layout(self, unit: int) -> KvLayout | None:
        """Make the layout for chains of this unit; None: it is not known how long a hit is."""
        return make_layout(self.groups, unit) if self._is_whole else None

    def learn(self, event: BlockStored) -> bool:
        """Add the group of blocks stored on the gpu; return whether there was anything new."""
        index, size = event.group_idx or 0, event.block_size
        if not size:
            return False
        known = self._groups.get(index)
        is_one = 0 <= index <= _MAX_INDEX and 0 < size <= MAX_BLOCK_SIZE
        if not is_one or (known is None and len(self._groups) >= MAX_GROUPS):
            was_whole, self._is_whole, self.is_plain = self._is_whole, False, False
            return was_whole
        kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
        if kind is None and known is not None:
            kind, window = known.kind, known.window
        group = KvGroup(
            index,
            (kind or "")[:_MAX_KIND_CHARS],
            size if known is None else max(size, known.block_size),
            window if window is not None and 0 < window <= _MAX_WINDOW else None,
        )
        unit = gcd(self.unit, size)
        if group == known and unit == self.unit:
            return False
        self._groups[index] = group
        self.unit = unit
        self._changed()
        return True

    def take_over(self, groups: tuple[KvGroup, ...]) -> None:
        """Go on with what another router learned."""
        self._groups = {group.index: group for group in groups}
        self.unit = gcd(*(group.block_size for group in groups))
        self._changed()

    def _changed(self) -> None:
        groups = tuple(self._groups.values())
        self.is_plain = self._is_whole and (
            not groups or (len(groups) == 1 and _is_full(groups[0]))
        )
        self.salts = {group.index: salt_of(group, groups) for group in groups}

    def view(self, event: BlockStored, unit: int) -> StoredView | None:
        """Return what an event that starts a prompt shows of the contract; None: nothing sure.

        `unit`: of the contract, if it was found; 0: what block sizes show. A group that leaves out
        blocks is good for it where no group of full attention is known.
        """
        group = self._groups.get(event.group_idx or 0)
        unit = unit or self.unit
        if group is None or not unit or event.block_size % unit:
            return None
        is_full = group.kind in FULL_ATTENTION
        if not is_full and any(kind.kind in FULL_ATTENTION for kind in self._groups.values()):
            return None
        if not is_full and len(event.token_ids) > _MAX_SPARSE_TOKENS:
            return None
        return StoredView(
            block_hashes=event.block_hashes,
            parent_block_hash=event.parent_block_hash,
            token_ids=event.token_ids,
            block_size=unit,
            lora_name=event.lora_name,
            extra_keys=event.extra_keys,
            lookahead=event.lookahead_token_ids,
            span=event.block_size,
            is_sparse=not is_full,
        )


def _is_full(group: KvGroup) -> bool:
    """Return whether a group on its own is full attention; old releases tell no kind."""
    return group.kind in FULL_ATTENTION or not group.kind
