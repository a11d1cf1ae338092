"""The way to Redis: which server has the data, a few connections there, deadlines, errors by name.

What must live here: addresses, TLS, passwords, Sentinel, Cluster, pipelines of raw commands, and
all of redis-py's exceptions. What must not: keys and what they hold (redis_store).

All keys of a namespace share one hash tag, so in a Cluster they lie on one node: it is looked for
and then spoken to like any other server. Every operation ends by its deadline; a connection that
was left in the middle of a reply is cut, never used again.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import uuid
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from weakref import WeakKeyDictionary

from msgspec import Struct
from redis import exceptions as errors
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.crc import key_slot

from router.config import RedisConfig
from router.errors import StoreError, StoreFull, StoreRefused, StoreUnavailable

logger = logging.getLogger(__name__)

Mode = Literal["standalone", "sentinel", "cluster"]
Word = bytes | str | int | float
Command = tuple[Word, ...]

OLDEST_VERSION: Final = (6, 2)

_MAX_CONNECTIONS: Final = 16

# Redis says so while it starts, fails over or moves the data: it passes.
_PASSING: Final = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "MOVED", "ASK", "BUSY")

_HINTS: Final = {
    "NOAUTH": "it wants a password: WARMROUTE_REDIS_PASSWORD or redis.password_file",
    "WRONGPASS": "wrong password, or user: see WARMROUTE_REDIS_PASSWORD, redis.password_file and "
    "redis.username",
    "NOPERM": "the ACL user lacks a right: it needs ~{wr:*, and +@read +@write +@scripting "
    "+@connection +info +time +cluster|slots",
    "READONLY": "this is a replica: name its master in redis.url, or use redis.sentinels",
    "OOM": "it is full: raise maxmemory (its policy should be noeviction)",
    "MISCONF": "it cannot save to disk and therefore refuses writes: see its log",
    "WRONGTYPE": "something else lies under a key of ours: choose another redis.namespace or "
    "database, or delete that key",
}


class Server(Struct, frozen=True, kw_only=True):
    """The server that has the data, as it introduced itself."""

    address: str
    name: str  # redis, valkey
    version: str
    mode: Mode


class Replies(NamedTuple):
    """What came back, errors among it, and which life of the server it came from.

    `origin` changes when the server restarts and with every fail-over: what was written last
    before that may be gone.
    """

    values: list[Any]
    origin: str


class _Address(NamedTuple):
    host: str  # or the path of a socket
    port: int  # 0: a socket

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.port else self.host


class RedisConnection:
    """A few connections to the one server that has a namespace's data.

    Args:
        config: Where it is.
        key: Any key of the namespace; in a Cluster its hash slot says where all of them are.
        password: None: none.
    """

    def __init__(self, config: RedisConfig, *, key: str, password: str | None) -> None:
        self._config = config
        self._slot = key_slot(key.encode())
        scheme, home, db = _parsed(config.url)
        self._kind: type[AbstractConnection] = _KINDS[scheme]
        self._db = db
        self._login: dict[str, Any] = {"username": config.username, "password": password}
        if scheme == "rediss" and config.ca_file is not None:
            self._login["ssl_ca_certs"] = str(config.ca_file)
        self._seeds = [home] if home is not None else [_split(s) for s in config.sentinels]
        self._pool: BlockingConnectionPool | None = None
        self._locating = asyncio.Lock()
        self._origins: WeakKeyDictionary[AbstractConnection, str] = WeakKeyDictionary()
        self.server: Server | None = None  # None: not reached yet

    async def ask(self, *command: Word, timeout_s: float | None = None) -> Any:
        """Send one command.

        Raises:
            StoreUnavailable: no answer, or not in time; StoreRefused: an error.
        """
        (value,) = (await self.ask_all([command], timeout_s=timeout_s)).values
        if isinstance(value, Exception):
            raise await self.refusal(value)
        return value

    async def ask_all(
        self, commands: Sequence[Command], *, timeout_s: float | None = None
    ) -> Replies:
        """Send commands at once and read all replies; one that is an error is given as such.

        Raises:
            StoreUnavailable: no answer, or not in time. What was carried out is not known.
            StoreRefused: there is no speaking to this server.
        """
        timeout_s = self._config.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(commands)
        except TimeoutError as exc:
            await self._look_elsewhere(timeout_s)
            raise StoreUnavailable(
                f"Redis at {self._where()} did not answer within {timeout_s:g} s"
            ) from exc
        except (errors.RedisError, OSError) as exc:
            await self.close()
            raise _named(exc, self._where()) from exc

    async def refusal(self, error: Exception) -> StoreError:
        """Name an error that was a reply; one that says that the data is elsewhere disconnects."""
        named = _named(error, self._where())
        if self._moves and isinstance(error, errors.ReadOnlyError):
            named = StoreUnavailable(f"Redis at {self._where()} has become a replica")
        if isinstance(named, StoreUnavailable):
            await self.close()
        return named

    async def close(self) -> None:
        """Cut the connections; the next operation looks for the server anew.

        One that is in use is cut by its user in the end: redis-py's connections cannot be pulled
        from under a reader.
        """
        pool, self._pool = self._pool, None
        if pool is not None:
            # To the end, also where we are cancelled: the rest is known only here.
            await asyncio.shield(pool.disconnect(inuse_connections=False))

    # -- inside ------------------------------------------------------------------------------

    async def _exchange(self, commands: Sequence[Command]) -> Replies:
        pool = self._pool or await self._located()
        connection: AbstractConnection = await pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await _send(connection, commands)
            values = [await _reply(connection) for _ in commands]
            return Replies(values, self._origins[connection])
        except BaseException:  # cancelled as well: replies may be under way
            await connection.disconnect(nowait=True)
            raise
        finally:
            if pool is not self._pool:  # closed meanwhile
                await connection.disconnect(nowait=True)
            await pool.release(connection)

    def _where(self) -> str:
        return self.server.address if self.server else ", ".join(map(str, self._seeds))

    @property
    def _moves(self) -> bool:
        """Whether another server may take the data over."""
        return bool(self._config.sentinels) or (
            self.server is not None and self.server.mode == "cluster"
        )

    async def _look_elsewhere(self, waited_s: float) -> None:
        """Look elsewhere next time, where there is an elsewhere and the wait was a real one."""
        if self._pool is None:
            self._seeds.append(self._seeds.pop(0))
        elif self._moves and waited_s >= self._config.timeout_s:
            await self.close()

    async def _located(self) -> BlockingConnectionPool:
        async with self._locating:
            if self._pool is None:
                address, mode = await self._locate()
                self._pool = self._new_pool(address, mode)
            return self._pool

    async def _locate(self) -> tuple[_Address, Mode]:
        """Find the server: ask the seeds in turn, each for its share of the deadline."""
        share_s = self._config.timeout_s / (len(self._seeds) + 1)
        failure: StoreError | None = None
        for seed in list(self._seeds):
            try:
                async with asyncio.timeout(share_s):
                    if self._config.sentinels:
                        return await self._ask_sentinel(seed), "sentinel"
                    return await self._ask_node(seed)
            except (TimeoutError, OSError, errors.RedisError) as exc:
                failure = _named(exc, str(seed))
                if isinstance(exc, TimeoutError) and self._kind is SSLConnection:
                    failure = StoreUnavailable(f"{failure.message}: does it speak TLS?")
            except StoreError as exc:
                failure = exc
            self._seeds.append(self._seeds.pop(0))
        assert failure is not None
        raise failure

    async def _ask_sentinel(self, seed: _Address) -> _Address:
        service = self._config.sentinel_service
        assert service is not None
        found = await self._ask_once(seed, ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service))
        if not found:
            raise StoreRefused(
                f"Sentinel {seed} knows no master {service!r}: see redis.sentinel_service"
            )
        return _Address(found[0].decode(), int(found[1]))

    async def _ask_node(self, seed: _Address) -> tuple[_Address, Mode]:
        reply = _pairs(await self._ask_once(seed, ("HELLO", 2)))
        if reply.get("mode") == "sentinel":
            raise StoreRefused(
                f"{seed} is a Sentinel: name it in redis.sentinels, and its master in "
                "redis.sentinel_service"
            )
        if reply.get("mode") != "cluster":
            return seed, "standalone"
        nodes: dict[_Address, None] = {}
        owner = None
        for first, last, master, *replicas in await self._ask_once(seed, ("CLUSTER", "SLOTS")):
            there = [_node(node, seed) for node in (master, *replicas)]
            nodes.update(dict.fromkeys(there))
            if first <= self._slot <= last:
                owner = there[0]
        if owner is None:
            raise StoreUnavailable(f"the Cluster at {seed} serves no slot {self._slot}")
        self._seeds = [seed, *(node for node in nodes if node != seed)]
        return owner, "cluster"

    async def _ask_once(self, address: _Address, command: Command) -> Any:
        """Ask over a connection of its own."""
        connection = self._kind(**self._arguments(address, db=0))
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            await connection.send_command(*command)
            return await connection.read_response()
        finally:
            await connection.disconnect(nowait=True)

    def _arguments(self, address: _Address, *, db: int) -> dict[str, Any]:
        where = {"host": address.host, "port": address.port}
        return {
            **(where if address.port else {"path": address.host}),
            **self._login,
            "db": db,
            "protocol": 2,
            "socket_timeout": None,  # deadlines are set around whole operations
            "socket_connect_timeout": self._config.timeout_s,
        }

    def _new_pool(self, address: _Address, mode: Mode) -> BlockingConnectionPool:
        async def introduce(connection: AbstractConnection) -> None:
            try:
                await connection.on_connect()
                await connection.send_command("HELLO", 2)
                self.server = _checked(_pairs(await connection.read_response()), address, mode)
                self._origins[connection] = await _origin(connection)
            except BaseException:  # or the pool would take it for ready
                await connection.disconnect(nowait=True)
                raise

        return BlockingConnectionPool(
            max_connections=_MAX_CONNECTIONS,
            timeout=None,
            connection_class=self._kind,
            redis_connect_func=introduce,
            **self._arguments(address, db=self._db),
        )


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a reply means that Redis is full; from inside a script it is wrapped."""
    return "OOM command not allowed" in str(error) or isinstance(error, errors.OutOfMemoryError)


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


