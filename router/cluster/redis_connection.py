"""The way to Redis: which server has the data, a few connections there, deadlines.

Part of this module: TLS, passwords, Sentinel, pipelines of raw commands. Elsewhere: keys
(redis_store), the meaning of errors (redis_errors).

Every operation ends by its deadline. A connection that was left in the middle of a reply is cut,
never used again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import hiredis
from msgspec import Struct
from redis import exceptions as errors
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel

from router.base.errors import StoreError, StoreRefused, StoreUnavailable
from router.base.host_names import Names
from router.cluster.redis_errors import CLUSTER, HINTS, store_error
from router.config import RedisConfig

logger = logging.getLogger(__name__)

Word = bytes | str | int | float
Command = tuple[Word, ...]

_MAX_CONNECTIONS: Final = 16
_OLDEST_VERSION: Final = (6, 2)
SILENCE_S: Final = 1.0  # without a message, the server is asked whether it is there


class Address(NamedTuple):
    host: str  # or the path of a socket
    port: int  # 0: a socket

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.port else self.host


class Server(Struct, frozen=True, kw_only=True):
    """The server that has the data, as it introduced itself."""

    address: str
    name: str  # redis, valkey
    version: str


class RedisConnection:
    """A few connections to the one server that has a namespace's data.

    Args:
        config: Where it is.
        password: None: none.
        names: The addresses of hosts; None: no other client shares them.
    """

    def __init__(
        self,
        config: RedisConfig,
        *,
        password: str | None,
        names: Names | None = None,
    ) -> None:
        self._config = config
        self._names = names or Names()
        scheme, self._home, self._db = _parse_url(config.url)
        self._kind = _KINDS[scheme]
        self._login: dict[str, Any] = {"username": config.username, "password": password}
        if scheme == "rediss" and config.ca_file is not None:
            self._login["ssl_ca_certs"] = str(config.ca_file)
        self._pool: BlockingConnectionPool | None = None
        self._locating = asyncio.Lock()
        self.server: Server | None = None  # None: not reached yet

    def use_password(self, password: str | None) -> None:
        """Log in with another password from the next connection on."""
        self._login["password"] = password
        if self._pool is not None:
            self._pool.connection_kwargs["password"] = password

    async def ask(self, *command: Word, timeout_s: float | None = None) -> Any:
        """Send one command.

        Raises:
            StoreUnavailable: no answer, or not in time; StoreRefused: an error.
        """
        (value,) = await self.ask_all([command], timeout_s=timeout_s)
        if isinstance(value, Exception):
            raise await self.refusal(value)
        return value

    async def ask_all(
        self, commands: Sequence[Command], *, timeout_s: float | None = None
    ) -> list[Any]:
        """Send commands at once and read all replies; one that is an error is given as such.

        Raises:
            StoreUnavailable: no answer, or not in time. What was carried out is not known.
            StoreRefused: there is no speaking to this server.
        """
        async with self._within(self._config.timeout_s if timeout_s is None else timeout_s):
            return await self._exchange(commands)

    async def subscribe(self, channel: str) -> Subscription:
        """Receive what is published on a channel from here on, over a connection of its own.

        Raises:
            StoreError: see `ask`.
        """
        timeout_s = self._config.timeout_s
        async with self._within(timeout_s):
            pool = self._pool or await self._located()
            connection: AbstractConnection = pool.make_connection()  # type: ignore[no-untyped-call]
            subscription = Subscription(connection, self._where, timeout_s=timeout_s)
            try:
                await connection.connect()  # type: ignore[no-untyped-call]
                await subscription.begin(channel)
            except BaseException:
                await subscription.close()
                raise
            return subscription

    @property
    def db(self) -> int:
        """The number of the database; channels are common to all of them."""
        return self._db

    async def refusal(self, error: Exception) -> StoreError:
        """Name an error that was a reply; one that says that the data is elsewhere disconnects."""
        named = store_error(error, self._where())
        if self._config.sentinels and isinstance(error, errors.ReadOnlyError):
            named = StoreUnavailable(f"Redis at {self._where()} has become a replica")
        if isinstance(named, StoreUnavailable):
            await self.close()
        return named

    async def close(self) -> None:
        """Cut the connections; the next operation looks for the server again.

        A connection in use is cut when its operation ends.
        """
        pool, self._pool = self._pool, None
        if pool is not None:
            # To the end, also where we are cancelled: the rest is known only here.
            await asyncio.shield(pool.disconnect(inuse_connections=False))

    # -- inside ------------------------------------------------------------------------------

    @asynccontextmanager
    async def _within(self, timeout_s: float) -> AsyncIterator[None]:
        """Bound what is asked within, and name what fails; the next operation looks elsewhere.

        Raises:
            StoreUnavailable: it was not done in time; StoreError: see `store_error`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as exc:
            if self._config.sentinels and timeout_s >= self._config.timeout_s:
                await self.close()
            is_tls = self.server is None and self._kind is _TlsConnection
            raise StoreUnavailable(
                f"Redis at {self._where()} did not answer within {timeout_s:g} s"
                f"{': does it speak TLS?' if is_tls else ''}"
            ) from exc
        except (errors.RedisError, OSError) as exc:
            await self.close()
            raise store_error(exc, self._where()) from exc

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        pool = self._pool or await self._located()
        connection: AbstractConnection = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await _send(connection, commands)
            return [await _reply(connection) for _ in commands]
        except BaseException:  # cancelled as well: replies may be under way
            await connection.disconnect(nowait=True)
            raise
        finally:
            if pool is not self._pool:  # closed meanwhile
                await connection.disconnect(nowait=True)
            await pool.release(connection)

    def _where(self) -> str:
        if self.server is not None:
            return self.server.address
        return ", ".join(self._config.sentinels) or str(self._home)

    async def _located(self) -> BlockingConnectionPool:
        async with self._locating:
            if self._pool is None:
                has_sentinels = bool(self._config.sentinels)
                self._pool = self._new_pool(await self._master() if has_sentinels else self._home)
            return self._pool

    async def _master(self) -> Address:
        """Ask the Sentinels in turn where the master is.

        Raises:
            StoreUnavailable: none answers that knows a master that is up.
        """
        service, names = self._config.sentinel_service, self._config.sentinels
        share_s = self._config.timeout_s / (2 * len(names) + 1)  # to connect, and to answer
        times = {"socket_timeout": share_s, "socket_connect_timeout": share_s}
        sentinel = Sentinel([])  # type: ignore[no-untyped-call]
        for name in names:
            arguments = {**self._arguments(_parse_url(f"redis://{name}")[1]), **times}
            pool = ConnectionPool(connection_class=self._kind, **arguments)
            sentinel.sentinels.append(Redis.from_pool(pool))
        try:
            return Address(*await sentinel.discover_master(service))  # type: ignore[arg-type]
        except MasterNotFoundError:
            raise StoreUnavailable(
                f"no master {service!r} at {', '.join(names)}: do these Sentinels answer, take the "
                "password and know it? See redis.sentinel_service"
            ) from None
        finally:
            for each in sentinel.sentinels:
                await each.aclose()

    def _arguments(self, address: Address) -> dict[str, Any]:
        where = {"host": address.host, "port": address.port, "names": self._names}
        return {
            **({"path": address.host} if self._kind is _UnixConnection else where),
            **self._login,
            "protocol": 2,
            "socket_timeout": None,  # deadlines are set around whole operations
            "socket_connect_timeout": self._config.timeout_s,
        }

    def _new_pool(self, address: Address) -> BlockingConnectionPool:
        has_sentinels = bool(self._config.sentinels)

        async def introduce(connection: AbstractConnection) -> None:
            try:
                await connection.on_connect()
                await connection.send_command("HELLO", 2)
                reply = _as_map(await connection.read_response())
                self.server = _check_server(reply, address, has_sentinels=has_sentinels)
                if self._db:  # after HELLO: a Cluster and a Sentinel have no databases
                    await connection.send_command("SELECT", self._db)
                    await connection.read_response()
            except BaseException:  # or the pool would take it for ready
                await connection.disconnect(nowait=True)
                raise

        return BlockingConnectionPool(
            max_connections=_MAX_CONNECTIONS,
            timeout=None,
            connection_class=self._kind,
            redis_connect_func=introduce,
            **self._arguments(address),
        )


