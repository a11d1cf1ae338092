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
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from router.base.bounded import Bounded
from router.base.messages import Evacuation, ReplicaRecord
from router.base.supervisor import keep_running
from router.config import ReplicaConfig
from router.discovery.status import UNDISCOVERED, Waiting
from router.replicas.entry import Entry, Found
from router.replicas.fleet import Fleet
from router.replicas.registry import Registry
from router.replicas.replica import candidates_of
from router.upstream import Upstream

logger = logging.getLogger(__name__)

MAX_GONE: Final = 64
"""Replicas that are gone and still have series in /metrics."""


class Watch(Protocol):
    """Watches one replica: router.discovery.watch."""

    async def run(self) -> None:
        """Go on until cancelled; leave no caches behind."""


class Watches:
    """The tasks; see the module's charter.

    Args:
        waiting: Why a replica is not usable (yet); entries are added and removed here.
        watch: Creates a replica's watch.
        count_failure: Takes the kind of a follower that failed.
        on_gone: Takes the name and candidates of a replica that has been gone for long, to drop
            its series.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        fleet: Fleet,
        upstream: Upstream,
        waiting: Waiting,
        watch: Callable[[Entry], Watch],
        count_failure: Callable[[str], None],
        on_gone: Callable[[Sequence[str]], None],
    ) -> None:
        self._on_gone = on_gone
        self._gone: Bounded[str, tuple[str, ...]] = Bounded(MAX_GONE)  # it and its candidates
        self._registry = registry
        self._fleet = fleet
        self._upstream = upstream
        self._waiting = waiting
        self._watch = watch
        self._count_failure = count_failure
        self._group: asyncio.TaskGroup | None = None
        self._running: dict[str, tuple[Entry, asyncio.Task[None]]] = {}
        self._ending: set[str] = set()
        self._refused: set[str] = set()  # records that were logged as refused
        for entry in registry.entries:
            waiting[entry.name] = UNDISCOVERED

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
            lambda: self._watch(entry).run(),
            follower="replica",
            count=self._count_failure,
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
                self._on_gone(oldest)


def _state(entry: Entry | None) -> str:
    if entry is None or entry.leaving:
        return "leaving"
    if not entry.is_ready:
        return "not ready"
    return "draining" if entry.draining else "offered"
