"""What each tenant has used: here, and at the routers that share its limits.

Each router counts the requests that it ever let through, and publishes the sums a few times a
second (`note`, `receive`). Sums are absolute, so a note that is late, lost or received twice does
no harm. Requests of other routers are taken from our buckets, too, so all routers together hold the
limit over any longer time. Within a tenth of a second they may exceed it by the requests between
two notes. The buckets are in debt then, and the excess is paid back.

Of a router that is new, or was silent for a while, we do not know when it let through what: the
lower level counts, ours or its. No request waits for any of it. Without Redis each router holds
the whole limit for itself: N of them let through up to N times as much, and no request is refused
because Redis is away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from router.base.limits import Limits
from router.base.messages import Consumed, TenantUsage
from router.tenants.file import TenantEntry

ALIVE_S: Final = 3.0
"""A router silent for so long is taken for gone: its sums start again."""

_PUBLISH_ALL_S: Final = 1.0
_MAX_ROUTERS: Final = 256


class Accounts:
    """The limits of all tenants, by name; they outlive the file's versions."""

    def __init__(self) -> None:
        self._limits: dict[str, Limits] = {}
        # Router -> when it was last received, its last sums.
        self._received: dict[str, tuple[float, dict[str, TenantUsage]]] = {}
        self._published: dict[str, TenantUsage] = {}
        self._published_all_s = 0.0

    def follow(self, entries: Mapping[str, TenantEntry], now_s: float) -> None:
        """Set the limits of each entry; those of other tenants go."""
        for name in self._limits.keys() - entries.keys():
            del self._limits[name]
        for name, entry in entries.items():
            self._limits.setdefault(name, Limits()).change(
                requests_per_minute=entry.requests_per_minute,
                uncached_tokens_per_minute=entry.uncached_tokens_per_minute,
                max_in_flight=entry.max_in_flight,
                now_s=now_s,
            )

    @property
    def num_routers(self) -> int:
        """Count the other routers whose use is known."""
        return len(self._received)

    def __getitem__(self, name: str) -> Limits:
        return self._limits[name]

    def note(self, now_s: float) -> Consumed | None:
        """Return what changed since the last note, now and then all; None: nothing."""
        is_all = now_s - self._published_all_s >= _PUBLISH_ALL_S
        usages: list[TenantUsage] = []
        for name, limits in self._limits.items():
            requests, tokens = limits.requests, limits.tokens
            if requests is None and tokens is None:
                continue
            last = self._published.get(name)
            num_requests = requests.taken if requests is not None else 0
            num_tokens = tokens.taken if tokens is not None else 0
            if not is_all and last is not None:
                if last.num_requests == num_requests and last.num_tokens == num_tokens:
                    continue
            usage = TenantUsage(
                name,
                num_requests,
                num_tokens,
                int(requests.level(now_s)) if requests is not None else None,
                int(tokens.level(now_s)) if tokens is not None else None,
            )
            self._published[name] = usage
            usages.append(usage)
        if is_all:
            self._published_all_s = now_s
        return Consumed(tuple(usages)) if usages else None

    def receive(self, router: str, consumed: Consumed, now_s: float) -> None:
        """Count what another router let through."""
        received_s, known = self._received.get(router, (0.0, {}))
        if now_s - received_s > ALIVE_S:
            known = {}
        if router not in self._received and len(self._received) >= _MAX_ROUTERS:
            del self._received[min(self._received, key=lambda name: self._received[name][0])]
        self._received[router] = (now_s, known)
        for usage in consumed.usages:
            limits = self._limits.get(usage.tenant)
            if limits is None:  # of another version of the file, here or there
                continue
            before = known.get(usage.tenant)
            known[usage.tenant] = usage
            for bucket, taken, level, last in (
                (
                    limits.requests,
                    usage.num_requests,
                    usage.requests_left,
                    before.num_requests if before is not None else None,
                ),
                (
                    limits.tokens,
                    usage.num_tokens,
                    usage.tokens_left,
                    before.num_tokens if before is not None else None,
                ),
            ):
                if bucket is None:
                    continue
                if last is not None:
                    bucket.taken_elsewhere(taken - last, now_s)
                elif level is not None:
                    bucket.at_most(level, now_s)

    def lost(self) -> None:
        """Forget what other routers sent: what they let through from now on is not known."""
        self._received.clear()
