"""The Mooncake pools behind one router.

A replica is in one pool at most (`Replica.pool`), and each pool has its own master. A single pool,
configured by `mooncake.master`, has the name "".
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from router.base.names import Names
from router.config import MooncakeConfig
from router.metrics import Metrics
from router.pool.catalog import PoolCatalog
from router.pool.follower import PoolFollower
from router.pool.master import MasterApi
from router.pool.questions import Questions
from router.upstream.connections import Strays


class Pool(Struct, frozen=True):
    """One pool: its contents, and the parts that learn them."""

    name: str
    catalog: PoolCatalog
    master: MasterApi
    follower: PoolFollower
    questions: Questions


def build_pools(
    config: MooncakeConfig, metrics: Metrics, names: Names, strays: Strays
) -> Mapping[str, Pool]:
    """Build every configured pool, by name."""
    pools: dict[str, Pool] = {}
    for each in config.each:
        catalog = PoolCatalog()
        master = MasterApi(each.master, timeout_s=config.timeout_s, names=names, strays=strays)
        pools[each.name] = Pool(
            each.name,
            catalog,
            master,
            PoolFollower(catalog, master, config, metrics, name=each.name),
            Questions(
                catalog,
                master,
                max_objects=config.verify_keys,
                timeout_s=config.verify_timeout_s,
                metrics=metrics,
                name=each.name,
            ),
        )
    return pools