async def _origin(connection: AbstractConnection) -> str:
    """Name this life of the server; where it may not be asked, every connection is a new one."""
    await connection.send_command("INFO", "server")
    reply = await _reply(connection)
    if isinstance(reply, bytes):
        for line in reply.decode(errors="replace").splitlines():
            if line.startswith("run_id:"):
                return line.removeprefix("run_id:")
    return f"unknown-{uuid.uuid4().hex}"


def _checked(reply: dict[str, Any], address: _Address, mode: Mode) -> Server:
    """Refuse a server that is too old or may not be written to."""
    version = str(reply.get("version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < OLDEST_VERSION:
        raise StoreRefused(
            f"Redis at {address} is version {version}; 6.2 is the oldest that will do"
        )
    if reply.get("role") == "replica":
        if mode == "standalone":
            raise StoreRefused(f"Redis at {address}: {_HINTS['READONLY']}")
        raise StoreUnavailable(f"Redis at {address} is a replica by now: failing over")
    return Server(
        address=str(address), name=str(reply.get("server", "redis")), version=version, mode=mode
    )


def _named(exc: Exception, where: str) -> StoreError:
    """Name what redis-py raised, or what Redis replied; most telling first."""
    if isinstance(exc, StoreError):
        return exc
    if isinstance(exc, TimeoutError | errors.TimeoutError):
        return StoreUnavailable(f"Redis at {where} did not answer in time")
    text = str(exc)
    code = getattr(exc, "status_code", None) or text.partition(" ")[0]
    if isinstance(exc, errors.AuthenticationError):
        if "without any password" in text or "no password" in text:
            return StoreRefused(f"Redis at {where} has no password, but one is configured")
        is_missing = "required" in text or "already authenticated" in text
        return StoreRefused(
            f"Redis at {where} refused us: {_HINTS['NOAUTH' if is_missing else 'WRONGPASS']}"
        )
    for hint_code, hint in _HINTS.items():
        if code == hint_code or f"{hint_code} " in text:
            kind = StoreFull if hint_code == "OOM" else StoreRefused
            return kind(f"Redis at {where}: {hint} ({text})")
    if isinstance(exc, errors.InvalidResponse) or "Protocol error" in text:
        return StoreRefused(f"what answers at {where} is not Redis")
    if code in _PASSING or isinstance(exc, errors.ConnectionError | errors.ClusterError | OSError):
        return _named_link(exc, text, where)
    if isinstance(exc, errors.ResponseError):
        return _named_reply(text, where)
    return StoreUnavailable(f"Redis at {where}: {text or type(exc).__name__}")


def _named_link(exc: BaseException, text: str, where: str) -> StoreError:
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return StoreRefused(
                f"Redis at {where}: certificate not trusted ({cause.verify_message}): "
                "see redis.ca_file"
            )
        if isinstance(cause, ssl.SSLError):
            return StoreRefused(f"Redis at {where} does not speak TLS: write redis://")
        cause = cause.__cause__ or cause.__context__
    return StoreUnavailable(f"Redis at {where}: {text or type(exc).__name__}")


def _named_reply(text: str, where: str) -> StoreError:
    lower = text.lower()
    if "db index" in lower or "select is not allowed" in lower:
        return StoreRefused(f"Redis at {where} has no such database: see redis.url ({text})")
    if "unknown command" in lower:
        return StoreRefused(f"what answers at {where} is no Redis of version 6.2 or later ({text})")
    return StoreRefused(f"Redis at {where}: {text}")


_KINDS: Final[dict[str, type[AbstractConnection]]] = {
    "redis": Connection,
    "rediss": SSLConnection,
    "unix": UnixDomainSocketConnection,
}


def _parsed(text: str | None) -> tuple[str, _Address | None, int]:
    """Read a URL that router.config has checked: scheme, address (None: none given), database."""
    if text is None:
        return "redis", None, 0
    url = urlsplit(text)
    if url.scheme == "unix":
        db = int(parse_qs(url.query).get("db", ["0"])[0])
        return url.scheme, _Address(unquote(url.path), 0), db
    return (
        url.scheme,
        _Address(url.hostname or "", url.port or 6379),
        int(url.path.strip("/") or 0),
    )


def _split(text: str) -> _Address:
    host, _, port = text.rpartition(":")
    return _Address(host.strip("[]"), int(port))


def _node(reply: Sequence[Any], seed: _Address) -> _Address:
    """Read a node of CLUSTER SLOTS; one that does not know its own name is the one asked."""
    host = (reply[0] or b"").decode()
    return _Address(seed.host if host in ("", "?") else host, int(reply[1]))


def _pairs(flat: Any) -> dict[str, Any]:
    """Read a map as RESP 2 has it: names and values by turns; empty if it is none."""
    if not isinstance(flat, list):
        return {}
    words = [word.decode() if isinstance(word, bytes) else word for word in flat]
    return dict(zip(words[::2], words[1::2], strict=False))
