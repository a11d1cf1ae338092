"""The watches: one task for each replica of the registry, from the order until its removal.

Orders of this router's admin API and records from other routers come in here; the registry says
which replicas there should be, and `_reconcile` starts and cancels watches accordingly:

    added       its watch starts; it is used as soon as it is discovered
    draining    it is not offered any more
    leaving     not offered; when nothing of ours runs there, `sweep` removes it
    gone        its watch is cancelled, its caches go with it, then its load and its name
    moved       (the name at another address) gone, and added again

The same holds for what sources of replicas find (`follow`).

A name has at most one task: if another is wanted while one is ending, it starts after that.

A `ReplicaWatch` is the life of one replica, beside the requests:

    discover (until it answers) -> register -> [follow its ranks | ask about its models | probe it]
    -> gone or restarted -> drop its blocks -> discover again

Its configuration stays. Its facts belong to a process; the next one may have others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from router.base.backoff import Backoff
from router.base.bounded import Bounded
from router.base.errors import UpstreamError
from router.base.messages import Evacuation, ReplicaRecord
from router.base.supervisor import keep_running
from router.config import Config, ReplicaConfig, bootstrap_of
from router.discovery.engine_api import EngineApi
from router.discovery.engine_facts import EngineFacts
from router.discovery.model_watch import ModelWatch
from router.discovery.probes import Probes
from router.discovery.rank_streams import RankStreams
from router.discovery.status import UNDISCOVERED, Waiting
from router.metrics import Metrics
from router.pool.pools import Pools
from router.replicas.deaths import Deaths
from router.replicas.fleet import Fleet
from router.replicas.registry import Registry
from router.replicas.replica import Entry, Found, Replica, candidates_of
from router.upstream import Upstream

logger = logging.getLogger(__name__)

MAX_GONE: Final = 64
"""Replicas that are gone and still have series in /metrics."""


class Watches:
    """The tasks; see the module's charter.

    Args:
        tools: Of the watches. Entries of `waiting` are added and removed here.
        metrics: The series of a replica that has been gone for long are dropped.
    """

    def __init__(
        self,
        registry: Registry,
        tools: WatchTools,
        *,
        upstream: Upstream,
        metrics: Metrics,
    ) -> None:
        self._metrics = metrics
        self._gone: Bounded[str, tuple[str, ...]] = Bounded(MAX_GONE)  # it and its candidates
        self._registry = registry
        self._tools = tools
        self._fleet = tools.fleet
        self._upstream = upstream
        self._waiting = tools.waiting
        self._group: asyncio.TaskGroup | None = None
        self._running: dict[str, tuple[Entry, asyncio.Task[None]]] = {}
        self._ending: set[str] = set()
        self._refused: set[str] = set()  # records that were logged as refused
        for entry in registry.entries:
            self._waiting[entry.name] = UNDISCOVERED

    # -- life --------------------------------------------------------------------------------

    def start(self, group: asyncio.TaskGroup) -> None:
        """Watch every replica there should be."""
        self._group = group
        for entry in self._registry.entries:
            self._reconcile(entry.name)

    def stop(self) -> None:
        """Cancel every watch; the fleet stays as it is, for answers in flight."""
        self._group = None
        self._ending.clear()
        for _, task in self._running.values():
            task.cancel()

    def sweep(self) -> None:
        """Remove replicas that are leaving and have nothing of ours in flight."""
        for entry in self._registry.entries:
            if entry.leaving and self._fleet.load.is_idle(entry.name):
                self._forget(entry.name)

    def is_offered(self, name: str) -> bool:
        """Return whether a replica may have new requests."""
        entry = self._registry.find(name)
        return entry is not None and entry.is_offered

    # -- orders ------------------------------------------------------------------------------

    def add(self, replica: ReplicaConfig) -> tuple[Entry, bool]:
        """Add a replica; return its entry and whether it is new.

        Raises:
            ConfigError, ReplicaConflict: it cannot be one; its name or address is another's.
        """
        entry, is_new = self._registry.add(replica)
        if is_new:
            logger.info("replica added", extra={"replica": entry.name, "url": entry.replica.url})
            self._reconcile(entry.name)
        return entry, is_new

    def drain(self, name: str, *, draining: bool, evacuation: Evacuation | None = None) -> Entry:
        """Stop (or resume) sending new requests to a replica.

        `evacuation`: when its live conversations may stay there; None: they may not.

        Raises:
            UnknownReplica: there is none of that name.
        """
        entry = self._registry.drain(name, draining=draining, evacuation=evacuation)
        logger.info("replica drains" if draining else "replica is back", extra={"replica": name})
        self._reconcile(name)
        return entry

    def remove(self, name: str, *, now: bool) -> Entry:
        """Remove a replica when nothing of ours runs there any more; or `now`.

        With `now`, requests that wait there for a first byte move on to another replica. Answers
        that have begun still finish.

        Raises:
            UnknownReplica: there is none of that name.
        """
        entry = self._registry.remove(name)
        logger.info("replica is leaving", extra={"replica": name})
        self._reconcile(name)
        if now:
            self._upstream.abort(name)
            self._forget(name)
        else:
            self.sweep()
        return entry

    def apply(self, records: Mapping[str, ReplicaRecord]) -> None:
        """Apply the records of all routers; impossible ones are logged once."""
        for identity, record in records.items():
            reason = self._registry.refused(identity, record)
            if reason is not None and identity not in self._refused:
                self._refused.add(identity)
                logger.warning("record of a replica is ignored", extra={"reason": reason})
        self._changed(self._registry.apply(records), "replica ordered elsewhere")

    def configure(self, replicas: Sequence[ReplicaConfig]) -> None:
        """Apply another list of configured replicas.

        Raises:
            ConfigError: a name in it is another replica's; nothing changed.
        """
        self._changed(self._registry.configure(replicas), "replica changed by the configuration")

    def follow(self, source: str, found: Sequence[Found]) -> dict[str, str]:
        """Follow a whole answer of a source; return the addresses that are left out, and why."""
        names = self._registry.follow(source, found)
        self._changed(names, "replica changed by its source", source=source)
        urls = [each.replica.url.rstrip("/") for each in found]
        not_entered = self._registry.not_entered
        return {url: not_entered[url] for url in urls if url in not_entered}

    # -- inside ------------------------------------------------------------------------------

    def _changed(self, names: Sequence[str], what: str, **fields: str) -> None:
        """Log entries that changed, and follow them."""
        for name in names:
            entry = self._registry.find(name)
            url = entry.replica.url if entry is not None else ""
            logger.info(what, extra={"replica": name, "url": url, "state": _state(entry), **fields})
            self._reconcile(name)
        self.sweep()

    def _reconcile(self, name: str) -> None:
        """Start or cancel a replica's watch to match the registry."""
        entry = self._registry.find(name)
        running = self._running.get(name)
        evacuation = entry.evacuation if entry is not None and not entry.leaving else None
        if evacuation is not None:
            self._fleet.members.evacuations[name] = evacuation
        else:
            self._fleet.members.evacuations.pop(name, None)
        if entry is not None and any(r.name == name for r in self._fleet.members.replicas):
            self._fleet.members.drain(name, draining=not entry.is_offered)
        if running is None:
            if entry is not None and self._group is not None:
                self._waiting[name] = UNDISCOVERED
                task = self._group.create_task(self._keep_watching(entry), name=f"watch {name}")
                self._running[name] = entry, task
                task.add_done_callback(lambda _: self._ended(name))  # also if it never began
        elif (entry is None or entry.replica != running[0].replica) and name not in self._ending:
            self._ending.add(name)
            running[1].cancel()

    async def _keep_watching(self, entry: Entry) -> None:
        """Watch a replica; a watch that fails is started again."""
        await keep_running(
            lambda: ReplicaWatch(entry, self._tools, self).run(),
            follower="replica",
            count=self._metrics.count_failure,
            on_failure=lambda reason: self._waiting.update(
                {entry.name: f"its watch failed: {reason}"}
            ),
            subject={"replica": entry.name},
        )

    def _forget(self, name: str) -> None:
        self._note_gone(name)
        self._registry.forget(name)
        self._fleet.members.remove(name)
        self._waiting.pop(name, None)
        logger.info("replica removed", extra={"replica": name})
        self._reconcile(name)

    def _ended(self, name: str) -> None:
        """Remove a replica whose watch was cancelled; not at shutdown: answers are in flight."""
        del self._running[name]
        if name in self._ending:
            self._ending.remove(name)
            if self._registry.find(name) is None:
                self._note_gone(name)
            self._fleet.members.remove(name)
            self._waiting.pop(name, None)
            self._reconcile(name)

    def _note_gone(self, name: str) -> None:
        """Drop the series of replicas that went long ago: new pods come for ever."""
        found = (replica for replica in self._fleet.members.replicas if replica.name == name)
        candidates = [c.id for replica in found for c in candidates_of(replica)]
        series = tuple(dict.fromkeys((name, *candidates, *self._gone.get(name, ()))))
        for oldest in self._gone.put(name, series):
            if self._registry.find(oldest[0]) is None:
                self._metrics.drop_replica(oldest)


