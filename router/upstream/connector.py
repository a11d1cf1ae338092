"""The connector of every HTTP client of the router: names resolve as `router.names` says."""

from __future__ import annotations

import socket
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import Connection

from router.names import Names


class Connector(aiohttp.TCPConnector):
    """A connector whose names keep their last good addresses.

    Args:
        names: None: names that no other connector shares.
        settings: Of aiohttp's connector.
    """

    def __init__(self, names: Names | None, **settings: Any) -> None:
        self._names = names or Names()
        super().__init__(resolver=_Resolver(self._names), use_dns_cache=False, **settings)

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """Take a connection, or make one; if that fails, the name is asked for again."""
        try:
            return await super().connect(req, traces, timeout)
        except (aiohttp.ClientConnectorError, TimeoutError):
            self._names.doubt(req.url.raw_host or "")
            raise


class _Resolver(AbstractResolver):
    def __init__(self, names: Names) -> None:
        self._names = names

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of both families: no connector here wants one of them."""
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self._names.addresses(host)
        ]

    async def close(self) -> None:
        pass
