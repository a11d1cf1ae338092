"""The life of one replica, beside the requests.

    discover (until it answers) -> register -> [follow its ranks | ask about its models | probe it]
    -> gone or restarted -> drop its blocks -> discover again

Its configuration stays. Its facts belong to a process; the next one may have others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from router.base.backoff import Backoff
from router.base.errors import UpstreamError
from router.config import Config, ReplicaConfig, bootstrap_of
from router.discovery.engine_api import EngineApi
from router.discovery.engine_facts import EngineFacts
from router.discovery.model_watch import ModelWatch
from router.discovery.probes import Probes
from router.discovery.rank_streams import RankStreams
from router.discovery.status import Waiting
from router.pool.pools import Pools
from router.replicas.fleet import Fleet
from router.replicas.replica import Replica

logger = logging.getLogger(__name__)

HISTORY: Final = "its event history is being replayed"

_DISCOVER_S: Final = (0.2, 5.0)  # first and longest pause between attempts
_INFO_S: Final = 5.0  # the first answer about its configuration takes an engine 2 s
_HISTORY_S: Final = 5.0  # readiness waits this long for a replica's event history


class WatchTools(Struct, frozen=True, kw_only=True):
    """The parts of the router that all watches use."""

    config: Config
    engine_api: EngineApi
    fleet: Fleet
    waiting: Waiting
    """Why a replica is not usable (yet); read by readiness and the admin API."""
    models: ModelWatch
    probes: Probes
    on_restart: Callable[[str, float], None]
    """Called with a replica for which another process answers, and now."""


class ReplicaWatch:
    """Watches one configured replica, from process to process.

    Args:
        is_offered: Whether it may have requests once it is found.
    """

    def __init__(
        self,
        name: str,
        replica: ReplicaConfig,
        tools: WatchTools,
        *,
        is_offered: Callable[[], bool],
        streams: RankStreams,
        pools: Pools,
    ) -> None:
        self._name = name
        self._replica = replica
        self._url = replica.url.rstrip("/")
        self._config = tools.config
        self._engine_api = tools.engine_api
        self._fleet = tools.fleet
        self._waiting = tools.waiting
        self._is_offered = is_offered
        self._streams = streams
        self._models = tools.models
        self._pools = pools
        self._probes = tools.probes
        self._on_restart = tools.on_restart

    async def run(self) -> None:
        """Watch the replica until cancelled."""
        while True:
            facts = await self._discover()
            replica = self._register(facts, await self._key_head(facts))
            sources = self._streams.make(
                replica,
                facts,
                configured=self._replica,
                lora_paths=self._models.lora_paths(replica),
            )
            try:
                async with asyncio.TaskGroup() as tg:
                    followers = [
                        tg.create_task(
                            self._streams.follow(source), name=f"follow {source.candidate}"
                        )
                        for source in sources
                    ]
                    tg.create_task(self._await_history(replica), name=f"history {self._name}")
                    aside = self._models.begin(replica, tg)
                    await self._probes.run(replica, facts)
                    aside.cancel()
                    for follower, source in zip(followers, sources, strict=True):
                        self._streams.restarted(source)
                        follower.cancel()
            finally:
                self._models.forget(self._name)
                self._pools.detach(replica)
                self._streams.drop(replica)
            logger.warning("replica restarted", extra={"replica": self._name})
            self._on_restart(self._name, time.monotonic())

    async def _discover(self) -> EngineFacts:
        """Ask until the replica answers; each new reason for a failure is logged once."""
        backoff = Backoff(*_DISCOVER_S)
        said = ""
        while True:
            try:
                return await self._engine_api.facts(self._name, self._url)
            except UpstreamError as exc:
                # Requests may be waiting at one found before.
                self._probes.is_up_after(self._name, exc)
                self._waiting[self._name] = exc.message
                if exc.message != said:
                    said = exc.message
                    logger.warning(
                        "replica not usable yet", extra={"replica": self._name, "reason": said}
                    )
            await asyncio.sleep(backoff.next_s())

    async def _key_head(self, facts: EngineFacts) -> str | None:
        """Ask an engine in dev mode how its keys in a pool begin. None: it does not say."""
        if not facts.shows_pause or self._pools.of(self._replica) is None:
            return None
        info = await self._engine_api.server_info(self._name, self._url, timeout_s=_INFO_S)
        return info.key_head if info is not None else None

    def _register(self, facts: EngineFacts, key_head: str | None) -> Replica:
        """Register a discovered replica with the fleet; its caches are not known yet.

        A replica that was draining stays so: the operator decides when that ends.
        """
        name, transfer = self._name, self._replica.transfer or self._config.prefill.transfer
        has_bootstrap = (self._replica.role, transfer) == ("prefill", "mooncake")
        replica = Replica(
            name=name,
            url=self._url,
            models=facts.models,
            num_ranks=facts.num_ranks,
            block_size=facts.block_size,
            num_blocks=facts.num_gpu_blocks,
            num_cache_tokens=facts.num_cache_tokens,
            kv_dtype=facts.kv_dtype,
            version=facts.version,
            publishes_events=bool(facts.endpoints(self._config.events, self._replica)),
            caches_prefixes=facts.prefix_caching is not False,
            cost_class=self._replica.hardware or facts.models[0].id,
            cost_per_hour=self._replica.cost_per_hour or self._config.engine.cost_per_hour,
            weight=self._replica.weight,
            draining=not self._is_offered(),
            role=self._replica.role,
            transfer=transfer,
            bootstrap=bootstrap_of(self._replica) if has_bootstrap else None,
            seems=facts.seems,
            pool=self._pools.of(self._replica),
            event_ports=facts.event_ports(name, self._config.events, self._replica),
        )
        self._fleet.members.add(replica)
        now_s = time.monotonic()
        self._fleet.members.probe_ok(name, now_s)
        if self._fleet.members.note_start(name, facts.started_s, now_s):
            logger.warning(
                "several engines answer at the replica's address: predictions are wrong; "
                "name each engine",
                extra={"replica": name, "url": self._url},
            )
        self._pools.attach(replica, self._replica, key_head)
        if replica.publishes_events:
            self._waiting[name] = HISTORY
        else:
            self._waiting.pop(name, None)
        _log_found(replica, facts)
        return replica

    async def _await_history(self, replica: Replica) -> None:
        """Delay readiness until the replica's event history is read, for a bounded time."""
        if not replica.publishes_events:
            return
        deadline_s = time.monotonic() + _HISTORY_S
        while time.monotonic() < deadline_s:
            if self._streams.have_history(replica):
                break
            await asyncio.sleep(0.02)
        self._waiting.pop(replica.name, None)


def _log_found(replica: Replica, facts: EngineFacts) -> None:
    """Log a discovered replica, and what seems wrong with it."""
    logger.info(
        "replica found",
        extra={
            "replica": replica.name,
            "url": replica.url,
            "models": ",".join(m.id for m in replica.models),
            "version": facts.version or "unknown",
            "ranks": facts.num_ranks,
            "block_size": facts.block_size,
            "blocks": facts.num_gpu_blocks,
            "events": "yes" if replica.publishes_events else "no: routing to it is approximate",
        },
    )
    if facts.seems not in (None, replica.role):
        logger.warning(
            "replica seems to have another role: set replicas[].role",
            extra={"replica": replica.name, "role": replica.role, "seems": facts.seems},
        )
    if replica.event_ports is not None and (why := replica.event_ports.why_doubtful()):
        logger.warning(
            "event endpoint differs from the one the engine reports: is it another engine's?",
            extra={"replica": replica.name, "reason": why},
        )
    if facts.prefix_caching is False:
        logger.warning("prefix caching is off", extra={"replica": replica.name})
