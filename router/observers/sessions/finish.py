"""`POST /finish_session` on the public port: a client says that a session of its own is over.

Harnesses of reinforcement learning and evaluations call it when a rollout ends. The session is
named by `?session_id=`, by `session_id` in a JSON body, or by a header as in requests. An unknown
session is no error.

Source: vllm-project/router pull request 235 (query, shape of the answer), and its caller
PrimeIntellect-ai/prime-rl pull request 3563.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from router.api.sessions import MAX_ID_CHARS, SessionHeaders, session_of
from router.base.errors import BadRequest
from router.http.own_routes import Asked, OwnRoutes
from router.metrics import Metrics
from router.observers.sessions.hooks import Hooks

PATH: Final = "/finish_session"
_EXAMPLE: Final = '?session_id=ID, {"session_id": "ID"}, or the session\'s header'


class _Body(Struct, frozen=True):
    session_id: str | None = None


_decode = msgspec.json.Decoder(_Body).decode


class FinishRoute:
    """Ends sessions of callers; `read` has the headers that may name one."""

    def __init__(self, hooks: Hooks, read: SessionHeaders, metrics: Metrics) -> None:
        self._hooks = hooks
        self._read = read
        self._metrics = metrics

    def routes(self) -> OwnRoutes:
        return {PATH: self._finish}

    async def _finish(self, asked: Asked) -> dict[str, Any]:
        """End a session here and at the other routers.

        Raises:
            BadRequest: no session is named.
        """
        name = self._named(asked)
        owners = (asked.caller.owner,)
        is_known = await self._hooks.apply(name, owners, "ended", tells_unknown=True)
        result = "ended" if is_known else "unknown"
        self._metrics.hooks.labels("finish_session", result).inc()
        return {"status": "ok", "session_id": name}

    def _named(self, asked: Asked) -> str:
        """Find the session that is meant, as its requests named it."""
        name = asked.query.get("session_id") or _in_body(asked.body)
        if not name:
            session = session_of(asked.headers, None, self._read, PATH)
            name = session.name if session is not None else None
        if not name:
            raise BadRequest(f"name a session: {_EXAMPLE}", param="session_id")
        if len(name) > MAX_ID_CHARS:
            message = f"a session id has at most {MAX_ID_CHARS:,} characters"
            raise BadRequest(message, param="session_id")
        return name


def _in_body(body: bytes | None) -> str | None:
    if not body:
        return None
    try:
        return _decode(body).session_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(f"send {_EXAMPLE}; the body is no such object") from exc