def _state(entry: Entry | None) -> str:
    if entry is None or entry.leaving:
        return "leaving"
    if not entry.is_ready:
        return "not ready"
    return "draining" if entry.draining else "offered"


HISTORY: Final = "its event history is being replayed"

_DISCOVER_S: Final = (0.2, 5.0)  # first and longest pause between attempts
_INFO_S: Final = (5.0, 15.0)  # the first answer about its configuration takes an engine 2 s
_HISTORY_S: Final = 5.0  # readiness waits this long for a replica's event history


class WatchTools(Struct, frozen=True, kw_only=True):
    """The parts of the router that all watches use."""

    config: Config
    engine_api: EngineApi
    fleet: Fleet
    deaths: Deaths
    waiting: Waiting
    """Why a replica is not usable (yet); read by readiness and the admin API."""
    models: ModelWatch
    probes: Probes
    streams: RankStreams
    pools: Pools


class ReplicaWatch:
    """Watches one configured replica, from process to process."""

    def __init__(self, entry: Entry, tools: WatchTools, watches: Watches) -> None:
        self._name = entry.name
        self._replica = entry.replica
        self._url = entry.replica.url.rstrip("/")
        self._config = tools.config
        self._engine_api = tools.engine_api
        self._fleet = tools.fleet
        self._waiting = tools.waiting
        self._watches = watches
        self._streams = tools.streams
        self._models = tools.models
        self._pools = tools.pools
        self._probes = tools.probes
        self._deaths = tools.deaths

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
            self._deaths.restarted(self._name, time.monotonic())

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
        """Ask an engine in dev mode how its keys in a pool begin. None: it does not say.

        A busy engine is asked twice. One that starts beside others may take 10 s.
        """
        if not facts.shows_pause or self._pools.of(self._replica) is None:
            return None
        for timeout_s in _INFO_S:
            info = await self._engine_api.server_info(self._name, self._url, timeout_s=timeout_s)
            if info is not None:
                return info.key_head
        return None

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
            draining=not self._watches.is_offered(name),
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
