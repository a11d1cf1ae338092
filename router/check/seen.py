"""What a check saw of a replica: the router's own structs, and what only a check asks.

`Reach` says whether something listens at an address: it connects, and sends nothing. `Deadline` is
the time limit of a check.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from contextlib import suppress
from typing import Final, Literal
from urllib.parse import urlsplit

from msgspec import Struct

from router.base.engines import Role
from router.base.messages import StreamStatus
from router.discovery.engine_facts import EngineFacts
from router.discovery.engine_pages import ServerInfo
from router.kv_events.subscriber import EventSource
from router.replicas.replica import Entry, ServedModel
from router.tokens.trust import Difference

CONNECT_S: Final = 2.0

Reach = Literal["open", "refused", "silent", "unknown host", "not an address"]
"""The result of connecting to HOST:PORT. An existing path (`ipc://…`) counts as open."""

_SILENT: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


async def reach(endpoint: str, *, timeout_s: float) -> Reach:
    """Try to connect to `tcp://HOST:PORT`, `http://HOST:PORT` or `ipc://PATH`."""
    scheme, _, path = endpoint.partition("://")
    if scheme == "ipc":
        return "open" if path and _exists(path) else "refused"
    try:
        url = urlsplit(endpoint)
        host, port = url.hostname, url.port or {"http": 80, "https": 443}.get(url.scheme)
    except ValueError:
        host, port = None, None
    if not host or not port:
        return "not an address"
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return "silent"
    except socket.gaierror:
        return "unknown host"
    except OSError as exc:
        return "silent" if exc.errno in _SILENT else "refused"
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
    return "open"


def _exists(path: str) -> bool:  # apart: ruff's ASYNC240 knows it for blocking
    return os.path.exists(path)


class Deadline:
    """When a check ends."""

    __slots__ = ("_at_s",)

    def __init__(self, wait_s: float) -> None:
        self._at_s = time.monotonic() + wait_s

    @property
    def left_s(self) -> float:
        """The remaining time, at least 0."""
        return max(0.0, self._at_s - time.monotonic())

    def at_most(self, timeout_s: float) -> float:
        """Shorten a timeout to the remaining time; always above 0."""
        return max(0.01, min(timeout_s, self.left_s))


Failure = Literal["api key", "unknown host", "no answer", "other"]


class RankSeen(Struct, frozen=True, kw_only=True):
    """One rank's event stream. None: not known."""

    rank: int
    source: EventSource
    endpoint: str  # to connect to
    reach: Reach
    why_no_address: str = ""
    is_publisher: bool = False  # what listens at the endpoint speaks ZeroMQ
    replay_endpoint: str | None = None  # None: there is none
    replay_reach: Reach | None = None
    has_replay: bool | None = None  # whether it answered
    status: StreamStatus | None = None  # None: it was not followed
    num_batches: int = 0  # of history
    num_blocks: int = 0  # in its cache, by these
    num_unknown_tier: int = 0  # blocks that it stored on a tier which is not followed
    num_pooled: int = 0  # blocks that it reported as written to the pool
    foreign: str | None = None  # why its endpoint is another replica's; None: it is not

    @property
    def state(self) -> str:
        """The state of the stream: exact, degraded or blind."""
        return self.status.state if self.status is not None else "blind"

    @property
    def reason(self) -> str:
        """Why it is not exact."""
        return self.status.reason if self.status is not None else ""


class ModelSeen(Struct, frozen=True, kw_only=True):
    """One base model of a replica, and how its prompts become tokens."""

    served: ServedModel
    source: str  # of tokenizer and template
    is_loaded: bool = False  # False: there was no time
    engine_only: str | None = None  # why it cannot be tokenized here; None: it can
    is_compared: bool = False  # its token ids of samples, with the engine's
    difference: Difference | None = None  # between them; None: there is none
    joins_system: bool = False  # /v1/messages joins later system messages to the first

    @property
    def id(self) -> str:
        """The model's name."""
        return self.served.id


class ReplicaSeen(Struct, frozen=True, kw_only=True):
    """One replica. `error` says why it has no facts."""

    entry: Entry
    pool: str | None = None  # the Mooncake pool that it is in; "": the only one; None: none
    error: str | None = None
    failure: Failure | None = None  # None: it answered, or was not asked
    facts: EngineFacts | None = None
    num_engines: int = 1  # that answered at its address
    info: ServerInfo | None = ServerInfo()  # None: its /server_info did not answer in time
    publishers: tuple[EventSource, ...] | None = None  # None: it has no /kv_event_sources
    models: tuple[ModelSeen, ...] = ()
    takes_tools: bool | None = None  # whether a chat may offer tools
    ranks: tuple[RankSeen, ...] = ()
    bootstrap: str | None = None  # where its bootstrap server should be; None: it needs none
    has_bootstrap: bool = False  # it answers there

    @property
    def name(self) -> str:
        """Its name in this router."""
        return self.entry.name

    @property
    def url(self) -> str:
        """Its base URL."""
        return self.entry.replica.url.rstrip("/")

    @property
    def identity(self) -> str:
        """Its name among routers."""
        return self.entry.identity

    @property
    def num_ranks(self) -> int:
        """How many data-parallel ranks it has."""
        return self.facts.num_ranks if self.facts is not None else 1

    @property
    def seems(self) -> Role | None:
        """The role that it shows; None: it shows none."""
        said = self.info.role if self.info is not None else None
        return said or (self.facts.seems if self.facts is not None else None)
