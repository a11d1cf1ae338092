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

from router.base.errors import RateLimited
from router.base.messages import Consumed, TenantUsage
from router.tenants.bucket import Bucket
from router.tenants.file import TenantEntry

ALIVE_S: Final = 3.0
"""A router silent for so long is taken for gone: its sums start again."""

_PUBLISH_ALL_S: Final = 1.0
_MAX_ROUTERS: Final = 256


class Account:
    """One tenant's buckets; None: no such limit."""

    __slots__ = ("entry", "num_in_flight", "requests", "tokens")

    def __init__(self, entry: TenantEntry, now_s: float) -> None:
        self.entry = entry
        self.num_in_flight = 0
        self.requests = _bucket(None, entry.requests_per_minute, now_s)
        self.tokens = _bucket(None, entry.uncached_tokens_per_minute, now_s)

    def follow(self, entry: TenantEntry, now_s: float) -> None:
        """Take the limits of another version of the entry; what is used stays used."""
        self.entry = entry
        self.requests = _bucket(self.requests, entry.requests_per_minute, now_s)
        self.tokens = _bucket(self.tokens, entry.uncached_tokens_per_minute, now_s)

    def enter(self, now_s: float) -> None:
        """Count a request that has just come.

        Raises:
            RateLimited: it is one too many, a minute or at a time; it is not counted then.
        """
        most = self.entry.max_in_flight
        if most is not None and self.num_in_flight >= most:
            raise RateLimited(
                f"Too many requests at a time: the limit is {most} in flight.",
                retry_after_s=1.0,
                headers=self.headers(now_s),
            )
        if self.requests is not None:
            wait_s = self.requests.wait_s(1, now_s)
            if wait_s > 0:
                raise RateLimited(
                    "Rate limit reached for requests: the limit is "
                    f"{self.requests.capacity} a minute.",
                    retry_after_s=wait_s,
                    headers=self.headers(now_s),
                )
            self.requests.take(1, now_s)
        self.num_in_flight += 1

    def leave(self) -> None:
        """End a request that entered."""
        self.num_in_flight -= 1

    def charge(self, num_tokens: int, now_s: float) -> Charge:
        """Take the uncached tokens that a request is expected to have.

        Raises:
            RateLimited: there are not so many left.
        """
        if self.tokens is not None:
            wait_s = self.tokens.wait_s(num_tokens, now_s)
            if wait_s > 0:
                raise RateLimited(
                    f"Rate limit reached for uncached tokens: the limit is {self.tokens.capacity} "
                    f"a minute, this request needs about {num_tokens}.",
                    retry_after_s=wait_s,
                    headers=self.headers(now_s),
                )
            self.tokens.take(num_tokens, now_s)
        return Charge(self, num_tokens)

    def headers(self, now_s: float) -> dict[str, str]:
        """Return what is left of the limits, as OpenAI's API does; empty where there are none."""
        headers: dict[str, str] = {}
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                left = bucket.level(now_s)
                full_s = (bucket.capacity - left) * 60.0 / bucket.capacity
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.capacity)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(left)))
                headers[f"x-ratelimit-reset-{kind}"] = f"{full_s:.3f}s"
        return headers


class Charge:
    """Uncached tokens taken for one request, to be corrected by what it really had."""

    __slots__ = ("_account", "num_tokens")

    def __init__(self, account: Account, num_tokens: int) -> None:
        self._account = account
        self.num_tokens = num_tokens

    def settle(self, num_tokens: int, now_s: float) -> None:
        """Correct the charge to so many."""
        tokens = self._account.tokens
        if tokens is not None and num_tokens != self.num_tokens:
            tokens.take(num_tokens - self.num_tokens, now_s)
        self.num_tokens = num_tokens


class Accounts:
    """The accounts of all tenants, by name; they outlive the file's versions."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        # Router -> when it was last received, its last sums.
        self._received: dict[str, tuple[float, dict[str, TenantUsage]]] = {}
        self._published: dict[str, TenantUsage] = {}
        self._published_all_s = 0.0

    def follow(self, entries: Mapping[str, TenantEntry], now_s: float) -> None:
        """Keep an account for each entry; those of other tenants go."""
        for name in self._accounts.keys() - entries.keys():
            del self._accounts[name]
        for name, entry in entries.items():
            account = self._accounts.get(name)
            if account is None:
                self._accounts[name] = Account(entry, now_s)
            else:
                account.follow(entry, now_s)

    def __getitem__(self, name: str) -> Account:
        return self._accounts[name]

    def note(self, now_s: float) -> Consumed | None:
        """Return what changed since the last note, now and then all; None: nothing."""
        is_all = now_s - self._published_all_s >= _PUBLISH_ALL_S
        usages: list[TenantUsage] = []
        for name, account in self._accounts.items():
            requests, tokens = account.requests, account.tokens
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
            account = self._accounts.get(usage.tenant)
            if account is None:  # of another version of the file, here or there
                continue
            before = known.get(usage.tenant)
            known[usage.tenant] = usage
            for bucket, taken, level, last in (
                (
                    account.requests,
                    usage.num_requests,
                    usage.requests_left,
                    before.num_requests if before is not None else None,
                ),
                (
                    account.tokens,
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


def _bucket(known: Bucket | None, per_minute: int | None, now_s: float) -> Bucket | None:
    if per_minute is None:
        return None
    if known is None:
        return Bucket(per_minute, now_s)
    if known.capacity != per_minute:
        known.resize(per_minute, now_s)
    return known
