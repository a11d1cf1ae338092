"""The connector of every HTTP client of the router.

Names resolve as `router.base.host_names` says; router.upstream.connections guards connections.
"""

from __future__ import annotations

import socket
from functools import partial
from ssl import SSLContext
from typing import Any, cast

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.connector import Connection

from router.base.host_names import Names
from router.config.tls import Tls
from router.upstream.connections import Guarded, Strays


class Connector(aiohttp.TCPConnector):
    """A connector whose names keep their last good addresses, and whose connections are guarded.

    Args:
        names: None: names that no other connector shares.
        strays: Counts bytes that no request had asked for. None: they are only logged.
        tls: Its context of the moment is for each new connection. None: the system's authorities.
        server: The name of the only server that it connects to. "": connections are named when
            they are taken.
        limit: The most connections at a time; 0: any number.
        keepalive_timeout: For how long an idle connection is kept, in seconds.
    """

    def __init__(
        self,
        names: Names | None,
        *,
        strays: Strays | None = None,
        tls: Tls | None = None,
        server: str = "",
        limit: int = 0,
        force_close: bool = False,
        keepalive_timeout: float = 15.0,
    ) -> None:
        self._names = names or Names()
        super().__init__(
            resolver=_Resolver(self._names),
            use_dns_cache=False,
            limit=limit,
            force_close=force_close,
            keepalive_timeout=None if force_close else keepalive_timeout,
        )
        self._server = server
        self._tls = tls
        guarded = partial(self._guarded, strays if strays is not None else Strays())
        self._factory = cast("partial[ResponseHandler]", guarded)

    def _get_ssl_context(self, req: aiohttp.ClientRequest) -> SSLContext | None:
        if self._tls is not None and req.is_ssl():
            return self._tls.context
        return super()._get_ssl_context(req)

    @property
    def num_in_use(self) -> int:
        """Count the connections that requests have."""
        return len(self._acquired)

    def _guarded(self, strays: Strays) -> Guarded:
        protocol = Guarded(self._loop, strays)
        protocol.server = self._server
        return protocol

    def _release(
        self, key: ConnectionKey, protocol: ResponseHandler, *, should_close: bool = False
    ) -> None:
        if isinstance(protocol, Guarded) and not should_close:
            protocol.end()
        super()._release(key, protocol, should_close=should_close)

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """Return an idle connection, or a new one; if that fails, the name is asked for again."""
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