class Subscription(asyncio.Protocol):
    """The messages of one channel, in order. `watch` has to run, or silence is not noticed.

    It reads the socket itself: through redis-py a message takes 20 us more.
    """

    def __init__(
        self, connection: AbstractConnection, where: Callable[[], str], *, timeout_s: float
    ) -> None:
        self._connection = connection
        self._where = where
        self._timeout_s = timeout_s
        self._replies = hiredis.Reader()
        self._transport: asyncio.WriteTransport | None = None
        self._messages: deque[bytes] = deque()
        self._failure: Exception | None = None
        self._has_begun = False
        self._has_received = False
        self._waiter: asyncio.Future[None] | None = None

    async def begin(self, channel: str) -> None:
        """Subscribe, over a connection that is connected.

        Raises:
            RedisError, OSError: it was refused, or the connection is gone.
        """
        assert isinstance(self._connection, _Transferable)
        self._transport = self._connection.transfer(self)
        self._ask("SUBSCRIBE", channel)
        while not self._has_begun:
            await self._wait()

    async def next(self) -> bytes:
        """Wait for the next message.

        Raises:
            StoreError: the connection is gone; what was published since is lost.
        """
        try:
            while not self._messages:
                await self._wait()
        except (errors.RedisError, OSError) as exc:
            raise store_error(exc, self._where()) from exc
        return self._messages.popleft()

    async def watch(self) -> None:
        """Ask the server whether it is there whenever it is silent, for ever.

        Raises:
            StoreUnavailable: there was none in time.
        """
        while True:
            self._has_received = False
            await asyncio.sleep(SILENCE_S)
            if self._has_received:
                continue
            self._ask("PING")
            await asyncio.sleep(self._timeout_s)
            if not self._has_received:
                raise StoreUnavailable(
                    f"Redis at {self._where()} did not answer within {self._timeout_s:g} s"
                )

    async def close(self) -> None:
        """Cut the connection; idempotent."""
        await self._connection.disconnect(nowait=True)

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        try:
            self._replies.feed(data)
            while (reply := self._replies.gets()) is not False:
                self._take(reply)
        except hiredis.HiredisError as exc:
            self._failure = errors.InvalidResponse(str(exc))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._failure = self._failure or exc or errors.ConnectionError("connection closed")
        self._wake()

    # inside

    def _ask(self, *words: str) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(hiredis.pack_command(words))  # type: ignore[arg-type]

    def _take(self, reply: Any) -> None:
        if isinstance(reply, Exception):
            self._failure = errors.ResponseError(str(reply))
        elif isinstance(reply, list) and len(reply) == 3:
            if reply[0] == b"message":
                self._messages.append(reply[2])
            self._has_begun = True

    async def _wait(self) -> None:
        """Wait until something has come.

        Raises:
            RedisError, OSError: nothing will.
        """
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _parse_url(text: str | None) -> tuple[str, Address, int]:
    """Read a URL that router.config has checked: scheme, address, database."""
    url = urlsplit(text or "redis:")
    if url.scheme == "unix":
        db = int(parse_qs(url.query).get("db", ["0"])[0])
        return url.scheme, Address(unquote(url.path), 0), db
    return (
        url.scheme,
        Address(url.hostname or "", url.port or 6379),
        int(url.path.strip("/") or 0),
    )


