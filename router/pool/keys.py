"""The names of a Mooncake pool's objects, as far as they must be understood.

    [PREFIX@]MODEL[@NAMESPACE]@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@<64 hex digits>
    head: all but the last field          pattern: the head with its ranks' numbers left out

Source: PoolKey in vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/data.py, 0.32.0;
other releases put `@cfg:<12 hex>` in. So only the last field is read, the digest; fields that end
in a rank's number are recognised, and everything else is taken as it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import PurePath
from typing import Final, NamedTuple

from router.contracts import KEY_MASK, BlockKey
from router.replicas.replica import ServedModel

_RANK: Final = re.compile(r"((?:head_or_)?(?:tp|pcp|dcp|pp|ep)(?:_rank)?:?)\d+")
_MIN_DIGEST_CHARS: Final = 16  # hex; a block key is the last 60 bits of it
_MAX_HEADS: Final = 4096  # any client may write into a pool, and must not fill our memory
_MIN_SHARE: Final = 0.5


class KeyPattern:
    """Objects whose keys differ in ranks and digest only: one deployment's, of one KV group.

    `blocks` maps a block to the ranks whose objects are there, as bits: every block while a
    listing is read and where no model claims the pattern; otherwise only blocks that are not whole.
    """

    __slots__ = ("_counts", "_heads", "_required", "blocks", "fields", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        names = text.split("@")
        ranked = [position for position, name in enumerate(names) if name.endswith("*")]
        self.fields = frozenset(names[: ranked[0]] if ranked else names)
        self.blocks: dict[BlockKey, int] = {}
        self._heads: list[str] = []  # one per rank, in the order of its bits
        self._counts: list[int] = []  # objects of each rank in the last listing
        self._required = 0

    @property
    def num_ranks(self) -> int:
        """Count the objects that make a block."""
        return self._required.bit_count()

    @property
    def all_bits(self) -> int:
        """The bits of a whole block."""
        return self._required

    def matches(self, hints: Collection[str]) -> bool:
        """Return whether one of a model's names comes before the ranks."""
        return not self.fields.isdisjoint(hints)

    def is_whole(self, bits: int) -> bool:
        """Return whether all ranks' objects of a block are there."""
        return bits & self._required == self._required

    def names(self, digest: bytes) -> list[str]:
        """Name the objects that make a block."""
        return [
            f"{head}@{digest.hex()}"
            for position, head in enumerate(self._heads)
            if self._required >> position & 1
        ]

    def add_rank(self, head: str) -> int:
        """Add a rank by its head; return its bit."""
        bit: int = 1 << len(self._heads)
        self._heads.append(head)
        self._counts.append(0)
        self._required |= bit
        return bit

    def begin_listing(self) -> None:
        """Forget the objects, but not what their keys look like."""
        self._counts = [0] * len(self._heads)
        self.blocks = {}

    def count(self, bit: int) -> None:
        """Count a listed object."""
        self._counts[bit.bit_length() - 1] += 1

    def infer_ranks(self) -> None:
        """After a listing: leave out ranks with far fewer objects than others; they are old."""
        most = max(self._counts)
        if most:
            self._required = sum(
                1 << position
                for position, count in enumerate(self._counts)
                if count >= _MIN_SHARE * most
            )


class PooledObject(NamedTuple):
    """The meaning of an object's key."""

    pattern: KeyPattern
    bit: int
    block: BlockKey


class PatternTable:
    """Every pattern seen so far, by the heads of keys."""

    __slots__ = ("_by_head", "_by_text")

    def __init__(self) -> None:
        self._by_head: dict[str, tuple[KeyPattern, int]] = {}
        self._by_text: dict[str, KeyPattern] = {}

    @property
    def patterns(self) -> list[KeyPattern]:
        """List the patterns, in the order they were first seen."""
        return list(self._by_text.values())

    def parse(self, key: str) -> PooledObject | None:
        """Read a key; None: it names no block (0.7 us)."""
        head, _, digest = key.rpartition("@")
        known = self._by_head.get(head)
        if known is None:
            known = self._learn(head)
            if known is None:
                return None
        try:
            block = BlockKey(int(digest, 16) & KEY_MASK)
        except ValueError:
            return None
        if len(digest) < _MIN_DIGEST_CHARS:
            return None
        return PooledObject(known[0], known[1], block)

    def _learn(self, head: str) -> tuple[KeyPattern, int] | None:
        if not head or len(self._by_head) >= _MAX_HEADS:
            return None
        text = "@".join(
            _RANK.sub(r"\1*", name) if _RANK.fullmatch(name) else name for name in head.split("@")
        )
        pattern = self._by_text.get(text)
        if pattern is None:
            pattern = self._by_text[text] = KeyPattern(text)
        known = self._by_head[head] = (pattern, pattern.add_rank(head))
        return known


def names_in_keys(models: Iterable[ServedModel]) -> list[str]:
    """List the names that a replica's objects may have in their keys.

    The connector takes the last part of the path that its engine was given.
    """
    own = [model for model in models if model.parent is None]
    roots = [model.root for model in own if model.root]
    return [*(model.id for model in own), *roots, *(PurePath(root).name for root in roots)]
