"""A replica's own HTTP API beside the data path: discovery, probes, load, tokenization.

Everything a replica reports about itself is optional: what is missing is None, and the router does
without (a replica without `/kv_event_sources` is routed to approximately).

Ranks are numbered twice. Metrics (label `engine`), event sources and events have *global* numbers;
the header that names a rank counts a server's own, from 0. They differ where each server has some
ranks of a larger group (vLLM 0.32 --data-parallel-external-lb, -hybrid-lb; v1/engine/core_client.py
`engine_ranks_managed`, input_processor.py `num_ranks`). A server's global numbers are consecutive,
so the lowest is its own 0; outside of this file ranks have local numbers.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Final, Self, TypeVar
from urllib.parse import urlencode, urlsplit

import aiohttp
import orjson
from msgspec import Struct
from multidict import CIMultiDict

from router.config import EventsConfig, ReplicaConfig
from router.discovery import engine_pages as pages
from router.discovery.engine_pages import ServerInfo, SleepState
from router.errors import (
    BadRequest,
    KeyRefused,
    NotAsked,
    TlsRefused,
    UpstreamBroken,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.kv_events.subscriber import EventSource
from router.releases import V0_32, is_at_least
from router.replicas.engine_key import NO_KEY, EngineKey
from router.replicas.event_ports import EventPorts
from router.replicas.replica import ServedModel
from router.replicas.signs import Figures
from router.roles import Role
from router.shortage import shortage
from router.tls import refusal as tls_refusal
from router.tls import system_tls
from router.upstream.failures import unreachable
from router.upstream.session import Response, Session

T = TypeVar("T")

_POOL_METRIC: Final = "vllm:mooncake_store_"  # of the connector (0.32.0), and only where it is on

_FETCH_METRIC: Final = "vllm:num_requests_kv_fetch_by_stage"  # of what can load KV (0.32.0)

_DRAFTS_METRIC: Final = "vllm:spec_decode_num_drafts"  # with speculative decoding alone (0.32.0)

_TOOL_FLAG: Final = (
    "--enable-auto-tool-choice"  # in the refusal (renderers/online_renderer.py, 0.32)
)

_MAX_PAGE_BYTES: Final = 8 * 1024 * 1024
_SHOWN: Final = 1_024  # of an answer that is no engine's: enough to see what it is
_MAX_TOKENS_BYTES: Final = 32 * 1024 * 1024
_PATIENCE: Final = 3  # a whole answer may take so many times as long as its next bytes
_MOST_CONNECTIONS: Final = 256
_KEPT_S: Final = 4.0  # less than the 5 s after which an engine's server closes one that is idle
_PROGRESS: Final = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:kv_cache_usage_perc",
)
_JSON: Final = {"Content-Type": "application/json"}


class Answer(Struct, frozen=True):
    """A whole answer."""

    status: int
    body: bytes


class EngineFacts(Struct, frozen=True, kw_only=True):
    """What a replica reports about itself. None: it does not report it."""

    models: tuple[ServedModel, ...]
    version: str | None
    block_size: int | None
    num_gpu_blocks: int | None  # per rank
    num_cache_tokens: int | None = None  # per rank, all KV groups counted
    prefix_caching: bool | None
    hash_algorithm: str | None
    kv_dtype: str | None = None  # as its flag names it; `auto`: the model's own
    cache_shapes: frozenset[tuple[str, ...]] = frozenset()  # others: another process; empty: unsaid
    started_s: float | None  # unix seconds: another value means another process
    num_ranks: int
    event_sources: dict[int, EventSource]  # local rank -> publisher; empty: no events
    rank_numbers: tuple[int, ...] = ()  # global; empty: it does not say
    names_sources: bool = False  # it lists event sources, on or off: all its ranks are there
    has_pool_connector: bool = False  # it has Mooncake metrics; False: it has none, or no metrics
    sleep: SleepState = "awake"
    shows_pause: bool = False  # it has the route that says whether it is paused: it is in dev mode
    loads_kv: bool = False  # it has metrics of loading KV; False: it has none, or is too old
    speculates: bool = False  # it has metrics of speculative decoding; False: or no metrics

    @property
    def seems(self) -> Role | None:
        """The role that its metrics show; None: they do not.

        A connector that loads nothing is a producer's. What loads is a consumer's, or both's.
        Source: vllm/v1/metrics/loggers.py, 0.32.0.
        """
        if self.has_pool_connector and not self.loads_kv and is_at_least(self.version, V0_32):
            return "prefill"
        return None

    def endpoints(self, config: EventsConfig, replica: ReplicaConfig) -> dict[int, EventSource]:
        """Choose each rank's event endpoints: configured ones, else those the replica reports."""
        if not config.enabled:
            return {}
        if not replica.events:
            return self.event_sources
        replay = replica.replay or (None,) * len(replica.events)
        return {
            rank: EventSource(endpoint=endpoint, replay_endpoint=replay[rank], is_configured=True)
            for rank, endpoint in enumerate(replica.events)
        }

    def event_ports(self, name: str, config: EventsConfig, replica: ReplicaConfig) -> EventPorts:
        """Pair the endpoints that are used with those that the replica reports."""
        used, reported = (
            {rank: (each.endpoint, each.replay_endpoint) for rank, each in sources.items()}
            for sources in (self.endpoints(config, replica), self.event_sources)
        )
        return EventPorts.of(name, replica.url, used, reported)


