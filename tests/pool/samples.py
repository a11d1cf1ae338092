"""Blocks, objects and listings of a pool for tests."""

from __future__ import annotations

from collections.abc import Iterable

from router.base.contracts import BlockKey, block_key
from router.pool.catalog import PoolCatalog

HEAD = "tiny@tp_rank:0@group:0"


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def chain(*numbers: int) -> list[BlockKey]:
    return [block_key(digest(number)) for number in numbers]


def names(*numbers: int, head: str = HEAD) -> list[str]:
    """Name an object of each block."""
    return [f"{head}@{digest(number).hex()}" for number in numbers]


def list_keys(pool: PoolCatalog, keys: Iterable[str]) -> None:
    """Have the pool read a whole listing."""
    pool.begin_listing()
    pool.listed(keys)
    for _ in pool.reconcile(7):
        pass


def a_pool(*replicas: str, model: str = "tiny") -> PoolCatalog:
    """Create a pool that is up, with replicas of one model."""
    pool = PoolCatalog()
    for replica in replicas or ("r1",):
        pool.add_replica(replica, model, (model,))
    pool.found()
    return pool
