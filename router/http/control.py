"""Orders to engines: to all replicas that are named, and what each of them answered.

The public port does not pass on what controls an engine (router.api.routes). Here an order is named
from a list; most routes exist with VLLM_SERVER_DEV_MODE=1 only (entrypoints/serve/dev,
entrypoints/rl/online), an engine without them answers 404.

`sleep` (from level 1 on), `pause` and `reset_prefix_cache` with `reset_external` also empty the
Mooncake pool, for all replicas that share it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from router.base.errors import BadRequest, UnknownReplica, UpstreamError
from router.discovery.engine_api import EngineApi
from router.discovery.served_models import ServedModels
from router.discovery.sleep import Sleepers
from router.replicas.registry import Registry
from router.replicas.replica import Entry, Ordered

logger = logging.getLogger(__name__)

_TIMEOUT_S: Final = 60.0  # putting weights away takes its time
_MAX_SHOWN_BYTES: Final = 4096
_FALSE: Final = frozenset({"false", "0", "off", "no", "f", "n"})  # in a query, to the engine

QUESTIONS: Final = ("is_sleeping", "is_paused")
_ADAPTERS: Final = ("load_lora_adapter", "unload_lora_adapter")
_WEIGHTS: Final = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
ROUTES: Final = (
    *QUESTIONS,
    "reset_prefix_cache",
    "reset_mm_cache",
    "reset_encoder_cache",
    "release_kv_cache_memory",
    "sleep",
    "wake_up",
    "pause",
    "resume",
    "start_profile",
    "stop_profile",
    *_WEIGHTS,
    *_ADAPTERS,
)


def path_of(route: str) -> str:
    """Return where engines have a route."""
    return f"/v1/{route}" if route in _ADAPTERS else f"/{route}"


class EngineOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator sends; `replicas` None: all."""

    route: str
    params: dict[str, Any] = {}
    replicas: Annotated[list[str], Meta(min_length=1)] | None = None


class Control:
    """Passes orders on to engines."""

    def __init__(
        self, api: EngineApi, registry: Registry, models: ServedModels, sleepers: Sleepers
    ) -> None:
        self._api = api
        self._sleepers = sleepers
        self._models = models
        self._registry = registry

    async def follow(self, order: EngineOrder) -> dict[str, Any]:
        """Send an order to all that it names at once; what fails at one does not stop others.

        Raises:
            BadRequest, UnknownReplica: nothing was sent.
        """
        if order.route not in ROUTES:
            raise BadRequest(f"`route` must be one of {', '.join(ROUTES)}", param="route")
        entries = self._named(order.replicas)
        answers = await asyncio.gather(*(self._send(entry, order) for entry in entries))
        logger.warning(
            "order sent to engines",
            extra={
                "route": order.route,
                "replicas": {a["name"]: a["status"] or a["error"] for a in answers},
            },
        )
        return {"route": order.route, "replicas": answers}

    def _named(self, names: Sequence[str] | None) -> list[Entry]:
        entries = {entry.name: entry for entry in self._registry.entries}
        for name in names or ():
            if name not in entries:
                known = ", ".join(entries) or "none"
                raise UnknownReplica(f"no replica {name[:64]!r}; known: {known}")
        return [entries[name] for name in dict.fromkeys(entries if names is None else names)]

    async def _send(self, entry: Entry, order: EngineOrder) -> dict[str, Any]:
        route, params = order.route, order.params
        in_body = route in (*_ADAPTERS, *_WEIGHTS)
        answered: dict[str, Any] = {"name": entry.name, "status": None, "answer": None}
        try:
            answer = await self._api.order(
                entry.name,
                entry.replica.url.rstrip("/") + path_of(route),
                method="GET" if route in QUESTIONS else "POST",
                query={} if in_body else {k: _text(v) for k, v in params.items()},
                body=msgspec.json.encode(params) if in_body else None,
                timeout_s=_TIMEOUT_S,
            )
        except UpstreamError as error:
            return answered | {"error": error.message}
        if route in _ADAPTERS:
            with suppress(UpstreamError):
                await self._models.refresh(entry.name)
        if answer.status < 300:
            self._record(entry.name, route, params)
        return answered | {
            "status": answer.status,
            "answer": _shown(answer.body),
            "error": None if answer.status < 300 else f"answered {answer.status}",
        }

    def _record(self, name: str, route: str, params: Mapping[str, Any]) -> None:
        """Record a pause and its end at once; after an order to sleep, read the metrics now."""
        if route == "pause":
            is_lost = str(params.get("clear_cache", True)).lower() not in _FALSE
            self._sleepers.ordered(Ordered(name, "paused", is_lost), monotonic())
        elif route == "resume":
            self._sleepers.ordered(Ordered(name, "awake"), monotonic())
        elif route in ("sleep", "wake_up"):
            self._sleepers.ordered(Ordered(name, None), monotonic())


def _text(value: Any) -> str | list[str]:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, list) else str(value)


def _shown(body: bytes) -> Any:
    """Read an answer: JSON, else its text; None: it is empty."""
    if not body:
        return None
    try:
        return msgspec.json.decode(body[: _MAX_SHOWN_BYTES + 1])
    except (msgspec.DecodeError, RecursionError):
        return body[:_MAX_SHOWN_BYTES].decode(errors="replace")