class RankLoads(Struct, frozen=True, kw_only=True):
    """The load of each rank, as the replica reports it."""

    started_s: float | None
    num_running: dict[int, int]  # by local rank, as is the other
    num_waiting: dict[int, int]
    kv_usage: dict[int, float] = {}  # share of blocks that running requests use
    token_s: dict[int, float] = {}  # times between tokens since it started, summed
    num_tokens: dict[int, int] = {}  # how many
    figures: Figures | None = None  # of its work, all ranks together; None: it shows none
    sleep: SleepState | None  # None: not known: it did not say whether it is paused
    rank_numbers: tuple[int, ...] = ()  # global; empty: it does not say
    cache_shapes: frozenset[tuple[str, ...]] = frozenset()  # as of EngineFacts


class EngineApi:
    """Asks replicas about themselves. Use as an async context manager.

    By the data path's own HTTP session: a probe takes 0.1 to 0.4 ms of CPU, by httpx it took
    0.5 to 1.7, and 64 replicas are asked 70 times a second.
    """

    def __init__(
        self, *, timeout_s: float, tls: ssl.SSLContext | None = None, key: EngineKey = NO_KEY
    ) -> None:
        self._key = key
        self._timeout_s = timeout_s
        self._tls = tls if tls is not None else system_tls()
        self._session: Session | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(
            limit=_MOST_CONNECTIONS, keepalive_timeout=_KEPT_S, ssl=self._tls
        )
        self._session = Session(connector, connect_timeout_s=self._timeout_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def facts(self, replica: str, url: str) -> EngineFacts:
        """Find out everything about the replica at base URL `url`.

        Raises:
            UpstreamUnreachable, UpstreamTimeout: no answer.
            UpstreamBroken: it is not an OpenAI-compatible server; the message says why.
        """
        models = await self.models(replica, url)
        version = await self._optional(replica, url, "/version")
        sources = _event_sources(await self._optional(replica, url, "/kv_event_sources")) or {}
        metrics = await self._optional(replica, url, "/metrics")
        page = pages.Metrics(metrics) if metrics is not None else None
        info = page.cache_config() if page is not None else {}
        ranks = page.by_rank("vllm:num_requests_running") if page is not None else {}
        numbers = _numbers(sources, ranks)
        sleep = page.sleep() if page is not None else "awake"
        paused = await self._is_paused(replica, url)
        published = {
            numbers.index(rank): source
            for rank, source in sources.items()
            if source.enable_kv_cache_events and source.publisher in ("zmq", None)
        }
        return EngineFacts(
            models=models,
            version=pages.version(version) if version is not None else None,
            block_size=pages.block_size(info.get("block_size")),
            num_gpu_blocks=_of_one_rank(pages.num_blocks(info.get("num_gpu_blocks")), ranks),
            num_cache_tokens=pages.num_blocks(info.get("kv_cache_size_tokens")) or None,
            prefix_caching=pages.flag(info.get("enable_prefix_caching")),
            hash_algorithm=info.get("prefix_caching_hash_algo"),
            kv_dtype=info.get("cache_dtype"),
            cache_shapes=page.cache_shapes() if page is not None else frozenset(),
            started_s=page.started_s() if page is not None else None,
            num_ranks=max(len(numbers), 1),
            event_sources=published,
            rank_numbers=numbers,
            names_sources=bool(sources),
            has_pool_connector=page is not None and page.mentions(_POOL_METRIC),
            sleep="paused" if paused and sleep == "awake" else sleep,
            shows_pause=paused is not None,
            loads_kv=page is not None and page.mentions(_FETCH_METRIC),
            speculates=page is not None and page.mentions(_DRAFTS_METRIC),
        )

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
        sources = _event_sources(await self._optional(replica, url, "/kv_event_sources"))
        return list(sources.values()) if sources is not None else None

    async def server_info(self, replica: str, url: str, *, timeout_s: float) -> ServerInfo | None:
        """Ask an engine in dev mode about its configuration; nothing is known of any other.

        None: no answer in time, or it could not be asked. The first one takes 2 s of an idle
        machine, later ones 40 ms: whatever is asked for, the engine lists packages and devices, too
        (vLLM 0.32 entrypoints/serve/dev/server_info).
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
        self,
        replica: str,
        url: str,
        *,
        names_sources: bool = False,
        shows_pause: bool = False,
    ) -> RankLoads | None:
        """Read the load of the replica's ranks; None: it has no metrics.

        `names_sources`: it listed its event sources, and is asked for them again. Metrics go on
        showing ranks that were scaled away (vLLM 0.32 v1/engine/async_llm.py, elastic scaling).
        `shows_pause`: it said whether it is paused, and is asked for that again.
        """
        metrics = await self._optional(replica, url, "/metrics")
        if metrics is None:
            return None
        page = pages.Metrics(metrics)
        running = page.by_rank("vllm:num_requests_running")
        waiting = page.by_rank("vllm:num_requests_waiting")
        sources: dict[int, EventSource] | None = {}
        if names_sources:
            sources = _event_sources(await self._optional(replica, url, "/kv_event_sources"))
        sleep: SleepState | None = page.sleep()
        if shows_pause and sleep == "awake":  # one that sleeps is paused, too
            paused = await self._is_paused(replica, url)
            sleep = None if paused is None else "paused" if paused else "awake"
        place = {rank: index for index, rank in enumerate(_numbers({}, running))}
        return RankLoads(
            started_s=page.started_s(),
            num_running={place[rank]: running[rank] for rank in place},
            num_waiting={place[rank]: waiting[rank] for rank in place if rank in waiting},
            kv_usage=_at(place, page.sums_by_rank("vllm:kv_cache_usage_perc")),
            token_s=_at(place, page.sums_by_rank("vllm:inter_token_latency_seconds_sum")),
            num_tokens=_at(place, page.by_rank("vllm:inter_token_latency_seconds_count")),
            rank_numbers=_numbers(sources, running) if sources is not None else (),
            sleep=sleep,
            cache_shapes=page.cache_shapes(),
            figures=_figures(page, running, waiting),
        )

    async def tokenize(self, replica: str, url: str, body: bytes, *, timeout_s: float) -> list[int]:
        """Let the engine tokenize the request `body` (its `/tokenize` takes the same fields).

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
    ) -> Answer:
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

    async def _get(self, replica: str, url: str, path: str) -> Answer:
        return await self._send(
            replica,
            "GET",
            url + path,
            headers=self._key.headers(url),
            timeout_s=_PATIENCE * self._timeout_s,
            next_bytes_s=self._timeout_s,
        )

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
    ) -> Answer:
        """Get a whole answer: by a deadline, of a bounded size."""
        assert self._session is not None
        # Not compressed: a kilobyte may be a gigabyte.
        sent = CIMultiDict({"Accept-Encoding": "identity", **headers})
        try:
            async with asyncio.timeout(timeout_s):
                async with asyncio.timeout(next_bytes_s):
                    connection, _ = await self._session.connect(url)
                    response, first = await self._session.exchange(
                        connection, url, method, sent, body
                    )
                try:
                    rest = await _read(response, first, max_bytes, next_bytes_s)
                    return Answer(response.status, rest)
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


