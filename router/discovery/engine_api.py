"""A replica's own HTTP API beside the data path: discovery, probes, load, tokenization.

Everything a replica reports about itself is optional: what is missing is None, and the router does
without (a replica without `/kv_event_sources` is routed to approximately).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Final, Self

import httpx
from msgspec import Struct

from router.config import EventsConfig, ReplicaConfig
from router.discovery import engine_pages as pages
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
from router.replicas.engine_key import NO_KEY, EngineKey
from router.replicas.replica import ServedModel
from router.shortage import shortage
from router.tls import refusal as tls_refusal
from router.tls import system_tls

_POOL_METRIC: Final = "vllm:mooncake_store_"  # of the connector (0.32.0), and only where it is on

_MAX_PAGE_BYTES: Final = 8 * 1024 * 1024
_MAX_TOKENS_BYTES: Final = 32 * 1024 * 1024
_PATIENCE: Final = 3  # a whole answer may take so many times as long as its next bytes


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
    prefix_caching: bool | None
    hash_algorithm: str | None
    started_s: float | None  # unix seconds: another value means another process
    num_ranks: int
    event_sources: dict[int, EventSource]  # rank -> publisher; empty: no events
    has_pool_connector: bool = False  # it has Mooncake metrics; False: it has none, or no metrics

    def endpoints(self, config: EventsConfig, replica: ReplicaConfig) -> dict[int, EventSource]:
        """Choose each rank's event endpoints: configured ones, else those the replica reports."""
        if not config.enabled:
            return {}
        if not replica.events:
            return self.event_sources
        replay = replica.replay or (None,) * len(replica.events)
        return {
            rank: EventSource(endpoint=endpoint, replay_endpoint=replay[rank])
            for rank, endpoint in enumerate(replica.events)
        }


class RankLoads(Struct, frozen=True, kw_only=True):
    """The load of each rank, as the replica reports it."""

    started_s: float | None
    num_running: dict[int, int]
    num_waiting: dict[int, int]


