"""The names of a Mooncake pool's objects, as far as they must be understood.

    [PREFIX@]MODEL[NAMESPACE]@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@<64 hex digits>
    NAMESPACE  @store_tp:N@store_pp:M@store_format:F      any tensor parallel size, N shards
               @store_pp:M@store_format:F                 one size, which F names
    head: all but the last field     pattern: the head with the numbers of ranks and group left out

Source: PoolKey.build_prefix and TPShardedStoreLayout.shared_namespace in
vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/data.py, 0.32.0; other releases put
`@cfg:<12 hex>` in. So fields that end in a rank's or a group's number are recognised, and what the
namespace says of them; everything else is taken as it is, the first field in every case.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import product
from pathlib import PurePath
from typing import Final, NamedTuple

from router.contracts import KEY_MASK, BlockKey
from router.replicas.replica import ServedModel

Ranks = tuple[int, ...]
"""Numbers of the ranks that an object is of, in the order of its key: tp, pcp, dcp, pp."""

_RANK: Final = re.compile(r"((?:head_or_)?(?:tp|pcp|dcp|pp|ep)(?:_rank)?:?)(\d{1,9})")
_GROUP_NAME: Final = "group:"
_GROUP: Final = re.compile(r"group:(\d{1,9})")
_SHARDS: Final = re.compile(r"store_(tp|pp):(\d{1,4})")
_MIN_DIGEST_CHARS: Final = 16  # hex; a block key is the last 60 bits of it
_MAX_HEADS: Final = 4096  # any client may write into a pool, and must not fill our memory


class GroupObjects:
    """Objects of one pattern and one KV group.

    `blocks` maps a block to the ranks whose objects are there, as bits: every block while a
    listing is read and where no model claims the group; otherwise only blocks that are not whole.
    """

    __slots__ = ("_bits", "blocks", "number", "pattern")

    def __init__(self, pattern: KeyPattern, number: int) -> None:
        self.pattern = pattern
        self.number = number
        self.blocks: dict[BlockKey, int] = {}
        self._bits: dict[Ranks, int] = {}

    @property
    def all_bits(self) -> int:
        """The bits of all ranks that were ever seen."""
        return (1 << len(self._bits)) - 1

    def bit_of(self, ranks: Ranks) -> int:
        """Return the bit of a rank; one that was not seen yet is added."""
        return self._bits.setdefault(ranks, 1 << len(self._bits))

    def ranks_of(self, bits: int) -> list[Ranks]:
        """List the ranks of some bits."""
        return [ranks for ranks, bit in self._bits.items() if bits & bit]


class KeyPattern:
    """Objects whose keys differ in ranks, KV group and digest only.

    Args:
        names: The fields of their heads, numbers left out.
        numbered: Positions of the fields that have one.
    """

    __slots__ = ("_names", "_numbered", "fields", "groups")

    def __init__(self, names: Sequence[str], numbered: Sequence[int]) -> None:
        self._names = names
        self._numbered = numbered
        self.fields = frozenset(names[: numbered[0]] if numbered else names)
        self.groups: dict[int, GroupObjects] = {}

    @property
    def rank_names(self) -> list[str]:
        """Name the ranks in its keys, in their order: `tp_rank:`, `pcp`, ..."""
        return [self._names[at] for at in self._numbered if self._names[at] != _GROUP_NAME]

    @property
    def shards(self) -> dict[str, int]:
        """What its namespace says of its ranks: how many `tp`, how many `pp`."""
        found = (_SHARDS.fullmatch(name) for name in self.fields)
        return {match[1]: int(match[2]) for match in found if match is not None}

    def matches(self, hints: Collection[str]) -> bool:
        """Return whether one of a model's names comes before the ranks."""
        return not self.fields.isdisjoint(hints)

    def group(self, number: int) -> GroupObjects:
        """Return the objects of a KV group."""
        if number not in self.groups:
            self.groups[number] = GroupObjects(self, number)
        return self.groups[number]

    def head(self, ranks: Iterable[int | str], group: int | str) -> str:
        """Build the head of a key, or what is shown for several of them."""
        names, rest = list(self._names), iter(ranks)
        for at in self._numbered:
            names[at] += str(group if names[at] == _GROUP_NAME else next(rest))
        return "@".join(names)

    def begin_listing(self) -> None:
        """Forget the objects, but not what their keys look like."""
        for group in self.groups.values():
            group.blocks = {}


class PooledObject(NamedTuple):
    """The meaning of an object's key."""

    group: GroupObjects
    bit: int
    block: BlockKey


class PatternTable:
    """Every pattern seen so far, by the heads of keys."""

    __slots__ = ("_by_head", "_by_names")

    def __init__(self) -> None:
        self._by_head: dict[str, tuple[GroupObjects, int]] = {}
        self._by_names: dict[tuple[tuple[str, ...], tuple[int, ...]], KeyPattern] = {}

    @property
    def patterns(self) -> list[KeyPattern]:
        """List the patterns, in the order they were first seen."""
        return list(self._by_names.values())

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

    def _learn(self, head: str) -> tuple[GroupObjects, int] | None:
        if not head or len(self._by_head) >= _MAX_HEADS:
            return None
        names = head.split("@")
        ranks: list[int] = []
        numbered: list[int] = []
        group = 0
        for at, name in enumerate(names):
            if at == 0:
                continue  # a prefix or a model, which may be called `tp2`
            if (rank := _RANK.fullmatch(name)) is not None:
                names[at] = rank[1]
                ranks.append(int(rank[2]))
                numbered.append(at)
            elif at == len(names) - 1 and (found := _GROUP.fullmatch(name)) is not None:
                names[at] = _GROUP_NAME
                group = int(found[1])
                numbered.append(at)
        known_as = tuple(names), tuple(numbered)
        pattern = self._by_names.get(known_as)
        if pattern is None:
            pattern = self._by_names[known_as] = KeyPattern(*known_as)
        objects = pattern.group(group)
        known = self._by_head[head] = (objects, objects.bit_of(tuple(ranks)))
        return known


def all_ranks(pattern: KeyPattern) -> list[Ranks] | None:
    """List the ranks that make a block, where the keys themselves say it; None: they do not."""
    shards = pattern.shards
    if "tp" not in shards or "pp" not in shards:
        return None
    if not 0 < shards["tp"] * shards["pp"] <= _MAX_HEADS:
        return None
    sizes = [shards.get(name[:2], 1) for name in pattern.rank_names]
    return list(product(*map(range, sizes)))


def names_in_keys(models: Iterable[ServedModel]) -> list[str]:
    """List the names that a replica's objects may have in their keys.

    The connector takes the last part of the path that its engine was given.
    """
    own = [model for model in models if model.parent is None]
    roots = [model.root for model in own if model.root]
    return [*(model.id for model in own), *roots, *(PurePath(root).name for root in roots)]
