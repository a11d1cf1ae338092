"""How long a cache hit is in a model of several KV groups: the engine's own rule, pure.

What must live here: the rule of each kind of group, how rules combine, and what conversations take
of the cache. What must not: events, tiers, where the blocks are known from.

The rule (source: kv_cache_coordinator.py and single_type_kv_cache_manager.py in vllm/v1/core,
0.32.0). A hit is the longest aligned prefix that every group can go on from:

    kind                 can go on from token L if it holds
    full attention       every block before L
    sliding window       the blocks of the window before L: ceil((window - 1) / block size) of them;
                         or every block before L
    Mamba                the one block that ends at L: the state there
    any other, or a      every block before L (less than the engine may ask for, never more)
    window not known

L is a multiple of all block sizes. It is a multiple of the hashed unit instead, if a Mamba block is
longer than the unit and all other groups can look up by the unit.

Drafts from the hidden states of the target (EAGLE, MTP) need those of the last block. So the groups
that draft match one block more and drop it, except Mamba groups, unless `disable_eagle_block_drop`
is set. The methods are eagle, eagle3, mtp, dflash and dspark; from 0.33.0 on dflash and dspark drop
nothing. Source: SpeculativeConfig.use_eagle_block_drop in vllm/config/speculative.py,
_annotate_eagle_groups in kv_cache_utils.py. No event shows it: `replicas[].eagle` does.

All groups are taken to draft, as with EAGLE. With MTP the group of the last layer drafts: if it has
windows, a hit is as long as if all did. If it has full attention, windows keep a block less, and
some hits are longer than predicted.

The block that ends at L is named by the hash of the prefix [0, L), in units. A salt tells groups
apart (`salt_of`), so that one set of keys has all groups of a candidate.

Lengths are in units, and aligned when they are returned.

How many tokens of conversations a cache holds: all groups take blocks of equal size from one pool
(source: vllm/v1/core/block_pool.py; unify_kv_cache_spec_page_size in kv_cache_utils.py, 0.32.0). A
conversation that is to continue where it ended needs

    kind                   blocks
    full attention         one for each `block_size` tokens
    sliding window         those of the window, however long it is
    Mamba                  one: the last state
    any other              as full attention

Its other blocks of windows and states are overwritten first, and nothing is lost with them. vLLM
reports another figure (`kv_cache_size_tokens`): for running requests of the greatest length, whose
windows cover a whole step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from functools import lru_cache
from itertools import compress, islice
from math import lcm
from typing import Final, NamedTuple, overload

from router.base.contracts import KEY_MASK, BlockKey
from router.base.messages import KvGroup
from router.index.copies import Either, PrefixEnd, leading


class Chain:
    """A prompt's units, with lookups that several candidates share."""

    __slots__ = ("_ends", "_landmarks", "_rows", "keys")

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self.keys = keys  # first first
        self._ends: dict[tuple[int, int], list[PrefixEnd]] = {}
        self._landmarks: dict[tuple[int, int, int], _Landmarks] = {}
        self._rows: dict[tuple[int, int, int, int], list[BlockKey]] = {}

    def num_leading(self, held: Container[BlockKey], salt: int, size: int) -> int:
        """Count the leading blocks of one group of full attention."""
        keys = self.of_group(salt, size)
        return leading(keys, held, self._ends.setdefault((salt, size), [])) if keys else 0

    def of_group(self, salt: int, size: int) -> Sequence[BlockKey]:
        """Return the keys of one group's blocks."""
        return self.keys if not salt and size == 1 else _GroupChain(self.keys, salt, size)

    def row(self, salt: int, size: int, start: int, end: int) -> list[BlockKey]:
        """Return the keys of one group's blocks [start, end)."""
        at = salt, size, start, end
        if at not in self._rows:
            self._rows[at] = self.of_group(salt, size)[start:end]  # type: ignore[assignment]
        return self._rows[at]

    def landmarks(self, salt: int, size: int, spacing: int) -> _Landmarks:
        """Return every `spacing`-th block of one group, and the first one."""
        at = salt, size, spacing
        if at not in self._landmarks:
            numbers = [*range(spacing, len(self.keys) // size + 1, spacing)]
            if spacing > 1 and len(self.keys) >= size:
                numbers.insert(0, 1)
            self._landmarks[at] = _Landmarks(
                numbers, [BlockKey(self.keys[number * size - 1] ^ salt) for number in numbers]
            )
        return self._landmarks[at]


class _Landmarks(NamedTuple):
    """Blocks by their number (the first is 1), and their keys: each row includes one of them."""

    numbers: list[int]
    keys: list[BlockKey]

    def last(self, held: Container[BlockKey], limit: int) -> int:
        """Return the last one up to number `limit` that is held; 0: none."""
        num = bisect_right(self.numbers, limit)
        tiers = held.tiers if isinstance(held, Either) else (held,)
        # compress and map: a loop takes eight times as long
        skip = len(self.keys) - num
        return max(
            next(
                compress(
                    islice(reversed(self.numbers), skip, None),
                    map(tier.__contains__, islice(reversed(self.keys), skip, None)),
                ),
                0,
            )
            for tier in tiers
        )


class GroupKind:
    """Groups of one rule, which must all hold a block.

    Args:
        size: Units of a block.
        salts: One for each group.
        alignment: Units.
    """

    __slots__ = ("alignment", "drops", "margin", "salts", "size")

    def __init__(self, size: int, salts: Sequence[int], alignment: int) -> None:
        self.size = size
        self.salts = salts
        self.alignment = alignment
        self.drops = False  # a block, for EAGLE
        self.margin = 0  # units that may be matched beyond a hit, to be dropped

    def longest(self, chain: Chain, held: Container[BlockKey], bound: int, drops: bool) -> int:
        """Find the longest aligned length up to `bound` from which these groups can go on."""
        raise NotImplementedError

    def needed(self, chain: Sequence[BlockKey], length: int) -> list[BlockKey]:
        """List the blocks that a hit of this length needs, without those of salt 0."""
        ends = self._needed(length)
        if self.drops and length and length + self.size <= len(chain):  # the block that proves it
            ends = range(ends.start, length + self.size + 1, self.size)
        return [BlockKey(chain[at - 1] ^ salt) for salt in self.salts if salt for at in ends]

    def _needed(self, length: int) -> range:
        """Return where the blocks end."""
        return range(self.size, length + 1, self.size)

    def _holds(self, chain: Chain, held: Container[BlockKey], end: int) -> bool:
        """Return whether all groups hold the block that ends there."""
        key = chain.keys[end - 1]
        return all(key ^ salt in held for salt in self.salts)


class Whole(GroupKind):
    """Every block. If it is closed (each block implies those before it), by bisecting."""

    __slots__ = ("is_closed",)

    def __init__(self, size: int, salts: Sequence[int], alignment: int, is_closed: bool) -> None:
        super().__init__(size, salts, alignment)
        self.is_closed = is_closed

    def longest(self, chain: Chain, held: Container[BlockKey], bound: int, drops: bool) -> int:
        num_blocks = bound // self.size
        for salt in self.salts:
            if self.is_closed:
                num_blocks = min(num_blocks, chain.num_leading(held, salt, self.size))
            else:
                keys = chain.of_group(salt, self.size)
                missing = (at for at in range(num_blocks) if keys[at] not in held)
                num_blocks = next(missing, num_blocks)
        length = num_blocks * self.size
        if self.alignment < self.size:  # the prompt's last, partial block is stored, too
            ends = range(min(length + self.size - 1, bound), length, -1)
            length = next((end for end in ends if self._holds(chain, held, end)), length)
        if drops and length:
            length -= min(self.alignment, self.size)
        return length - length % self.alignment


class Window(GroupKind):
    """A sliding window: `need` blocks that end on a boundary, or all blocks before it."""

    __slots__ = ("need",)

    def __init__(self, size: int, salts: Sequence[int], alignment: int, need: int) -> None:
        super().__init__(size, salts, alignment)
        self.need = need

    def longest(self, chain: Chain, held: Container[BlockKey], bound: int, drops: bool) -> int:
        size, step = self.size, max(1, self.alignment // self.size)
        need = max(1, self.need + drops)  # blocks in a row
        spacing = max(1, self.need)
        landmarks = chain.landmarks(self.salts[0], size, spacing)
        end = bound // size  # of the row, in blocks
        while True:
            end -= (end - drops) % step  # without the dropped one it ends on a boundary
            last = landmarks.last(held, end)
            if not last:
                return 0
            if end >= last + spacing:  # a row that ends there has a later landmark, not held
                end = last + spacing - 1
                continue
            missing = self._missing(chain, held, max(0, end - need), end)
            if missing is None:
                if end < need:  # from the prompt's start: aligned before the drop, and after it
                    end -= end % step
                end -= drops
                return max(0, end - end % step) * size
            end = missing  # each row that ends behind the missing block has it, too

    def _missing(self, chain: Chain, held: Container[BlockKey], start: int, end: int) -> int | None:
        """Return the first of the blocks [start, end) that is missing in a group."""
        rows = [chain.row(salt, self.size, start, end) for salt in self.salts]
        if all(all(map(held.__contains__, row)) for row in rows):
            return None
        missing = (
            position for row in rows for position, key in enumerate(row, start) if key not in held
        )
        return next(missing)

    def _needed(self, length: int) -> range:
        first = max(0, length // self.size - self.need)
        return range((first + 1) * self.size, length + 1, self.size)


class Mamba(GroupKind):
    """Mamba: the state at the boundary. Which states a request keeps depends on its chunks."""

    __slots__ = ()

    def longest(self, chain: Chain, held: Container[BlockKey], bound: int, drops: bool) -> int:
        landmarks = chain.landmarks(self.salts[0], self.alignment, 1)
        number = landmarks.last(held, bound // self.alignment)
        while number and not self._holds(chain, held, number * self.alignment):
            number = landmarks.last(held, number - 1)
        return number * self.alignment

    def _needed(self, length: int) -> range:
        return range(length, length + 1) if length else range(0)


class _GroupChain(Sequence[BlockKey]):
    """The keys of one group's blocks of a chain, computed on access."""

    __slots__ = ("_chain", "_salt", "_size")

    def __init__(self, chain: Sequence[BlockKey], salt: int, size: int) -> None:
        self._chain = chain
        self._salt = salt
        self._size = size

    def __len__(self) -> int:
        return len(self._chain) // self._size

    @overload
    def __getitem__(self, position: int) -> BlockKey: ...
    @overload
    def __getitem__(self, position: slice) -> list[BlockKey]: ...
    def __getitem__(self, position: int | slice) -> BlockKey | list[BlockKey]:
        if isinstance(position, slice):
            return [self[at] for at in range(*position.indices(len(self)))]
        return BlockKey(self._chain[(position + 1) * self._size - 1] ^ self._salt)


FULL_ATTENTION: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
SLIDING_WINDOW: Final = frozenset({"sliding_window", "sliding_window_mla"})
MAMBA: Final = "mamba"

_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15  # 2**64 over the golden ratio: spreads small numbers


def is_understood(group: KvGroup) -> bool:
    """Return whether the engine's rule for the group is known, with its parameters."""
    if group.kind in SLIDING_WINDOW:
        return group.window is not None
    return group.kind in FULL_ATTENTION or group.kind == MAMBA


def salt_of(group: KvGroup, groups: Sequence[KvGroup]) -> int:
    """Return the salt of a group's keys, relative to its blocks' hashes.

    `groups`: in the order seen. 0 for the first full attention: its keys are those of a model
    without other groups.
    """
    first = next((other for other in groups if other.kind in FULL_ATTENTION), None)
    return 0 if group == first else ((group.index + 1) * _GOLDEN) & KEY_MASK


class KvLayout:
    """The KV groups of a model, and the rule for the length of a hit.

    Args:
        groups: Those that cache prefixes, in the order seen; at least one.
        unit: Tokens between two hashes of a chain; divides every block size.
        drops_last: Whether the last block is computed again for drafts (EAGLE, MTP).
    """

    __slots__ = (
        "_is_simple",
        "_kinds",
        "_salts",
        "alignment",
        "drops_last",
        "groups",
        "is_understood",
        "unit",
    )

    def __init__(self, groups: Sequence[KvGroup], unit: int, *, drops_last: bool = False) -> None:
        self.groups = tuple(groups)
        self.unit = unit
        self.drops_last = drops_last
        self.is_understood = all(is_understood(group) for group in groups)
        self.alignment = lcm(*(group.block_size for group in groups)) // unit  # in units
        if _is_fine_grained(groups, unit):
            self.alignment = 1
        self._salts = {group.index: salt_of(group, groups) for group in groups}
        self._kinds = self._by_kind()
        self._is_simple = len(self._kinds) == 2 and isinstance(self._kinds[0], Whole)

    def salt(self, group: int) -> int | None:
        """Return the salt of a group by the engine's number; None: it is not known."""
        return self._salts.get(group)

    def hit(self, chain: Chain, held: Container[BlockKey], limit: int) -> int:
        """Count the leading units of a chain that the engine would not compute.

        Args:
            chain: The prompt's units.
            held: Keys of all blocks, of all groups.
            limit: Units that a hit has at most: (num_tokens - 1) // unit.

        Takes 10 to 100 us for a chain of 6,000 units. The worst case takes 1 ms: all blocks of full
        attention and none of 6,000 Mamba states.
        """
        # Every kind accepts a length or shortens it, until all accept it. Full attention is matched
        # once. Another kind drops EAGLE's block once for a length. Two kinds need one pass only.
        length = limit
        whole: dict[int, int] = {}
        verified: set[int] = set()
        while True:
            current = length
            for position, kind in enumerate(self._kinds):
                if position in whole:
                    current = min(current, whole[position])
                    continue
                drops = kind.drops and position not in verified
                bound = min(current + kind.margin, len(chain.keys)) if drops else current
                found = kind.longest(chain, held, bound, drops)
                if drops:
                    verified.add(position)
                elif found < current:
                    verified.clear()
                if isinstance(kind, Whole):
                    whole[position] = found
                current = found
            if current >= length or not current or self._is_simple:
                return current
            length = current

    def kept(self, chain: Sequence[BlockKey], num_tokens: int) -> list[BlockKey]:
        """List the blocks that a prompt surely leaves, without those of the first full attention.

        Windows keep those at the last boundary before the prompt's last token
        (`prefix_cache_retention_interval` 0, the default; other values keep more). With EAGLE it is
        the boundary before that one, with the block after it. Source: replay_boundaries in
        kv_cache_coordinator.py.
        """
        end = min((num_tokens - 1) // self.unit, len(chain)) // self.alignment * self.alignment
        if self.drops_last:
            end = max(0, end - self.alignment)
        kinds = (kind for kind in self._kinds if not isinstance(kind, Mamba))
        return [key for kind in kinds for key in kind.needed(chain, end)]

    def needed(self, chain: Sequence[BlockKey], length: int) -> list[BlockKey]:
        """List the blocks that a hit of `length` units needs, without the first full attention."""
        return [key for kind in self._kinds for key in kind.needed(chain, length)]

    def _by_kind(self) -> list[GroupKind]:
        """Combine groups with the same rule, full attention first, as the engine does."""
        proves = len(self.groups) > 1  # a dropped block beyond the hit may prove it
        by_rule: dict[tuple[str, int, int | None], list[int]] = {}
        for group in self.groups:
            rule = group.kind, group.block_size // self.unit, group.window
            by_rule.setdefault(rule, []).append(group.index)
        kinds: list[GroupKind] = []
        for (kind, size, window), indices in by_rule.items():
            salts = [self._salts[index] for index in indices]
            if kind == MAMBA:
                kinds.append(Mamba(size, salts, self.alignment))
                continue
            if kind in SLIDING_WINDOW and window is not None:
                need = -(-(window - 1) // (size * self.unit))
                kinds.append(Window(size, salts, self.alignment, need))
            else:
                is_closed = kind in FULL_ATTENTION
                kinds.append(Whole(size, salts, self.alignment, is_closed))
            kinds[-1].drops = self.drops_last
            kinds[-1].margin = min(size, self.alignment) if self.drops_last and proves else 0
        return sorted(kinds, key=lambda kind: not isinstance(kind, Whole))


def make_layout(groups: Sequence[KvGroup], unit: int) -> KvLayout | None:
    """Make the layout of groups from events; None: the unit does not divide their blocks."""
    if not groups or any(group.block_size % unit for group in groups):
        return None
    return KvLayout(groups, unit)


def _is_fine_grained(groups: Sequence[KvGroup], unit: int) -> bool:
    """Return whether hits end at any unit. Source: partial_hash_hits_enabled."""
    if not any(group.kind == MAMBA and group.block_size > unit for group in groups):
        return False
    return all(
        group.kind == MAMBA or group.kind in FULL_ATTENTION or group.block_size == unit
        for group in groups
    )


class _Footprint(NamedTuple):
    blocks_per_token: float
    num_blocks: int  # of a conversation of any length


def capacity_tokens(layout: KvLayout, num_blocks: int, num_sessions: int) -> int | None:
    """Return how many tokens `num_sessions` conversations may have in all.

    None: no group grows with tokens.
    """
    footprint = _footprint(layout.groups, layout.drops_last)
    if not footprint.blocks_per_token:
        return None
    num_free = num_blocks - num_sessions * footprint.num_blocks
    return max(0, int(num_free / footprint.blocks_per_token))


@lru_cache(maxsize=64)
def _footprint(groups: tuple[KvGroup, ...], in_windows: bool) -> _Footprint:
    per_token, num_blocks = 0.0, 0
    for group in groups:
        if group.kind == MAMBA:
            num_blocks += 1
        elif group.kind in SLIDING_WINDOW and group.window is not None:
            num_blocks += -(-(group.window - 1) // group.block_size) + in_windows
        else:
            per_token += 1 / group.block_size
    return _Footprint(per_token, num_blocks)
