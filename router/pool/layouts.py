"""The objects of a Mooncake pool: which of them make a block, and their names.

A block of a large model is several objects: one for each rank that has KV of its own (worker.py
`_init_lookup_key_prefixes` and `_spec_tp_replication_factor` in vLLM 0.32.0's Mooncake store). An
engine reads a block only if all of them are there. Sources of a replica's layout:

    configured      `replicas[].pool_layout`: words and ranges of numbers in its keys
    the engine      its model's name, and in dev mode its `cache_prefix`
    the namespace   `store_tp` and `store_pp` in the keys say how many ranks there are
    the listing     verifies: a layout counts if one pattern of keys fits, and every rank is there

Ranks that nothing else names are those that the listing shows. If several patterns fit, and none is
configured in full, nothing is credited: the replica could not read blocks of the wrong one.

    [PREFIX@]MODEL[NAMESPACE]@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@<64 hex digits>
    NAMESPACE  @store_tp:N@store_pp:M@store_format:F      any tensor parallel size, N shards
               @store_pp:M@store_format:F                 one size, which F names
    head       all fields but the last: the block's digest
    pattern    the head without the numbers of ranks and KV group

Source: PoolKey.build_prefix and TPShardedStoreLayout.shared_namespace in
vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/data.py, 0.32.0. Other releases add
`@cfg:<12 hex>`. So only ranks, group and shard numbers are interpreted; other fields are words.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import PurePath
from typing import Final

from msgspec import Struct

from router.base.contracts import KEY_MASK, BlockKey
from router.replicas.replica import ServedModel

_NUMBERED: Final = re.compile(r"((?:head_or_)?(?:tp|pcp|dcp|pp|ep)(?:_rank)?:?|group:)(\d{1,9})")
_MIN_DIGEST_CHARS: Final = 16  # hex; a block key is the last 60 bits of it
_MAX_HEADS: Final = 4096  # any client may write into a pool, and must not fill our memory


class Pattern(Struct, frozen=True):
    """What the keys of one deployment have in common.

    Args:
        fields: The fields of their heads, without the numbers of the numbered ones.
        numbered: Positions of the numbered fields: `tp_rank:`, `pcp`, ..., `group:`.
    """

    fields: tuple[str, ...]
    numbered: tuple[int, ...]

    @property
    def columns(self) -> list[str]:
        """The names of the numbered fields."""
        return [self.fields[at] for at in self.numbered]

    def head(self, numbers: Iterable[int | str]) -> str:
        """Write a head; each numbered field gets a number, or a range of them."""
        fields = list(self.fields)
        for at, number in zip(self.numbered, numbers, strict=True):
            fields[at] += str(number)
        return "@".join(fields)


class Head(Struct, frozen=True):
    """All of a key but the digest.

    `numbers` belong to the pattern's columns. `words` are the other fields: prefix, model and
    namespace.
    """

    text: str
    pattern: Pattern
    numbers: tuple[int, ...]
    words: frozenset[str]

    @property
    def group(self) -> int:
        """The KV group; 0 if the key names none."""
        columns = self.pattern.columns
        return self.numbers[columns.index("group:")] if "group:" in columns else 0


def read_head(text: str) -> Head:
    """Split a head into words and numbers. The first field is a word, even if it is `tp2`."""
    fields = text.split("@")
    numbers: dict[int, int] = {}
    for at, field in enumerate(fields[1:], start=1):
        found = _NUMBERED.fullmatch(field)
        if found is not None:
            fields[at], numbers[at] = found[1], int(found[2])
    words = frozenset(field for at, field in enumerate(fields) if at not in numbers)
    return Head(text, Pattern(tuple(fields), tuple(numbers)), tuple(numbers.values()), words)


class _Group:
    """The listed objects of one pattern and KV group."""

    __slots__ = ("blocks", "num_heads")

    def __init__(self) -> None:
        self.num_heads = 0
        self.blocks: dict[BlockKey, int] = {}  # -> bits of the heads that have an object of it


class Listing:
    """The objects that one listing of the pool shows."""

    __slots__ = ("_by_head", "_groups", "heads", "num_objects", "num_unknown")

    def __init__(self) -> None:
        self._by_head: dict[str, tuple[_Group, int]] = {}  # -> and its bit
        self._groups: dict[tuple[Pattern, int], _Group] = {}
        self.heads: list[Head] = []
        self.num_objects = 0
        self.num_unknown = 0  # keys that name no block

    def add(self, keys: Iterable[str]) -> None:
        """Add some lines (0.5 us a key)."""
        by_head = self._by_head
        for key in keys:
            self.num_objects += 1
            text, _, digest = key.rpartition("@")
            known = by_head.get(text) or self._learn(text)
            try:
                block = BlockKey(int(digest, 16) & KEY_MASK)
            except ValueError:
                known = None
            if known is None or len(digest) < _MIN_DIGEST_CHARS:
                self.num_unknown += 1
                continue
            group, bit = known
            group.blocks[block] = group.blocks.get(block, 0) | bit

    def whole(self, heads: Sequence[str], max_blocks: int) -> Iterator[list[BlockKey]]:
        """List the blocks that have an object of every head.

        Yields after `max_blocks` blocks were looked at, so that the caller can pause.
        """
        if not all(head in self._by_head for head in heads):
            return
        required = sum(self._by_head[head][1] for head in heads)
        items = iter(self._by_head[heads[0]][0].blocks.items())
        while some := list(islice(items, max_blocks)):
            yield [block for block, bits in some if bits & required == required]

    def num_blocks_beside(self, heads: Iterable[str]) -> int:
        """Count the blocks whose pattern and KV group none of these heads belongs to."""
        claimed = {id(self._by_head[head][0]) for head in heads if head in self._by_head}
        return sum(len(each.blocks) for each in self._groups.values() if id(each) not in claimed)

    def _learn(self, text: str) -> tuple[_Group, int] | None:
        if not text or len(self._by_head) >= _MAX_HEADS:
            return None
        head = read_head(text)
        group = self._groups.setdefault((head.pattern, head.group), _Group())
        known = self._by_head[text] = (group, 1 << group.num_heads)
        group.num_heads += 1
        self.heads.append(head)
        return known


def names_in_keys(models: Iterable[ServedModel]) -> list[str]:
    """List the names that keys may have for a replica's models.

    The connector takes the last part of the path that its engine was given.
    """
    own = [model for model in models if model.parent is None]
    roots = [model.root for model in own if model.root]
    return [*(model.id for model in own), *roots, *(PurePath(root).name for root in roots)]


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
