"""Orders to engines: to all replicas that are named, and what each of them answered.

The public port does not pass on what controls an engine (router.api.routes). Here an order is named
from a list, with the parameters that vLLM 0.32 knows; most routes exist with VLLM_SERVER_DEV_MODE=1
only (entrypoints/serve/dev, entrypoints/rl/online), an engine without them answers 404.

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
from router.replicas.entry import Entry
from router.replicas.registry import Registry

logger = logging.getLogger(__name__)

_TIMEOUT_S: Final = 60.0  # putting weights away takes its time
_MAX_SHOWN_BYTES: Final = 4096
_FALSE: Final = frozenset({"false", "0", "off", "no", "f", "n"})  # in a query, to the engine


class _Command(Struct, frozen=True):
    path: str
    params: tuple[str, ...] = ()
    method: str = "POST"
    in_body: bool = False
    changes_models: bool = False


COMMANDS: Final = {
    "reset_prefix_cache": _Command(
        "/reset_prefix_cache", ("reset_running_requests", "reset_external")
    ),
    "reset_mm_cache": _Command("/reset_mm_cache"),
    "reset_encoder_cache": _Command("/reset_encoder_cache"),
    "release_kv_cache_memory": _Command("/release_kv_cache_memory"),
    "sleep": _Command("/sleep", ("level", "mode")),
    "wake_up": _Command("/wake_up", ("tags",)),
    "is_sleeping": _Command("/is_sleeping", method="GET"),
    "pause": _Command("/pause", ("mode", "clear_cache")),
    "resume": _Command("/resume"),
    "is_paused": _Command("/is_paused", method="GET"),
    "start_profile": _Command("/start_profile"),
    "stop_profile": _Command("/stop_profile"),
    "load_lora_adapter": _Command(
        "/v1/load_lora_adapter",
        ("lora_name", "lora_path", "load_inplace"),
        in_body=True,
        changes_models=True,
    ),
    "unload_lora_adapter": _Command(
        "/v1/unload_lora_adapter", ("lora_name",), in_body=True, changes_models=True
    ),
}

_Value = str | int | float | bool | list[str]


class EngineOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator sends; `replicas` None: all."""

    route: str
    params: dict[str, _Value] = {}
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
        command = COMMANDS.get(order.route)
        if command is None:
            raise BadRequest(f"`route` must be one of {', '.join(COMMANDS)}", param="route")
        for name in order.params:
            if name not in command.params:
                known = ", ".join(command.params) or "none"
                raise BadRequest(
                    f"{order.route} has no parameter {name[:64]!r}; it accepts: {known}",
                    param=f"params.{name[:64]}",
                )
        entries = self._named(order.replicas)
        answers = await asyncio.gather(
            *(self._send(entry, command, order.params) for entry in entries)
        )
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
        if names is None:
            return list(entries.values())
        for name in names:
            if name not in entries:
                known = ", ".join(entries) or "none"
                raise UnknownReplica(f"no replica {name[:64]!r}; known: {known}")
        return [entries[name] for name in dict.fromkeys(names)]

    async def _send(
        self, entry: Entry, command: _Command, params: Mapping[str, _Value]
    ) -> dict[str, Any]:
        answered: dict[str, Any] = {"name": entry.name, "status": None, "answer": None}
        try:
            answer = await self._api.order(
                entry.name,
                entry.replica.url.rstrip("/") + command.path,
                method=command.method,
                query={} if command.in_body else {k: _text(v) for k, v in params.items()},
                body=msgspec.json.encode(params) if command.in_body else None,
                timeout_s=_TIMEOUT_S,
            )
        except UpstreamError as error:
            return answered | {"error": error.message}
        if command.changes_models:
            with suppress(UpstreamError):
                await self._models.refresh(entry.name)
        if answer.status < 300:
            self._note(entry.name, command, params)
        return answered | {
            "status": answer.status,
            "answer": _shown(answer.body),
            "error": None if answer.status < 300 else f"answered {answer.status}",
        }

    def _note(self, name: str, command: _Command, params: Mapping[str, _Value]) -> None:
        """Record a pause and its end at once; after an order to sleep, read the metrics now."""
        if command.path == "/pause":
            is_lost = str(params.get("clear_cache", True)).lower() not in _FALSE
            self._sleepers.ordered(name, "paused", monotonic(), is_lost=is_lost)
        elif command.path == "/resume":
            self._sleepers.ordered(name, "awake", monotonic())
        elif command.path in ("/sleep", "/wake_up"):
            self._sleepers.look(name)


def _text(value: _Value) -> str | list[str]:
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
