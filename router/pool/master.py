"""The Mooncake master's HTTP interface, and which of several masters serves.

What must live here: its routes, its JSON and text. What must not: conclusions from them. Source:
mooncake-store/src/master_admin_service.cpp at 3b5a594; 0.3.13.post1 was asked. Everything is on the
port of `--metrics_port`. No question changes a lease: looking does not keep objects from eviction.

    GET /get_all_keys                     text, a key a line, in one answer (110 MB a million)
    GET /batch_query_keys?keys=A,B        {"success":true,"data":{"A":{"ok":true,...},...}}
    GET /metrics, /get_all_segments       text
    GET /ha_status                        text: serving, standby, candidate, recovering, ...
    a standby                             answers /metrics (zeros), and 503 about objects

Of several masters one is the leader and answers; the others stand by. What the leader had is known
to the next one only with `--enable_oplog` or a snapshot, so its keys are listed again after a
failover. Source: MasterAdminServer in mooncake-store/src/master_admin_service.cpp.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Final, Literal, Self
from urllib.parse import quote

import aiohttp
from msgspec import Raw, Struct
from yarl import URL

from router.base.decoding import decoder
from router.base.errors import PoolError, PoolGone, PoolLate
from router.base.host_names import Names
from router.upstream.session import Connector, Strays

TIMEOUT_S: Final = 5.0
"""Longest wait for a connection, and for the next bytes of an answer."""

SLICE: Final = 1_000
"""Keys of a listing handed over at once, then the loop gets a turn: 1 to 2 ms of work."""

_MAX_KEYS: Final = 20_000_000
_MAX_KEY_BYTES: Final = 4_096
_MAX_REASON: Final = 500
_MAX_PAGE_BYTES: Final = 32 * 1024 * 1024
_MAX_COUNT: Final = float(1 << 62)  # of keys or bytes; a larger figure is refused
_MOST_CONNECTIONS: Final = 100
_PATIENCE: Final = 4  # a whole answer may take so many times as long as its next bytes


Place = Literal["memory", "disk", "nowhere"]
"""Where an object is; disk: nowhere else."""


class MasterFigures(Struct, frozen=True, kw_only=True):
    """Figures of `/metrics`; None: the release lacks it. Counters fall at a restart."""

    num_keys: int | None
    allocated_bytes: int | None
    capacity_bytes: int | None
    num_evicted_keys: int | None
    num_put_keys: int | None  # items of all batch_put_start requests

    @property
    def bytes_per_object(self) -> float | None:
        """The mean size of an object."""
        if not self.num_keys or self.allocated_bytes is None:
            return None
        return self.allocated_bytes / self.num_keys


class MasterApi:
    """Asks one master. Every failure is a `PoolError`.

    Args:
        url: Base URL of its metrics port; several masters are separated by commas.
        timeout_s: Longest wait for a connection, and for the next bytes of an answer.
        strays: Counts connections on which bytes came that no question had asked for.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = TIMEOUT_S,
        names: Names | None = None,
        strays: Strays | None = None,
    ) -> None:
        self.urls = masters(url)
        self.url = self.urls[0]
        self.has_turned = False  # to the master that serves
        self._timeout_s = timeout_s
        self._strays = strays
        self._names = names
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=Connector(
                self._names, strays=self._strays, server="Mooncake master", limit=_MOST_CONNECTIONS
            ),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._timeout_s, sock_read=self._timeout_s
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,  # a kilobyte may be a gigabyte
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    def turn_to(self, url: str) -> None:
        """Ask this master from now on."""
        self.url = url
        self.has_turned = True

    async def ha_status(self, url: str) -> str:
        """Read a master's state: `serving`, `standby`, ...

        Raises:
            PoolError: no answer.
        """
        body = await self._body("/ha_status", base=url)
        return body[:64].decode("ascii", "replace").strip()

    async def figures(self) -> MasterFigures:
        """Read how full the pool is, and how much was evicted so far.

        Raises:
            PoolError: no answer, or not a Mooncake master's.
        """
        page = await self._page("/metrics")
        figures = MasterFigures(
            num_keys=sample(page, "master_key_count"),
            allocated_bytes=sample(page, "master_allocated_bytes"),
            capacity_bytes=sample(page, "master_total_capacity_bytes"),
            num_evicted_keys=sample(page, "master_evicted_key_count"),
            num_put_keys=sample(page, "master_batch_put_start_items_total"),
        )
        if figures.num_keys is None and figures.allocated_bytes is None:
            raise PoolError(f"{self.url}/metrics is not a Mooncake master's")
        return figures

    async def list_keys(self, take: Callable[[list[str]], None]) -> int:
        """Hand over the keys of all objects, slice by slice; return their number.

        Memory is bounded by a slice, and the loop gets a turn after each. The master takes a
        snapshot when asked: objects stored later are not in it.

        Raises:
            PoolError: no answer, an incomplete one, or something else than keys. The keys handed
                over until then are incomplete.
        """
        num_keys = 0
        async with self._get("/get_all_keys") as response:
            rest = b""
            async for chunk in response.content.iter_chunked(256 * 1024):
                lines = (rest + chunk).split(b"\n")
                rest = lines.pop()
                num_keys += len(lines)
                if len(rest) > _MAX_KEY_BYTES or num_keys > _MAX_KEYS:
                    raise PoolError(f"{self.url}/get_all_keys: no list of keys, or without end")
                for start in range(0, len(lines), SLICE):
                    take(self._keys(lines[start : start + SLICE]))
                    await asyncio.sleep(0)
            if rest:
                num_keys += 1
                take(self._keys([rest]))
        return num_keys

    def _keys(self, lines: list[bytes]) -> list[str]:
        try:
            text = b"\n".join(lines).decode()
        except UnicodeDecodeError as exc:
            raise PoolError(f"{self.url}/get_all_keys: not text") from exc
        if " " in text or "<" in text or "\x00" in text:  # an HTML page, an error message
            raise PoolError(f"{self.url}/get_all_keys: no list of keys")
        return [line for line in text.split("\n") if line]

    async def places(self, keys: Sequence[str], *, timeout_s: float) -> dict[str, Place]:
        """Ask where a few objects are; leave out those without an answer.

        Measured on a real master: 64 keys 0.3 ms, 512 keys 1.0 ms, 4,096 keys 7 ms.

        Raises:
            PoolError: no answer within `timeout_s`, or not understood.
        """
        # Not encoded as a form: releases before 2026 do not decode what they look up.
        query = ",".join(_quoted(key) for key in keys if "," not in key)
        try:
            async with asyncio.timeout(timeout_s):
                body = await self._body(f"/batch_query_keys?keys={query}")
        except TimeoutError as exc:
            raise PoolLate(f"{self.url}/batch_query_keys: no answer in time") from exc
        try:
            answer = _decode_answer(body)
        except ValueError as exc:
            raise PoolError(f"{self.url}/batch_query_keys: not understood: {exc}") from exc
        if not answer.success:
            reason = str(answer.error)[:_MAX_REASON]
            raise PoolError(f"{self.url}/batch_query_keys: refused: {reason}")
        found = ((key, answer.data.get(key)) for key in keys)
        return {key: where.place for key, where in found if where is not None}

    async def segments(self) -> list[str]:
        """List the memory that engines gave to the pool, by address.

        Raises:
            PoolError: no answer.
        """
        return (await self._page("/get_all_segments")).split()

    # ---------------------------------------------------------------- inside

    async def _page(self, path: str) -> str:
        try:
            return (await self._body(path)).decode()
        except UnicodeDecodeError as exc:
            raise PoolError(f"{self.url}{path}: not text") from exc

    async def _body(self, path: str, *, base: str | None = None) -> bytes:
        base = base or self.url
        shown = f"{base}{path.partition('?')[0]}"
        body = bytearray()
        try:
            async with (
                asyncio.timeout(_PATIENCE * self._timeout_s),
                self._get(path, base) as response,
            ):
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > _MAX_PAGE_BYTES:
                        raise PoolError(f"{shown}: an answer without end")
        except TimeoutError as exc:
            raise PoolError(f"{shown}: drips") from exc
        return bytes(body)

    @asynccontextmanager
    async def _get(
        self, path: str, base: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None
        base = base or self.url
        shown = f"{base}{path.partition('?')[0]}"
        try:
            async with self._session.get(_url(base, path), allow_redirects=False) as response:
                if response.status == 503:
                    raise PoolError(f"{shown}: answered 503, as a standby does")
                if response.status != 200:
                    raise PoolError(f"{shown}: answered {response.status}")
                if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                    raise PoolError(f"{shown}: answered compressed, which was not asked for")
                yield response
        except aiohttp.ServerTimeoutError as exc:
            raise PoolError(f"{shown}: silent for {self._timeout_s} s") from exc
        except aiohttp.ClientConnectorError as exc:
            raise PoolGone(f"{shown}: {exc.strerror or 'cannot connect'}") from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise PoolError(f"{shown}: {type(exc).__name__}") from exc


_NONE: Final = Raw()
_EMPTY: Final = (b"", b"[]", b"null")


class _Found(Struct):
    """Where an object is. Older releases have only the list `values`."""

    ok: bool = False
    values: Raw = _NONE
    disk_values: Raw = _NONE
    local_disk_values: Raw = _NONE
    nof_values: Raw = _NONE

    @property
    def place(self) -> Place:
        if not self.ok:
            return "nowhere"
        others = (self.disk_values, self.local_disk_values, self.nof_values)
        is_elsewhere = any(bytes(values) not in _EMPTY for values in others)
        return "disk" if is_elsewhere and bytes(self.values) in _EMPTY else "memory"


class _Answer(Struct):
    success: bool = False
    data: dict[str, _Found] = {}
    error: str | None = None


_decode_answer = decoder(_Answer, "json")


def masters(text: str) -> list[str]:
    """List the masters' base URLs in a setting, each once."""
    return list(dict.fromkeys(url.strip().rstrip("/") for url in text.split(",")))


def _url(base: str, path: str) -> URL:
    """Build a URL that is not cached: yarl keeps the last 128 that were given as text.

    A question about 512 objects takes 60 KB several times, so the cache would take 30 MiB.
    """
    root = URL(base, encoded=True)
    path, _, query = path.partition("?")
    url = URL()
    parts = (root.scheme, root.raw_authority, root.raw_path.rstrip("/") + path, query, "")
    url.__setstate__((parts,))
    return url


def _quoted(key: str) -> str:
    head, at, digest = key.rpartition("@")
    if not digest.isalnum() or not digest.isascii():
        return _quoted_text(key)
    return f"{_quoted_text(head)}{at}{digest}"


@lru_cache(maxsize=256)  # heads are few: 2.3 us a key otherwise
def _quoted_text(text: str) -> str:
    return quote(text, safe="@:/")


def sample(page: str, name: str) -> int | None:
    """Read a sample without labels; None: there is none, or it is not a count."""
    at = f"\n{page}".find(f"\n{name} ")
    if at < 0:
        return None
    value = page[at + len(name) + 1 :].partition("\n")[0]
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if 0.0 <= number <= _MAX_COUNT else None


_SERVING: Final = "serving"
_DEADLINE_S: Final = 1.0  # for a master's state: a silent standby must not delay the others


async def find_leader(api: MasterApi) -> bool:
    """Turn to the master that serves; return whether it is another one than before.

    A single master serves. While the present leader serves, no other master is asked.

    Raises:
        PoolGone: none serves.
        PoolError: several serve: they are several pools, or an election is under way.
    """
    if len(api.urls) == 1:
        return False
    if api.has_turned and await _state(api, api.url) == _SERVING:
        return False
    states = await asyncio.gather(*(_state(api, url) for url in api.urls))
    by_url = dict(zip(api.urls, states, strict=True))
    serving = [url for url, state in by_url.items() if state == _SERVING]
    if not serving:
        text = ", ".join(f"{url} {state}" for url, state in by_url.items())
        raise PoolGone(f"no Mooncake master serves: {text}")
    if len(serving) > 1:
        raise PoolError(
            f"{' and '.join(serving)} both serve: they are two pools, which need names "
            "(mooncake.pools)"
        )
    is_other = serving[0] != api.url and api.has_turned
    api.turn_to(serving[0])
    return is_other


async def _state(api: MasterApi, url: str) -> str:
    """Return a master's state, or what is wrong with it."""
    try:
        async with asyncio.timeout(_DEADLINE_S):
            return await api.ha_status(url)
    except PoolGone:
        return "does not listen"
    except (PoolError, TimeoutError):
        return "does not answer"
