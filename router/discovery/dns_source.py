"""Replicas from DNS: each address of a name, asked for repeatedly.

    vllm.inference:8000            its A records, or AAAA if it has none, at that port
    _http._tcp.vllm.inference      the targets of its SRV records, each at its own port; priority
                                   and weight are ignored

A name without such records is an empty answer. An unknown name, or a server that fails or is
silent, is a failure; see router.discovery.sources for both. If the target of an SRV record does not
exist, it is left out: it has just gone. The time to live is ignored: `discovery.dns_s` is the time
until a change is seen, plus the delay of caches.

This is the only file that speaks DNS. It uses /etc/resolv.conf (servers, search, ndots), not
/etc/hosts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final

import dns.asyncresolver
import dns.exception
import dns.resolver
from dns.rdtypes.IN.SRV import SRV

from router.base.errors import DiscoveryError
from router.config import ReplicaConfig
from router.config.discovery import host_and_port
from router.discovery.sources import Sources
from router.replicas.replica import Found

_TRY_S: Final = 2.0  # one server, once
_LIFETIME_S: Final = 6.0  # one question, all servers
_AT_ONCE: Final = 16  # targets of SRV records
_MAX_TARGETS: Final = 1024


class DnsSource:
    """A name that is resolved repeatedly.

    Args:
        name: HOST:PORT, or the name of SRV records.
        servers: HOST:PORT of servers to ask; none: those of /etc/resolv.conf.
        pause_s: Between two answers.
        files: Where /etc/resolv.conf is read.
        lifetime_s: For how long an answer is waited for, of all servers.
    """

    def __init__(
        self,
        name: str,
        *,
        servers: Sequence[str],
        pause_s: float,
        files: Executor,
        lifetime_s: float = _LIFETIME_S,
    ) -> None:
        self.name = f"dns {name}"
        self._query = name
        self._servers = tuple(servers)
        self._pause_s = pause_s
        self._files = files
        self._lifetime_s = lifetime_s

    async def look(self) -> Sequence[Found]:
        loop = asyncio.get_running_loop()
        make = partial(_resolver, self._servers, self._lifetime_s)
        resolver = await loop.run_in_executor(self._files, make)
        if self._query.startswith("_"):
            places = await self._targets(resolver)
        else:
            host, port = host_and_port(self._query)
            places = [(address, port) for address in await _addresses(resolver, host)]
        return [
            Found(replica=ReplicaConfig(url=f"http://{_in_url(address)}:{port}"))
            for address, port in sorted(set(places))
        ]

    async def run(self, sink: Sources) -> None:
        while True:
            try:
                sink.found(self.name, await self.look())
            except DiscoveryError as exc:
                sink.failed(self.name, exc.message)
            await asyncio.sleep(self._pause_s * random.uniform(0.9, 1.1))

    async def _targets(self, resolver: dns.asyncresolver.Resolver) -> list[tuple[str, int]]:
        """Resolve the targets of SRV records."""
        records = await _ask(resolver, self._query, "SRV")
        found = {(r.target.to_text(), r.port) for r in records if isinstance(r, SRV)}
        found.discard((".", 0))
        if len(found) > _MAX_TARGETS:
            raise DiscoveryError(f"{self._query}: more than {_MAX_TARGETS} targets")
        limit = asyncio.Semaphore(_AT_ONCE)

        async def resolve(target: str, port: int) -> list[tuple[str, int]]:
            async with limit:
                try:
                    return [(address, port) for address in await _addresses(resolver, target)]
                except _NoSuchName:
                    return []

        parts = await asyncio.gather(
            *(resolve(*each) for each in sorted(found)), return_exceptions=True
        )
        places: list[tuple[str, int]] = []
        for part in parts:
            if isinstance(part, BaseException):
                raise part
            places += part
        return places


class _NoSuchName(DiscoveryError):
    """The name does not exist."""


def _resolver(servers: Sequence[str], lifetime_s: float) -> dns.asyncresolver.Resolver:
    """Make a resolver; it reads a file.

    Raises:
        DiscoveryError: there are no servers to ask.
    """
    try:
        resolver = dns.asyncresolver.Resolver(configure=not servers)
    except dns.exception.DNSException as exc:
        raise DiscoveryError(f"/etc/resolv.conf: {exc}") from exc
    if servers:
        places = [host_and_port(server) for server in servers]
        resolver.nameservers = [host for host, _ in places]
        resolver.nameserver_ports = dict(places)
    resolver.timeout, resolver.lifetime = _TRY_S, lifetime_s
    return resolver


async def _addresses(resolver: dns.asyncresolver.Resolver, host: str) -> list[str]:
    """Find a name's IPv4 addresses, else its IPv6 addresses. With both, engines would count
    twice."""
    for kind in ("A", "AAAA"):
        if records := await _ask(resolver, host, kind):
            return [record.to_text() for record in records]
    return []


async def _ask(
    resolver: dns.asyncresolver.Resolver, name: str, kind: str
) -> Sequence[dns.rdata.Rdata]:
    """Ask for the records of a kind; none: the name has only other records.

    Raises:
        DiscoveryError: no server gave an answer, or the name does not exist.
    """
    place = f"{name} ({kind})"
    try:
        answer = await resolver.resolve(name, kind, search=True, raise_on_no_answer=False)
    except dns.resolver.NXDOMAIN as exc:
        raise _NoSuchName(f"{place}: there is no such name (NXDOMAIN)") from exc
    except dns.exception.Timeout as exc:
        raise DiscoveryError(f"{place}: no answer in {resolver.lifetime:.0f} s") from exc
    except dns.resolver.NoNameservers as exc:
        raise DiscoveryError(f"{place}: no server could answer (SERVFAIL, REFUSED?)") from exc
    except (dns.exception.DNSException, OSError, ValueError) as exc:
        raise DiscoveryError(f"{place}: {type(exc).__name__}") from exc
    return list(answer.rrset or ())


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
