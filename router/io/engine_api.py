"""A replica's own HTTP API beside the data path: discovery, probes, load, tokenization.

Everything a replica tells about itself is optional: what is missing is None, and the router does
with less (a replica without `/kv_event_sources` is routed to approximately).
"""

from __future__ import annotations

import math
import re
import ssl
from typing import Any, Final, Self

import httpx
import msgspec
from msgspec import Struct

from router.engine_key import NO_KEY, EngineKey
from router.errors import BadRequest, UpstreamBroken, UpstreamTimeout, UpstreamUnreachable

NOT_JSON: Final = (msgspec.DecodeError, ValueError, RecursionError)
"""What decoding may raise: wrong shape, bytes that are no text, brackets without end."""

_POOL_METRIC: Final = "vllm:mooncake_store_"  # of the connector (0.32.0), and only where it is on

_LABELS: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class ServedModel(Struct, frozen=True):
    """One entry of `/v1/models`. An adapter's `parent` is its base model, `root` its path."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class EventSource(Struct, frozen=True):
    """Where one rank publishes its KV events (vLLM's KVEventsConfig, resolved)."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"  # "null": events are made and thrown away


class EngineFacts(Struct, frozen=True, kw_only=True):
    """What a replica says about itself. None: it does not say."""

    models: tuple[ServedModel, ...]
    version: str | None
    block_size: int | None
    num_gpu_blocks: int | None  # per rank
    prefix_caching: bool | None
    hash_algorithm: str | None
    started_s: float | None  # unix seconds: another value means another process
    num_ranks: int
    event_sources: dict[int, EventSource]  # rank -> publisher; empty: no events
    has_pool_connector: bool = False  # it has Mooncake metrics; False: or it does not say


class EngineLoad(Struct, frozen=True, kw_only=True):
    """How busy each rank says it is."""

    started_s: float | None
    num_running: dict[int, int]
    num_waiting: dict[int, int]


class _ModelList(Struct):
    data: list[ServedModel]


class _Tokenized(Struct):
    tokens: list[int]


class EngineApi:
    """Asks replicas about themselves. Use as an async context manager."""

    def __init__(
        self, *, timeout_s: float, ca_file: str | None = None, key: EngineKey = NO_KEY
    ) -> None:
        self._key = key
        self._client = httpx.AsyncClient(
            timeout=timeout_s,
            verify=ssl.create_default_context(cafile=ca_file) if ca_file is not None else True,
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
            UpstreamUnreachable, UpstreamTimeout: nobody there.
            UpstreamBroken: somebody, but not an OpenAI-compatible server; the message says why.
        """
        response = await self._get(replica, url, "/v1/models")
        if response.status_code in (401, 403):
            raise UpstreamBroken(
                replica,
                f"{url}/v1/models answered {response.status_code}: the engine has an --api-key; "
                "name its file in engine.api_key_file (of a replica that was added, also its host "
                "in engine.key_hosts)",
            )
        try:
            models = msgspec.json.decode(response.content, type=_ModelList).data
        except NOT_JSON as exc:
            raise UpstreamBroken(
                replica,
                f"{url}/v1/models answered {response.status_code} without a model list: "
                "not an OpenAI-compatible server?",
            ) from exc
        if not models:
            raise UpstreamBroken(replica, f"{url}/v1/models lists no model")
        version = await self._optional(replica, url, "/version")
        sources = await self._optional(replica, url, "/kv_event_sources")
        metrics = await self._optional(replica, url, "/metrics")
        info = _cache_config(metrics.text) if metrics is not None else {}
        ranks = _by_rank(metrics.text, "vllm:num_requests_running") if metrics is not None else {}
        published = _event_sources(sources)
        return EngineFacts(
            models=tuple(models),
            version=_version(version),
            block_size=_int(info.get("block_size")),
            num_gpu_blocks=_int(info.get("num_gpu_blocks")),
            prefix_caching=_bool(info.get("enable_prefix_caching")),
            hash_algorithm=info.get("prefix_caching_hash_algo"),
            started_s=_started(metrics.text) if metrics is not None else None,
            num_ranks=max(len(ranks), len(published), 1),
            event_sources=published,
            has_pool_connector=metrics is not None and _POOL_METRIC in metrics.text,
        )

    async def event_publishers(self, replica: str, url: str) -> list[EventSource] | None:
        """Read what it says of its ranks' events, those that are off among them.

        None: it has no such route, as older releases, or does not answer.
        """
        response = await self._optional(replica, url, "/kv_event_sources")
        if response is None:
            return None
        try:
            return list(msgspec.json.decode(response.content, type=dict[str, EventSource]).values())
        except NOT_JSON:
            return None

    async def ping(self, replica: str, url: str) -> None:
        """Probe `/health`.

        Raises:
            UpstreamError: unreachable, silent, or not healthy by its own word.
        """
        response = await self._get(replica, url, "/health")
        if response.status_code != 200:
            raise UpstreamBroken(replica, f"/health answered {response.status_code}")

    async def load(self, replica: str, url: str) -> EngineLoad | None:
        """Read how busy the replica says it is; None: it has no metrics."""
        metrics = await self._optional(replica, url, "/metrics")
        if metrics is None:
            return None
        text = metrics.text
        return EngineLoad(
            started_s=_started(text),
            num_running=_by_rank(text, "vllm:num_requests_running"),
            num_waiting=_by_rank(text, "vllm:num_requests_waiting"),
        )

    async def tokenize(self, replica: str, url: str, body: bytes, *, timeout_s: float) -> list[int]:
        """Let the engine tokenize the request `body` (its `/tokenize` takes the same fields).

        Raises:
            BadRequest: the engine says that the request is wrong.
            UpstreamError: it did not answer in time or not with tokens.
        """
        response = await self._send(
            replica,
            self._client.build_request(
                "POST",
                f"{url}/tokenize",
                content=body,
                headers={"Content-Type": "application/json", **self._key.headers(url)},
                timeout=timeout_s,
            ),
        )
        if response.status_code in (400, 422):
            raise BadRequest(f"the engine refused the prompt: {_message(response.content)}")
        try:
            return msgspec.json.decode(response.content, type=_Tokenized).tokens
        except NOT_JSON as exc:
            raise UpstreamBroken(
                replica, f"/tokenize answered {response.status_code} without tokens"
            ) from exc

    async def _get(self, replica: str, url: str, path: str) -> httpx.Response:
        headers = self._key.headers(url)
        return await self._send(
            replica, self._client.build_request("GET", url + path, headers=headers)
        )

    async def _optional(self, replica: str, url: str, path: str) -> httpx.Response | None:
        """Get what a replica may not have; None unless it answers 200."""
        try:
            response = await self._get(replica, url, path)
        except (UpstreamUnreachable, UpstreamTimeout, UpstreamBroken):
            return None
        return response if response.status_code == 200 else None

    async def _send(self, replica: str, request: httpx.Request) -> httpx.Response:
        try:
            return await self._client.send(request)
        except httpx.TimeoutException as exc:
            raise UpstreamTimeout(replica, f"{request.url} was silent") from exc
        except httpx.ConnectError as exc:
            raise UpstreamUnreachable(replica, f"{request.url} refused the connection") from exc
        except (httpx.HTTPError, AttributeError) as exc:
            # AttributeError: anyio asks a connection for its peer, which uvloop does not have any
            # more where it was cut in the moment it was made. Found by `make chaos`.
            raise UpstreamBroken(replica, f"{request.url}: {type(exc).__name__}") from exc


def _cache_config(text: str) -> dict[str, str]:
    """Read the labels of vllm:cache_config_info (rank 0 speaks for all)."""
    for line in _samples(text, "vllm:cache_config_info"):
        return dict(_LABELS.findall(line))
    return {}


def _by_rank(text: str, name: str) -> dict[int, int]:
    """Read a gauge with an `engine` label: rank -> value, summed over models."""
    ranks: dict[int, int] = {}
    for line in _samples(text, name):
        labels = dict(_LABELS.findall(line))
        rank = _int(labels.get("engine")) or 0
        ranks[rank] = ranks.get(rank, 0) + round(_value(line) or 0.0)
    return ranks


def _started(text: str) -> float | None:
    for line in _samples(text, "process_start_time_seconds"):
        return _value(line)
    return None


def _value(line: str) -> float | None:
    """Read a sample's value; None: it is no finite number."""
    try:
        value = float(line.rpartition(" ")[2])
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _samples(text: str, name: str) -> list[str]:
    """Find the lines of one metric. A full parse of an engine's page takes 20 ms of the loop."""
    lines = []
    start = 0
    while (at := text.find(f"\n{name}", start)) >= 0:
        end = text.find("\n", at + 1)
        line = text[at + 1 : end if end >= 0 else None]
        if line[len(name) : len(name) + 1] in ("{", " "):
            lines.append(line)
        start = at + 1
    return lines


def _event_sources(response: httpx.Response | None) -> dict[int, EventSource]:
    if response is None:
        return {}
    try:
        sources = msgspec.json.decode(response.content, type=dict[str, EventSource])
        return {
            int(rank): source
            for rank, source in sources.items()
            if source.enable_kv_cache_events and source.publisher in ("zmq", None)
        }
    except NOT_JSON:
        return {}


def _version(response: httpx.Response | None) -> str | None:
    try:
        version: Any = response.json().get("version") if response is not None else None
    except (*NOT_JSON, AttributeError):
        return None
    return version if isinstance(version, str) else None


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])[:500]
    except (*NOT_JSON, KeyError, TypeError):
        return "no reason given"


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _bool(text: str | None) -> bool | None:
    return {"True": True, "False": False}.get(text or "")
