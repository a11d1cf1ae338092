"""Which objects make a block.

A block of a large model is several objects: one for each rank that has KV of its own (worker.py
`_init_lookup_key_prefixes` and `_spec_tp_replication_factor` in vLLM 0.32.0's Mooncake store). An
engine reads a block only if all of them are there. Sources of a replica's layout:

    configured      `replicas[].pool_layout`: words and ranges of numbers in its keys
    the engine      its model's name, and in dev mode its `cache_prefix`
    the namespace   `store_tp` and `store_pp` in the keys say how many ranks there are
    the listing     verifies: a layout counts if one pattern of keys fits, and every rank is there

Ranks that nothing else names are those that the listing shows. If several patterns fit, and none is
configured in full, nothing is credited: the replica could not read blocks of the wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Final

from msgspec import Struct

from router.pool.keys import Head, Pattern

_RANGE: Final = re.compile(r"([a-z_]+:?)(\d{1,9})(?:-(\d{1,9}))?")
_SHARDS: Final = re.compile(r"store_(tp|pp):(\d{1,4})")
_MAX_RANKS: Final = 4096
_MAX_SHOWN: Final = 4


class Layout(Struct, frozen=True):
    """The objects that make a block.

    Args:
        text: The head of its keys, with the range of each number.
        heads: KV group to the heads of a block's objects; the first group is the main one.
    """

    text: str
    heads: Mapping[int, tuple[str, ...]]

    @property
    def main(self) -> int:
        """The first KV group."""
        return next(iter(self.heads))

    @property
    def further(self) -> tuple[int, ...]:
        """The other KV groups."""
        return tuple(self.heads)[1:]

    @property
    def num_ranks(self) -> int:
        """Count the objects that make a block of the main group."""
        return len(self.heads[self.main])

    def names(self, digest: bytes) -> list[str]:
        """Name the objects that make a block of the main group."""
        text = digest.hex()
        return [f"{head}@{text}" for head in self.heads[self.main]]


def find_layout(
    listed: Iterable[Head], names: Collection[str], wanted: str | None
) -> Layout | str | None:
    """Find a replica's layout among the heads of a listing.

    Args:
        listed: Every head.
        names: What its keys may call the model.
        wanted: The fields that are configured for it.

    Returns:
        The layout; why none counts; None if nothing there is the model's.
    """
    fitting: dict[Pattern, list[Head]] = {}
    for head in listed:
        if not head.words.isdisjoint(names) and _fits(head, wanted):
            fitting.setdefault(head.pattern, []).append(head)
    if len(fitting) > 1:
        texts = {pattern: _text(pattern, heads) for pattern, heads in fitting.items()}
        fitting = {pattern: fitting[pattern] for pattern, text in texts.items() if text == wanted}
        if not fitting:
            shown = ", ".join(sorted(texts.values())[:_MAX_SHOWN])
            return f"several layouts fit: {shown}; none is credited"
    for pattern, heads in fitting.items():
        if (absent := _absent(heads, wanted)) is not None:
            return f"no object of {absent} is listed"
        by_group: dict[int, tuple[str, ...]] = {}
        for group in sorted({head.group for head in heads}):
            of_group = [head for head in heads if head.group == group]
            by_group[group] = tuple(_named_by_shards(of_group[0])) or tuple(
                sorted(head.text for head in of_group)
            )
        return Layout(_text(pattern, heads), by_group)
    return None


def collisions(layouts: Mapping[str, Layout]) -> dict[str, str]:
    """Find the layouts that name some objects as another one does, by directory.

    An engine of one finds objects of another that it cannot read.
    """
    found: dict[str, str] = {}
    for name, layout in layouts.items():
        own = {head for heads in layout.heads.values() for head in heads}
        for other in layouts.values():
            others = {head for heads in other.heads.values() for head in heads}
            if own != others and own & others:
                found[name] = layout.text
    return found


def _fits(head: Head, wanted: str | None) -> bool:
    """Return whether a head has the configured words, and numbers in the configured ranges."""
    for field in wanted.split("@") if wanted is not None else ():
        if field in head.words:
            continue
        found = _range(field)
        if found is None or found[0] not in head.pattern.columns:
            return False
        if head.numbers[head.pattern.columns.index(found[0])] not in found[1]:
            return False
    return True


def _absent(heads: Sequence[Head], wanted: str | None) -> str | None:
    """Name a configured range of which some number has no objects; None: all are there."""
    for field in wanted.split("@") if wanted is not None else ():
        found = _range(field) if field not in heads[0].words else None
        if found is not None:
            at = heads[0].pattern.columns.index(found[0])
            if not {head.numbers[at] for head in heads} >= set(found[1]):
                return field
    return None


def _range(field: str) -> tuple[str, range] | None:
    """Read `tp_rank:0-3`: the column and its numbers."""
    match = _RANGE.fullmatch(field)
    if match is None:
        return None
    first, last = int(match[2]), int(match[3] or match[2])
    return (match[1], range(first, last + 1)) if last - first < _MAX_RANKS else None


def _named_by_shards(head: Head) -> list[str]:
    """Name the heads of all ranks, if the namespace says how many there are."""
    matches = (_SHARDS.fullmatch(word) for word in head.words)
    sizes = {match[1]: int(match[2]) for match in matches if match is not None}
    if not 0 < sizes.get("tp", 0) * sizes.get("pp", 0) <= _MAX_RANKS:
        return []
    of_column = {"tp_rank:": range(sizes["tp"]), "pp_rank:": range(sizes["pp"])}
    columns = zip(head.pattern.columns, head.numbers, strict=True)
    return [
        head.pattern.head(numbers)
        for numbers in product(*(of_column.get(name, [number]) for name, number in columns))
    ]


def _text(pattern: Pattern, heads: Collection[Head]) -> str:
    ranges = []
    for numbers in zip(*(head.numbers for head in heads), strict=True):
        first, last = min(numbers), max(numbers)
        ranges.append(str(first) if first == last else f"{first}-{last}")
    return pattern.head(ranges)
