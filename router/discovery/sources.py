"""The sources of replicas: what each named last, and whether that is followed.

A source yields whole sets: each answer names all replicas. Each is checked, then the registry
follows the answer (`router.replicas.registry`): new replicas are watched, missing ones drain and
are removed when they are idle. An answer is not followed, and the last good one stays, if

    it fails          no answer, or a senseless one; counted, logged once for each reason
    it is empty       after one that was not: a lost label or a bad deployment looks like this too.
                      It is followed once the source has named no ready replica for `_EMPTY_S`

Impossible replicas and replicas outside the allowed hosts are left out, logged once and shown.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from router.base.errors import ConfigError
from router.config import check_pool, check_replica
from router.config.hosts import HostRules
from router.discovery.status import UNDISCOVERED, Waiting
from router.replicas.replica import Found

logger = logging.getLogger(__name__)

MAX_REPLICAS: Final = 1024
"""The most replicas of one source; an answer that names more is not followed."""
_EMPTY_S: Final = 60.0
_MAX_REFUSED: Final = 32  # shown of one answer


class Source(Protocol):
    """Where replicas are found."""

    @property
    def name(self) -> str:
        """What it is called in metrics and logs: its kind, and what it was given."""
        ...

    async def look(self) -> Sequence[Found]:
        """Find all replicas, once.

        Raises:
            DiscoveryError: it cannot be asked, or its answer makes no sense.
        """
        ...

    async def run(self, sink: Sources) -> None:
        """Report answers and failures until cancelled."""


class SourceState(Struct, frozen=True, kw_only=True):
    """How a source of replicas stands."""

    name: str
    num_replicas: int  # of its last good answer
    reason: str  # why its last answer was not followed; empty: it was
    age_s: float | None  # of its last good answer; None: there was none
    not_followed: dict[str, str]  # address -> why


class Sources:
    """What the sources of a router named.

    Args:
        names: What the sources are called.
        pools: Names of the Mooncake pools that replicas may be in.
        follow: Makes the registry follow a source; returns why some are not followed.
        waiting: What keeps a router from being ready; a source is in it until its first answer.
        count: Takes a source's name and the outcome of its answer.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        hosts: HostRules,
        pools: Sequence[str] = (),
        follow: Callable[[str, Sequence[Found]], dict[str, str]],
        waiting: Waiting,
        count: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hosts = hosts
        self._pools = pools
        self._follow = follow
        self._waiting = waiting
        self._count = count
        self._clock = clock
        self._states = {
            name: SourceState(name=name, num_replicas=0, reason="", age_s=None, not_followed={})
            for name in names
        }
        self._answered_s: dict[str, float] = {}
        self._empty: dict[str, tuple[float, Sequence[Found]]] = {}  # since when; the last of them
        self._ready: dict[str, bool] = {}  # whether the answer in force has one that is ready
        for name in names:
            waiting[name] = UNDISCOVERED

    # -- answers -----------------------------------------------------------------------------

    def found(self, source: str, found: Sequence[Found]) -> None:
        """Apply a whole answer of a source; the same one again confirms it."""
        if len(found) > MAX_REPLICAS:
            self.failed(source, f"it names {len(found)} replicas: more than {MAX_REPLICAS}")
            return
        now_s = self._clock()
        usable, refused = self._checked(found)
        if self._ready.get(source) and not any(each.is_ready for each in usable):
            since_s, _ = self._empty.setdefault(source, (now_s, usable))
            self._empty[source] = since_s, usable
            if now_s - since_s < _EMPTY_S:
                self._count(source, "empty")
                self._fails(source, "it names no replica that is ready")
                return
        self._count(source, "ok")
        self._in_force(source, usable, refused)

    def failed(self, source: str, reason: str) -> None:
        """Record why a source has no answer; its last replicas stay."""
        self._count(source, "failed")
        self._empty.pop(source, None)
        if source in self._waiting:
            self._waiting[source] = reason
        self._fails(source, reason)

    def sweep(self) -> None:
        """Follow answers that have been empty for long: there may be no later answer."""
        for source, (since_s, found) in list(self._empty.items()):
            if self._clock() - since_s >= _EMPTY_S:
                self._in_force(source, found, {})

    # -- state ------------------------------------------------------------------------------

    def states(self) -> list[SourceState]:
        """Describe every source."""
        now_s = self._clock()
        return [
            replace(
                state, age_s=now_s - self._answered_s[name] if name in self._answered_s else None
            )
            for name, state in self._states.items()
        ]

    # -- inside ------------------------------------------------------------------------------

    def _checked(self, found: Sequence[Found]) -> tuple[list[Found], dict[str, str]]:
        """Separate possible replicas from impossible ones, with the reason."""
        usable: list[Found] = []
        refused: dict[str, str] = {}
        for each in found:
            reason = why_refused(each, self._hosts, self._pools)
            if reason is None:
                usable.append(each)
            elif len(refused) < _MAX_REFUSED:
                refused[_shown(each.replica.url)] = reason
        return usable, refused

    def _fails(self, source: str, reason: str) -> None:
        state = self._states[source]
        if state.reason != reason:
            logger.warning(
                "source of replicas is not followed; its last replicas stay",
                extra={"source": source, "reason": reason},
            )
        self._states[source] = replace(state, reason=reason)

    def _in_force(self, source: str, found: Sequence[Found], refused: dict[str, str]) -> None:
        state = self._states[source]
        self._answered_s[source] = self._clock()
        self._empty.pop(source, None)
        self._waiting.pop(source, None)
        self._ready[source] = any(each.is_ready for each in found)
        not_followed = refused | self._follow(source, found)
        for url, reason in not_followed.items():
            if state.not_followed.get(url) != reason:
                extra = {"source": source, "url": url, "reason": reason}
                logger.warning("replica of a source is not followed", extra=extra)
        if state.reason:
            logger.info("source of replicas is followed again", extra={"source": source})
        self._states[source] = replace(
            state, num_replicas=len(found), reason="", not_followed=not_followed
        )


def why_refused(found: Found, hosts: HostRules, pools: Sequence[str] = ()) -> str | None:
    """Return why a found replica is impossible here; None: it is not."""
    replica = found.replica
    try:
        check_replica(replica)
        check_pool(replica, pools)
    except ConfigError as exc:
        return exc.message
    for field, urls in replica.addresses.items():
        host = hosts.refused(urls)
        if host is not None:
            allowed = ", ".join(hosts.patterns) or "empty"
            return f"{field}: {host!r} is not in discovery.hosts ({allowed})"
    return None


def _shown(url: str) -> str:
    """Write an address for people: without a password, of a bounded length."""
    scheme, _, rest = url.rpartition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"[:200]
