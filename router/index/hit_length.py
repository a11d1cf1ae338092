"""How long a cache hit is in a model of several KV groups: the engine's own rule, pure.

What must live here: the rule. What must not: events, tiers, where the blocks are known from.

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
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import lcm
from typing import Final

from router.base.contracts import KEY_MASK, BlockKey
from router.base.messages import KvGroup
from router.index.group_rules import Chain, GroupKind, Mamba, Whole, Window

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