def _as_map(flat: Any) -> dict[str, Any]:
    """Read a map as RESP 2 has it: names and values by turns; empty if it is none."""
    if not isinstance(flat, list):
        return {}
    words = [word.decode() if isinstance(word, bytes) else word for word in flat]
    return dict(zip(words[::2], words[1::2], strict=False))


def _check_server(reply: dict[str, Any], address: Address, *, has_sentinels: bool) -> Server:
    """Refuse a server that is too old, of another kind, or may not be written to."""
    if reply.get("mode") == "sentinel":
        raise StoreRefused(
            f"{address} is a Sentinel: name it in redis.sentinels, and its master in "
            "redis.sentinel_service"
        )
    if reply.get("mode") == "cluster":
        raise StoreRefused(f"Redis at {address}: {CLUSTER}")
    version = str(reply.get("version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < _OLDEST_VERSION:
        raise StoreRefused(
            f"Redis at {address} is version {version}; 6.2 is the oldest that will do"
        )
    if reply.get("role") == "replica":
        if not has_sentinels:
            raise StoreRefused(f"Redis at {address}: {HINTS['READONLY']}")
        raise StoreUnavailable(f"Redis at {address} is a replica by now: failing over")
    return Server(address=str(address), name=str(reply.get("server", "redis")), version=version)


async def _send(connection: AbstractConnection, commands: Sequence[Command]) -> None:
    try:
        await connection.send_packed_command(connection.pack_commands(commands))
    except RuntimeError as exc:  # uvloop's, where the server has just closed the connection
        raise errors.ConnectionError(str(exc)) from exc


async def _reply(connection: AbstractConnection) -> Any:
    """Read one reply; one that is an error is none of the connection's."""
    try:
        return await connection.read_response(disconnect_on_error=False)
    except errors.ResponseError as exc:
        return exc


class _Transferable:
    """A connection whose socket another protocol may take over."""

    _writer: asyncio.StreamWriter | None

    def transfer(self, protocol: asyncio.Protocol) -> asyncio.WriteTransport:
        """Pass on all that comes from here on; nothing may have been asked."""
        assert self._writer is not None
        transport = self._writer.transport
        transport.set_protocol(protocol)
        return transport


class _PlainConnection(_Transferable, Connection):
    """A connection to one of the addresses that a name has."""

    def __init__(self, *, names: Names, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._names = names
        self._address = self.host

    async def _connect(self) -> None:
        failure: OSError | None = None
        for address in await self._names.addresses(self.host):
            self._address = address
            try:
                return await super()._connect()  # type: ignore[no-any-return, no-untyped-call]
            except (OSError, TimeoutError) as exc:
                failure = exc
        self._names.doubt(self.host)
        assert failure is not None
        raise failure

    def _connection_arguments(self) -> dict[str, Any]:
        """Return what asyncio connects to."""
        return {**super()._connection_arguments(), "host": self._address}


class _TlsConnection(_PlainConnection, SSLConnection):
    """The same over TLS; the certificate is the name's."""

    def _connection_arguments(self) -> dict[str, Any]:
        return {**super()._connection_arguments(), "server_hostname": self.host}


class _UnixConnection(_Transferable, UnixDomainSocketConnection):
    """A connection through a socket of this machine."""


_KINDS: Final[dict[str, type[AbstractConnection]]] = {
    "redis": _PlainConnection,
    "rediss": _TlsConnection,
    "unix": _UnixConnection,
}
