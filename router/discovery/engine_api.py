"""A replica's own HTTP API beside the data path: discovery, probes, load, tokenization."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final, Self
from urllib.parse import urlencode, urlsplit

import aiohttp
import orjson
from msgspec import Struct
from multidict import CIMultiDict

from router.base.errors import (
    BadRequest,
    KeyRefused,
    NotAsked,
    TlsRefused,
    UpstreamBroken,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.base.host_names import Names
from router.base.system import shortage
from router.config.tls import Tls, system_tls
from router.config.tls import refusal as tls_refusal
from router.discovery import engine_pages as pages
from router.discovery.engine_facts import EngineFacts, RankLoads, read_facts, read_loads
from router.discovery.engine_pages import NO_METRICS, EngineMetrics, ServerInfo, SleepState
from router.kv_events.subscriber import EventSource
from router.replicas.registry import NO_KEY, EngineKey
from router.replicas.replica import ServedModel
from router.upstream.session import (
    Connector,
    HttpSession,
    Response,
    StrayAnswer,
    Strays,
    unreachable,
)

_TOOL_FLAG: Final = "--enable-auto-tool-choice"  # in vLLM 0.32, renderers/online_renderer.py
_MAX_PAGE_BYTES: Final = 8 * 1024 * 1024
_SHOWN: Final = 1_024  # of an answer that is no engine's: enough to see what it is
_MAX_TOKENS_BYTES: Final = 32 * 1024 * 1024
_PATIENCE: Final = 3  # a whole answer may take so many times as long as its next bytes
_MOST_CONNECTIONS: Final = 256
_KEPT_S: Final = 4.0  # less than the 5 s after which an engine's server closes one that is idle
_JSON: Final = {"Content-Type": "application/json"}


class WholeAnswer(Struct, frozen=True):
    """A whole answer."""

    status: int
    body: bytes


class EngineApi:
    """Asks replicas about themselves. Use as an async context manager.

    It uses the HTTP session of the data path. A probe takes 0.1 to 0.4 ms of CPU, and 64 replicas
    are asked 70 times a second.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        tls: Tls | None = None,
        key: EngineKey = NO_KEY,
        strays: Strays | None = None,
        names: Names | None = None,
    ) -> None:
        self._key = key
        self._timeout_s = timeout_s
        self._tls = tls if tls is not None else Tls({}, system_tls)
        self._strays = strays
        self._names = names
        self._session: HttpSession | None = None

    async def __aenter__(self) -> Self:
        connector = Connector(
            self._names,
            strays=self._strays,
            limit=_MOST_CONNECTIONS,
            keepalive_timeout=_KEPT_S,
            tls=self._tls,
        )
        self._session = HttpSession(connector, connect_timeout_s=self._timeout_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def facts(self, replica: str, url: str) -> EngineFacts:
        """Ask the replica at base URL `url` for everything that it reports about itself.

        Raises:
            UpstreamUnreachable, UpstreamTimeout: no answer.
            UpstreamBroken: it is not an OpenAI-compatible server; the message says why.
        """
        models = await self.models(replica, url)
        version = await self._optional(replica, url, "/version")
        sources = await self._event_sources(replica, url)
        metrics = await self._optional(replica, url, "/metrics")
        return read_facts(
            models,
            EngineMetrics(metrics) if metrics is not None else NO_METRICS,
            sources,
            version=pages.version(version) if version is not None else None,
            is_paused=await self._is_paused(replica, url),
        )

    async def starts(self, replica: str, url: str, *, num: int) -> frozenset[float]:
        """Ask over several connections at once when the process that answers started.

        Raises:
            UpstreamError: as `facts`.
        """
        async with asyncio.TaskGroup() as tg:
            asked = [tg.create_task(self._optional(replica, url, "/metrics")) for _ in range(num)]
        pages = [task.result() for task in asked]
        starts = [EngineMetrics(page).started_s() for page in pages if page is not None]
        return frozenset([each for each in starts if each is not None])

    async def models(self, replica: str, url: str) -> tuple[ServedModel, ...]:
        """List the models that a replica serves now, adapters included.

        Raises:
            UpstreamUnreachable, UpstreamTimeout, UpstreamBroken: as `facts`.
        """
        answer = await self._get(replica, url, "/v1/models")
        if answer.status in (401, 403):
            raise KeyRefused(
                replica,
                f"{url}/v1/models answered {answer.status}: the engine has an --api-key; "
                "name its file in engine.api_key_file (of a replica that was added, also its host "
                "in engine.key_hosts)",
            )
        try:
            models = pages.models(answer.body)
        except ValueError as exc:
            raise UpstreamBroken(
                replica,
                f"{url}/v1/models answered {answer.status} without a model list: "
                f"{_no_engine(url, answer)} ({exc})",
            ) from exc
        if not models:
            raise UpstreamBroken(replica, f"{url}/v1/models lists no model")
        return models

    async def event_publishers(self, replica: str, url: str) -> list[EventSource] | None:
        """Read the event sources of its ranks, those that are off included.

        None: it has no such route, as older releases, or does not answer.
        """
        sources = await self._event_sources(replica, url)
        return list(sources.values()) if sources is not None else None

    async def server_info(self, replica: str, url: str, *, timeout_s: float) -> ServerInfo | None:
        """Ask an engine in dev mode about its configuration; other engines say nothing.

        None: no answer in time, or it could not be asked. The first answer takes 2 s of an idle
        machine, later ones 40 ms: the engine always lists packages and devices, too (vLLM 0.32
        entrypoints/serve/dev/server_info).
        """
        try:
            answer = await self._send(
                replica,
                "GET",
                f"{url}/server_info?config_format=json",
                headers=self._key.headers(url),
                timeout_s=timeout_s,
            )
            return pages.server_info(answer.body) if answer.status == 200 else ServerInfo()
        except (UpstreamTimeout, NotAsked):
            return None
        except (UpstreamUnreachable, UpstreamBroken, ValueError):
            return ServerInfo()

    async def engine_ids(self, replica: str, url: str) -> dict[int, str]:
        """Ask the bootstrap server at base URL `url` for the names of a replica's ranks.

        Raises:
            UpstreamError: it does not answer in time, or with something else.
        """
        answer = await self._get(replica, url, "/query")
        try:
            if answer.status == 200:
                return pages.engine_ids(answer.body)
        except ValueError:
            pass
        raise UpstreamBroken(replica, f"{url}/query answered {answer.status} without engines")

    async def ping(self, replica: str, url: str) -> None:
        """Probe `/health`.

        Raises:
            UpstreamError: unreachable, silent, or not healthy by its own word.
        """
        answer = await self._get(replica, url, "/health")
        if answer.status != 200:
            raise UpstreamBroken(replica, f"/health answered {answer.status}")

    async def load(
        self, replica: str, url: str, *, names_sources: bool = False, shows_pause: bool = False
    ) -> RankLoads | None:
        """Read the load of the replica's ranks; None: it has no metrics.

        `names_sources`: it listed its event sources, and is asked for them again. Metrics go on
        showing ranks that were scaled away (vLLM 0.32 v1/engine/async_llm.py, elastic scaling).
        `shows_pause`: it said whether it is paused, and is asked for that again.
        """
        metrics = await self._optional(replica, url, "/metrics")
        if metrics is None:
            return None
        page = EngineMetrics(metrics)
        sources: dict[int, EventSource] | None = {}
        if names_sources:
            sources = await self._event_sources(replica, url)
        sleep: SleepState | None = page.sleep()
        if shows_pause and sleep == "awake":  # one that sleeps is paused, too
            is_paused = await self._is_paused(replica, url)
            sleep = None if is_paused is None else "paused" if is_paused else "awake"
        return read_loads(page, sources, sleep=sleep, now_s=time.monotonic())

    async def tokenize(self, replica: str, url: str, body: bytes, *, timeout_s: float) -> list[int]:
        """Ask the engine to tokenize the request `body` (its `/tokenize` takes the same fields).

        Raises:
            BadRequest: the engine says that the request is wrong.
            UpstreamError: it did not answer in time or not with tokens.
        """
        answer = await self._send(
            replica,
            "POST",
            f"{url}/tokenize",
            headers={**_JSON, **self._key.headers(url)},
            body=body,
            timeout_s=timeout_s,
            max_bytes=_MAX_TOKENS_BYTES,
        )
        if answer.status in (400, 422):
            raise BadRequest(f"the engine refused the prompt: {pages.refusal(answer.body)}")
        try:
            return pages.tokens(answer.body)
        except ValueError as exc:
            raise UpstreamBroken(
                replica, f"/tokenize answered {answer.status} without tokens"
            ) from exc

    async def takes_tools(
        self, replica: str, url: str, model: str, *, timeout_s: float
    ) -> bool | None:
        """Ask whether a chat may offer tools, by a chat that is refused either way.

        vLLM checks tools first and the temperature last, before anything is computed (0.32.0).
        None: the engine refused the chat for another reason.
        """
        tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": tool}],
            "tool_choice": "auto",
            "temperature": -1,
            "max_tokens": 1,
        }
        try:
            answer = await self._send(
                replica,
                "POST",
                f"{url}/v1/chat/completions",
                headers={**_JSON, **self._key.headers(url)},
                body=orjson.dumps(body),
                timeout_s=timeout_s,
            )
        except (UpstreamUnreachable, UpstreamTimeout, UpstreamBroken):
            return None
        if answer.status != 400:
            return None
        reason = pages.refusal(answer.body)
        if _TOOL_FLAG in reason:
            return False
        return True if "temperature" in reason else None

    async def order(
        self,
        replica: str,
        url: str,
        *,
        method: str,
        query: Mapping[str, str | list[str]],
        body: bytes | None,
        timeout_s: float,
    ) -> WholeAnswer:
        """Send an operator's order to `url`; no redirect is followed.

        Raises:
            UpstreamError: no answer came in time; whether it was done is not known.
        """
        return await self._send(
            replica,
            method,
            f"{url}?{urlencode(query, doseq=True)}" if query else url,
            headers={**_JSON, **self._key.headers(url)},
            body=body,
            timeout_s=timeout_s,
        )

    async def _get(self, replica: str, url: str, path: str) -> WholeAnswer:
        return await self._send(
            replica,
            "GET",
            url + path,
            headers=self._key.headers(url),
            timeout_s=_PATIENCE * self._timeout_s,
            next_bytes_s=self._timeout_s,
        )

    async def _event_sources(self, replica: str, url: str) -> dict[int, EventSource] | None:
        """Read the event sources by global rank; None: it has no such route."""
        body = await self._optional(replica, url, "/kv_event_sources")
        try:
            return pages.event_sources(body) if body is not None else None
        except ValueError:
            return None

    async def _is_paused(self, replica: str, url: str) -> bool | None:
        """Ask an engine in dev mode whether its scheduler is paused; None: it does not say."""
        body = await self._optional(replica, url, "/is_paused")
        return pages.is_paused(body) if body is not None else None

    async def _optional(self, replica: str, url: str, path: str) -> bytes | None:
        """Get a page that a replica may lack; None unless it answers 200."""
        try:
            answer = await self._get(replica, url, path)
        except (UpstreamUnreachable, UpstreamTimeout, UpstreamBroken):
            return None
        return answer.body if answer.status == 200 else None

    async def _send(
        self,
        replica: str,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None = None,
        timeout_s: float,
        next_bytes_s: float | None = None,
        max_bytes: int = _MAX_PAGE_BYTES,
    ) -> WholeAnswer:
        """Get a whole answer: by a deadline, of a bounded size."""
        assert self._session is not None
        # Not compressed: a kilobyte may be a gigabyte.
        sent = CIMultiDict({"Accept-Encoding": "identity", **headers})
        try:
            async with asyncio.timeout(timeout_s):
                async with asyncio.timeout(next_bytes_s):
                    response, first = await self._exchange(replica, url, method, sent, body)
                try:
                    rest = await _read(response, first, max_bytes, next_bytes_s)
                    return WholeAnswer(response.status, rest)
                finally:
                    response.close()
        except TimeoutError as exc:
            raise UpstreamTimeout(replica, f"{url} was silent") from exc
        except aiohttp.ClientConnectorError as exc:
            if (short_of := shortage(exc)) is not None:
                raise NotAsked(replica, f"{url} was not asked: {short_of}") from exc
            if (why := tls_refusal(exc)) is not None:
                raise TlsRefused(replica, f"{url}: {why}") from exc
            raise unreachable(exc, replica, url) from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            reason = str(exc) if isinstance(exc, _OddAnswer) else type(exc).__name__
            if isinstance(exc, aiohttp.ServerDisconnectedError):
                reason = f"closed the connection without an answer{_maybe_tls(url)}"
            reason = tls_refusal(exc) or reason
            raise UpstreamBroken(replica, f"{url}: {reason}") from exc

    async def _exchange(
        self,
        replica: str,
        url: str,
        method: str,
        headers: CIMultiDict[str],
        body: bytes | None,
    ) -> tuple[Response, bytes]:
        """Send a request; a question again if a kept connection had another one's answer."""
        assert self._session is not None
        while True:
            connection, _ = await self._session.connect(url, replica)
            try:
                return await self._session.exchange(connection, url, method, headers, body)
            except StrayAnswer:  # of a kept connection, which is closed now
                if method != "GET":
                    raise


