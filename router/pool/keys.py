"""The names of a Mooncake pool's objects.

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
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
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
