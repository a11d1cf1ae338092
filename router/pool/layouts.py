"""Which objects make a block, derived from the ranks that a listing shows.

A rank's look-up wants the objects of all ranks that have something of their own (worker.py
`_init_lookup_key_prefixes` and `_spec_tp_replication_factor` in vLLM 0.32.0's Mooncake store):

    ranks in its keys     tp 0..T-1 x pcp 0..I-1 x pp 0..K-1, dcp 0
    MLA                   the same with T = 1: every rank has the same bytes
    GQA, tp > KV heads    T = KV heads
    DCP > 1               dcp is tp mod DCP
    store_tp, store_pp    the namespace says how many, whatever is there

So the ranks of a whole block are a grid, and a grid is all that need be found. Without a namespace
keys do not say how many ranks there are: engines of TP 2 and of TP 4 name some objects alike, and
cannot read each other's. Then a block is of the grid that it fills exactly. What several KV groups
need is found for each group; of them only the largest grid is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Final

from router.pool.keys import GroupObjects, KeyPattern, Ranks, all_ranks

_MAX_KINDS: Final = 64  # of blocks, by the ranks that are there; the most frequent are looked at


class GroupLayout:
    """Which objects make a block of one KV group.

    `is_exact`: a block that has more of them is another layout's. `further`: the other KV groups of
    its model, for the first one.
    """

    __slots__ = ("_heads", "further", "group", "is_exact", "required", "text")

    def __init__(
        self, group: GroupObjects, required: int, *, is_exact: bool = False, text: str = ""
    ) -> None:
        self.further: tuple[int, ...] = ()
        self.group = group
        self.required = required
        self.is_exact = is_exact
        self.text = text
        ranks = group.ranks_of(required)
        self._heads = [group.pattern.head(numbers, group.number) for numbers in ranks]

    @property
    def num_ranks(self) -> int:
        """Count the objects that make a block."""
        return len(self._heads)

    def is_whole(self, bits: int) -> bool:
        """Return whether the ranks that have a block are those that it takes."""
        return (bits if self.is_exact else bits & self.required) == self.required

    def names(self, digest: bytes) -> list[str]:
        """Name the objects that make a block."""
        text = digest.hex()
        return [f"{head}@{text}" for head in self._heads]


class Layout:
    """One way in which a pattern's blocks are cut into objects.

    `text` is its name: the head of its keys with the range of each number.
    """

    __slots__ = ("groups", "pattern", "text")

    def __init__(
        self, pattern: KeyPattern, required: Mapping[int, int], *, is_exact: bool = False
    ) -> None:
        self.pattern = pattern
        self.text = _text(pattern, required)
        self.groups = {
            number: GroupLayout(pattern.groups[number], bits, is_exact=is_exact, text=self.text)
            for number, bits in sorted(required.items())
        }
        self.main.further = tuple(self.groups)[1:]

    @property
    def main(self) -> GroupLayout:
        """The first KV group."""
        return next(iter(self.groups.values()))

    def fits(self, wanted: str) -> bool:
        """Return whether all fields of a configured text are among the name's."""
        return set(wanted.split("@")) <= set(self.text.split("@"))


def layouts_of(
    pattern: KeyPattern, seen: Mapping[int, Counter[int]], before: Sequence[Layout] = ()
) -> list[Layout]:
    """List a pattern's layouts, those of the most ranks first.

    Args:
        seen: KV group to how many blocks have which ranks, as bits; groups without blocks left out.
        before: What an earlier listing showed; it holds as long as objects of all its ranks are
            there, for a block that lost some of its objects may look like another layout's.
    """
    known = all_ranks(pattern)
    if known is not None:
        groups = {number: pattern.groups[number] for number in seen}
        return [Layout(pattern, {n: sum(map(g.bit_of, known)) for n, g in groups.items()})]
    earlier = [(n, group.required) for layout in before for n, group in layout.groups.items()]
    grids = {
        number: _grids(pattern.groups[number], counts, {bits for n, bits in earlier if n == number})
        for number, counts in seen.items()
    }
    if not grids:
        return []
    if len(grids) > 1:
        return [Layout(pattern, {number: masks[0] for number, masks in grids.items()})]
    ((number, masks),) = grids.items()
    return [
        Layout(pattern, {number: mask}, is_exact=any(mask & ~more == 0 for more in masks[:at]))
        for at, mask in enumerate(masks)
    ]


def _grids(group: GroupObjects, counts: Counter[int], earlier: Collection[int]) -> list[int]:
    """Find the grids that blocks fill, largest first; without one, all ranks seen are wanted."""
    there = 0
    for bits in counts:
        there |= bits
    found = {bits for bits in earlier if not bits & ~there}
    found |= {
        bits
        for bits, _ in counts.most_common(_MAX_KINDS)
        if is_grid(group.ranks_of(bits), group.pattern)
    }
    ordered = sorted(found, key=lambda bits: (-bits.bit_count(), -counts[bits], bits))
    return ordered or [group.all_bits]


def is_grid(ranks: Collection[Ranks], pattern: KeyPattern) -> bool:
    """Return whether these are all ranks of some engine."""
    names = pattern.rank_names
    if not ranks:
        return False
    sizes = [max(numbers) + 1 for numbers in zip(*ranks, strict=True)]
    stages = pattern.shards.get("pp")
    if stages is not None and dict(zip(names, sizes, strict=True)).get("pp_rank:", 1) != stages:
        return False
    if "dcp" in names and sizes[at := names.index("dcp")] > 1:
        if "tp_rank:" not in names:
            return False
        tp, num_dcp = names.index("tp_rank:"), sizes[at]
        sizes[at] = 1
        if sizes[tp] % num_dcp or any(rank[at] != rank[tp] % num_dcp for rank in ranks):
            return False
    num_ranks: int = prod(sizes)
    return num_ranks == len(ranks)


def only_largest(layouts: Sequence[Layout]) -> Layout | None:
    """Return the layout whose ranks include all others'; None: there is no such."""
    if not layouts:
        return None
    largest = layouts[0]
    required = largest.main.required
    if any(layout.main.required & ~required for layout in layouts):
        return None
    return largest


def _text(pattern: KeyPattern, required: Mapping[int, int]) -> str:
    ranks = {
        numbers
        for number, bits in required.items()
        for numbers in pattern.groups[number].ranks_of(bits)
    }
    columns = zip(*ranks, strict=True) if ranks else ()
    return pattern.head([_range(column) for column in columns], _range(required))


def _range(numbers: Collection[int]) -> str:
    first, last = min(numbers), max(numbers)
    return str(first) if first == last else f"{first}-{last}"