class _OddAnswer(ValueError):
    """An answer that is not read to its end; its message is safe to show."""


async def _read(
    response: Response, first: bytes, max_bytes: int, next_bytes_s: float | None
) -> bytes:
    """Read a body as it comes.

    Raises:
        _OddAnswer: it is compressed, or larger than it may be.
    """
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _OddAnswer("answered compressed, which was not asked for")
    body = bytearray(first)
    while len(body) <= max_bytes and not response.content.at_eof():
        async with asyncio.timeout(next_bytes_s):
            body += await response.content.readany()
    if len(body) > max_bytes:
        raise _OddAnswer(f"answered more than {max_bytes} bytes")
    return bytes(body)


def _no_engine(url: str, answer: WholeAnswer) -> str:
    """Return what may be wrong with a base URL at which no engine answers."""
    if b"https" in answer.body[:_SHOWN].lower() and url.startswith("http://"):
        return "does it speak TLS? Then write https://"
    path = urlsplit(url).path
    if path:
        return f"write the base URL alone: http://HOST:PORT, without {path!r}?"
    return "not an OpenAI-compatible server?"


def _maybe_tls(url: str) -> str:
    """Return the hint for a first question in plain HTTP that a TLS port does not answer."""
    is_first = url.startswith("http://") and url.endswith("/v1/models")
    return "; does it speak TLS? Then write https://" if is_first else ""
