"""How much of a prompt a pool has, for a model with several KV groups.

An engine looks up objects as it looks up its own cache, so the rule is `router.index.hit_length`'s.
Two things differ: full attention may have holes, and each group has its own directory.
Source: MooncakeStoreCoordinator in
vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/coordinator.py, 0.32.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.base.contracts import BlockKey
from router.index.group_rules import Chain
from router.index.hit_length import FULL_ATTENTION, KvLayout
from router.pool.directory import PoolDirectory


class _Held:
    """The blocks of all groups, by the keys of a layout."""

    __slots__ = ("_groups",)

    def __init__(self, groups: Sequence[tuple[int, PoolDirectory]]) -> None:
        self._groups = groups

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, int)
        return any(BlockKey(key ^ salt) in directory for salt, directory in self._groups)


def hit(
    layout: KvLayout, directories: Mapping[int, PoolDirectory], chain: Sequence[BlockKey]
) -> int:
    """Count the blocks of a chain that an engine would fetch.

    Args:
        layout: The model's KV groups.
        directories: KV group to its blocks in the pool.
        chain: The blocks that can be reused at most.
    """
    limit = len(chain)
    held: list[tuple[int, PoolDirectory]] = []
    for group in layout.groups:
        directory, salt = directories.get(group.index), layout.salt(group.index)
        if directory is None or salt is None:
            return 0
        held.append((salt, directory))
        if group.kind in FULL_ATTENTION:
            size = group.block_size // layout.unit
            limit = min(limit, directory.match(chain[size - 1 : limit : size]) * size)
    return layout.hit(Chain(chain[:limit]), _Held(held), limit)


def least(directories: Mapping[int, PoolDirectory], chain: Sequence[BlockKey]) -> int:
    """Count the blocks that every group has, if windows and states are unknown."""
    num_blocks = len(chain)
    for directory in directories.values():
        num_blocks = directory.match(chain[:num_blocks])
    return num_blocks
