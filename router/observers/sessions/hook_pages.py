"""The admin port's routes for agents' hooks: a session ends, is compacted, a sub-agent stops.

Claude Code and Codex send such bodies themselves, the plugin for OpenCode writes the same. Three
fields are read. Others (inputs of tools, summaries, paths) are skipped and kept nowhere.
Source: hooks of Claude Code 2.1.330 and Codex 0.169.0.

An agent must not be disturbed: the answer is 204 without a body, whatever the router knows of the
session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated, Final

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from router.base.errors import BadRequest, PayloadTooLarge
from router.http.admin_pages import Handler
from router.metrics import Metrics
from router.observers.sessions.hooks import Hooks
from router.observers.sessions.turn_notes import Hooked
from router.tenants import Tenants

_MAX_BYTES: Final = 1 << 19  # summaries and last messages are in it
_CHUNK_BYTES: Final = 1 << 16
_EXAMPLE: Final = '{"hook_event_name": "SessionEnd", "session_id": "ID"}'

_Id = Annotated[str, Meta(min_length=1, max_length=512)]


class _Hook(Struct, frozen=True):
    hook_event_name: Annotated[str, Meta(max_length=64)]
    session_id: _Id
    agent_id: _Id | None = None  # of a sub-agent


_decode = msgspec.json.Decoder(_Hook).decode


def _claude(hook: _Hook) -> str:
    """Name a session as router.api.sessions does."""
    return hook.session_id if hook.agent_id is None else f"{hook.session_id}\0{hook.agent_id}"


def _thread(hook: _Hook) -> str:
    """Name a session: a sub-agent has a session id of its own."""
    return hook.agent_id or hook.session_id


_NAMES: Final[Mapping[str, Callable[[_Hook], str]]] = {
    "claude": _claude,
    "codex": _thread,
    "opencode": _thread,
}


_EVENTS: Final[Mapping[str, Hooked]] = {
    "SessionEnd": "ended",
    "SubagentStop": "ended",
    "PreCompact": "compacting",
    "PostCompact": "compacted",
}


class HookPages:
    """Hooks of agents; `tenants` None: clients are not distinguished."""

    def __init__(self, hooks: Hooks, tenants: Tenants | None, metrics: Metrics) -> None:
        self._hooks = hooks
        self._tenants = tenants
        self._metrics = metrics

    def routes(self) -> Mapping[str, Handler]:
        return {f"POST /hooks/{agent}": partial(self._hook, agent) for agent in _NAMES}

    async def _hook(self, agent: str, request: web.Request) -> web.Response:
        owners = self._owners(request.query.get("tenant"))
        hook = _read(await _body(request))
        result = await self._apply(agent, hook, owners)
        self._metrics.hooks.labels(agent, result).inc()
        return web.Response(status=204)

    async def _apply(self, agent: str, hook: _Hook, owners: Iterable[str]) -> str:
        """Apply a hook; return what became of it."""
        what = _EVENTS.get(hook.hook_event_name)
        if what is None:
            return "ignored"
        if hook.hook_event_name == "SubagentStop" and hook.agent_id is None:
            raise BadRequest("a SubagentStop needs an agent_id", param="agent_id")
        name = hook.session_id if hook.hook_event_name == "SessionEnd" else _NAMES[agent](hook)
        return what if await self._hooks.apply(name, owners, what) else "unknown"

    def _owners(self, tenant: str | None) -> tuple[str, ...]:
        """List whose session it may be: anybody's, unless a tenant is named.

        Raises:
            BadRequest: there is no such tenant.
        """
        names = self._tenants.names if self._tenants is not None else ()
        if tenant is None:
            return ("", *(f"{name}\0" for name in names))
        if tenant not in names:
            raise BadRequest(f"unknown tenant {tenant[:64]!r}", param="tenant")
        return (f"{tenant}\0",)


def _read(body: bytes) -> _Hook:
    """Read a hook.

    Raises:
        BadRequest: it is none; the message says what one looks like.
    """
    try:
        return _decode(body)
    except (msgspec.DecodeError, RecursionError) as exc:
        why = "nested too deep" if isinstance(exc, RecursionError) else str(exc)
        raise BadRequest(f"send {_EXAMPLE}: {why}") from exc


async def _body(request: web.Request) -> bytes:
    """Read a bounded body.

    Raises:
        PayloadTooLarge: it is larger.
    """
    body = bytearray()
    async for chunk in request.content.iter_chunked(_CHUNK_BYTES):
        body += chunk
        if len(body) > _MAX_BYTES:
            raise PayloadTooLarge(f"a hook has at most {_MAX_BYTES:,} bytes")
    return bytes(body)
