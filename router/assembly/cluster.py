"""Builds what is shared with other routers."""

from __future__ import annotations

import os
import secrets
import socket

from router.assembly.discovery import Discovery
from router.assembly.parts import Parts
from router.cluster import OrderShare, PoolShare, RecordShare, SharedState, Sharing
from router.cluster.candidate_source import CandidateNames
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.cluster.redis_store import RedisStore
from router.cluster.shares import QueueShare, share_pauses
from router.scheduling.queue import ALONE, Elsewhere


class Cluster:
    """The other routers; None of all but `names` if there are none.

    Args: see `Router`.

    names: Candidates by the names that all routers know.
    peers, outbox: What other routers say, and what is said to them.
    store, sharing: Redis, and what goes through it. None: no Redis is configured.
    queues: The queues of other routers.
    """

    def __init__(
        self,
        parts: Parts,
        discovery: Discovery,
        *,
        redis_password: str | None,
        peer_name: str | None,
    ) -> None:
        config = parts.config
        self.names = CandidateNames(parts.registry, parts.fleet)
        self.peers: Peers | None = None
        self.outbox: Outbox | None = None
        self.store: RedisStore | None = None
        self.sharing: Sharing | None = None
        self.queues: Elsewhere = ALONE
        if not config.redis.is_configured and peer_name is None:
            return
        name = peer_name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.peers = Peers(
            name,
            fleet=parts.fleet,
            caches=parts.caches,
            conversations=parts.conversations,
            names=self.names,
            metrics=parts.metrics,
            lease_s=config.redis.lease_s,
        )
        self.outbox = Outbox(
            caches=parts.caches,
            conversations=parts.conversations,
            names=self.names,
            metrics=parts.metrics,
        )
        sleepers = discovery.sleepers
        sleepers.on_order = share_pauses(
            sleepers.follow, names=self.names, outbox=self.outbox, peers=self.peers
        )
        self.queues = QueueShare(parts.fleet.conversations, outbox=self.outbox, peers=self.peers)
        if config.redis.is_configured:
            self.store = RedisStore(
                config.redis, router=name, password=redis_password, names=parts.names
            )
            self.sharing = Sharing(
                self.store,
                _shares(parts, discovery, self.store, self.peers, self.outbox),
                caches=parts.caches,
                names=self.names,
                lease_s=config.redis.lease_s,
                metrics=parts.metrics,
            )
            discovery.streams.sharing = self.sharing


def _shares(
    parts: Parts, discovery: Discovery, store: RedisStore, peers: Peers, outbox: Outbox
) -> SharedState:
    return SharedState(
        peers=peers,
        outbox=outbox,
        orders=OrderShare(store, parts.registry, discovery.watches.apply),
        records=RecordShare(
            store,
            peers=peers,
            outbox=outbox,
            responses=parts.responses,
            ttl_s=parts.config.session.ttl_s,
        ),
        pools=[PoolShare(pool.catalog, pool.follower, pool.name) for pool in parts.pools.values()],
    )