class EngineApi:
    """Asks replicas about themselves. Use as an async context manager."""

    def __init__(
        self, *, timeout_s: float, tls: ssl.SSLContext | None = None, key: EngineKey = NO_KEY
    ) -> None:
        self._key = key
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"},  # a kilobyte may be a gigabyte
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # none is kept
            timeout=timeout_s,
            verify=tls if tls is not None else system_tls(),
            trust_env=False,
            limits=httpx.Limits(max_connections=256, keepalive_expiry=4.0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def facts(self, replica: str, url: str) -> EngineFacts:
        """Find out everything about the replica at base URL `url`.

        Raises:
            UpstreamUnreachable, UpstreamTimeout: no answer.
            UpstreamBroken: it is not an OpenAI-compatible server; the message says why.
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
                f"not an OpenAI-compatible server? ({exc})",
            ) from exc
        if not models:
            raise UpstreamBroken(replica, f"{url}/v1/models lists no model")
        version = await self._optional(replica, url, "/version")
        sources = await self._optional(replica, url, "/kv_event_sources")
        metrics = await self._optional(replica, url, "/metrics")
        page = pages.Metrics(metrics) if metrics is not None else None
        info = page.cache_config() if page is not None else {}
        ranks = page.by_rank("vllm:num_requests_running") if page is not None else {}
        published = {
            rank: source
            for rank, source in (_event_sources(sources) or {}).items()
            if source.enable_kv_cache_events and source.publisher in ("zmq", None)
        }
        return EngineFacts(
            models=models,
            version=pages.version(version) if version is not None else None,
            block_size=pages.block_size(info.get("block_size")),
            num_gpu_blocks=pages.num_blocks(info.get("num_gpu_blocks")),
            prefix_caching=pages.flag(info.get("enable_prefix_caching")),
            hash_algorithm=info.get("prefix_caching_hash_algo"),
            started_s=page.started_s() if page is not None else None,
            num_ranks=max(len(ranks), len(published), 1),
            event_sources=published,
            has_pool_connector=page is not None and page.mentions(_POOL_METRIC),
        )

    async def event_publishers(self, replica: str, url: str) -> list[EventSource] | None:
        """Read the event sources of its ranks, those that are off included.

        None: it has no such route, as older releases, or does not answer.
        """
        sources = _event_sources(await self._optional(replica, url, "/kv_event_sources"))
        return list(sources.values()) if sources is not None else None

    async def ping(self, replica: str, url: str) -> None:
        """Probe `/health`.

        Raises:
            UpstreamError: unreachable, silent, or not healthy by its own word.
        """
        answer = await self._get(replica, url, "/health")
        if answer.status != 200:
            raise UpstreamBroken(replica, f"/health answered {answer.status}")

    async def load(self, replica: str, url: str) -> RankLoads | None:
        """Read the load of the replica's ranks; None: it has no metrics."""
        metrics = await self._optional(replica, url, "/metrics")
        if metrics is None:
            return None
        page = pages.Metrics(metrics)
        return RankLoads(
            started_s=page.started_s(),
            num_running=page.by_rank("vllm:num_requests_running"),
            num_waiting=page.by_rank("vllm:num_requests_waiting"),
        )

    async def tokenize(self, replica: str, url: str, body: bytes, *, timeout_s: float) -> list[int]:
        """Let the engine tokenize the request `body` (its `/tokenize` takes the same fields).

        Raises:
            BadRequest: the engine says that the request is wrong.
            UpstreamError: it did not answer in time or not with tokens.
        """
        answer = await self._send(
            replica,
            self._client.build_request(
                "POST",
                f"{url}/tokenize",
                content=body,
                headers={"Content-Type": "application/json", **self._key.headers(url)},
                timeout=timeout_s,
            ),
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

    async def chat_ids(
        self, replica: str, url: str, body: Mapping[str, Any], *, timeout_s: float
    ) -> list[int]:
        """Let the engine render the chat `body`: by its render route, else for one token.

        Raises:
            UpstreamError: it did not answer in time or not with tokens.
        """
        one_token = {**body, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        for path in ("/v1/chat/completions/render", "/v1/chat/completions"):
            request = self._client.build_request(
                "POST",
                url + path,
                json=one_token,
                headers=self._key.headers(url),
                timeout=timeout_s,
            )
            answer = await self._send(replica, request, timeout_s=timeout_s)
            if answer.status == 200:
                try:
                    return pages.prompt_ids(answer.body)
                except ValueError as exc:
                    raise UpstreamBroken(replica, f"{path} answered without tokens") from exc
        raise UpstreamBroken(replica, f"{path} answered {answer.status}")

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
        request = self._client.build_request(
            method,
            url,
            params=dict(query),
            content=body,
            headers={"Content-Type": "application/json", **self._key.headers(url)},
            timeout=timeout_s,
        )
        return await self._send(replica, request, timeout_s=timeout_s)

    async def _get(self, replica: str, url: str, path: str) -> Answer:
        request = self._client.build_request("GET", url + path, headers=self._key.headers(url))
        return await self._send(replica, request, timeout_s=_PATIENCE * self._timeout_s)

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
        request: httpx.Request,
        *,
        timeout_s: float,
        max_bytes: int = _MAX_PAGE_BYTES,
    ) -> Answer:
        """Get a whole answer: by a deadline, of a bounded size."""
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.send(request, stream=True)
                try:
                    return Answer(response.status_code, await _read(response, max_bytes))
                finally:
                    await response.aclose()
        except (httpx.TimeoutException, TimeoutError) as exc:
            raise UpstreamTimeout(replica, f"{request.url} was silent") from exc
        except httpx.ConnectError as exc:
            if (short_of := shortage(exc)) is not None:
                raise NotAsked(replica, f"{request.url} was not asked: {short_of}") from exc
            if (why := tls_refusal(exc)) is not None:
                raise TlsRefused(replica, f"{request.url}: {why}") from exc
            raise UpstreamUnreachable(replica, f"{request.url} refused the connection") from exc
        except (httpx.HTTPError, httpx.StreamError, AttributeError, ValueError) as exc:
            # AttributeError: anyio asks a connection for its peer, which uvloop does not have any
            # more where it was cut in the moment it was made. Found by `make chaos`.
            reason = str(exc) if isinstance(exc, _OddAnswer) else type(exc).__name__
            reason = tls_refusal(exc) or reason
            raise UpstreamBroken(replica, f"{request.url}: {reason}") from exc


class _OddAnswer(ValueError):
    """An answer that is not read to its end; the message is ours."""


async def _read(response: httpx.Response, max_bytes: int) -> bytes:
    """Read a body as it comes.

    Raises:
        _OddAnswer: it is compressed, or larger than it may be.
    """
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _OddAnswer("answered compressed, which was not asked for")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > max_bytes:
            raise _OddAnswer(f"answered more than {max_bytes} bytes")
    return bytes(body)


def _event_sources(body: bytes | None) -> dict[int, EventSource] | None:
    """Read the event sources; None: it has no such route, or another one of that name."""
    try:
        return pages.event_sources(body) if body is not None else None
    except ValueError:
        return None