class _OddAnswer(ValueError):
    """An answer that is not read to its end; the message is ours."""


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


def _figures(
    page: pages.Metrics, running: Mapping[int, int], waiting: Mapping[int, int]
) -> Figures | None:
    """Read what shows that an engine works: tokens computed, and the cache in use.

    A long prompt counts when it has been computed; meanwhile it takes blocks. Source: vLLM 0.32
    v1/metrics/loggers.py, set after each step.
    """
    if not running:
        return None
    totals = [page.sums_by_rank(name) for name in _PROGRESS]
    progress = tuple(sum(ranks.values()) for ranks in totals)
    return Figures(num_requests=sum(running.values()) + sum(waiting.values()), progress=progress)


def _no_engine(url: str, answer: Answer) -> str:
    """Say what may be wrong with a base URL where something else than an engine answers."""
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


def _event_sources(body: bytes | None) -> dict[int, EventSource] | None:
    """Read the event sources; None: it has no such route, or another one of that name."""
    try:
        return pages.event_sources(body) if body is not None else None
    except ValueError:
        return None


def _numbers(sources: Mapping[int, EventSource], ranks: Mapping[int, int]) -> tuple[int, ...]:
    """List a replica's ranks, global numbers: those with event sources, else those with metrics."""
    return tuple(sorted(sources or ranks)[: pages.MAX_RANKS])


def _at(place: Mapping[int, int], values: Mapping[int, T]) -> dict[int, T]:
    """Number values by local rank."""
    return {place[rank]: value for rank, value in values.items() if rank in place}


def _of_one_rank(num_blocks: int | None, ranks: Mapping[int, int]) -> int | None:
    """Return the blocks of one rank: vLLM sums them over a server's ranks, in every line.

    Also over those that were scaled away, which metrics show, too (vLLM 0.32
    v1/engine/core_client.py `_apply_ready_response`).
    """
    return num_blocks // max(1, len(ranks)) if num_blocks is not None else None
