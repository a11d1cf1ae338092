"""`POST /finish_session` on the public port: a client says that a session of its own is over.

Harnesses of reinforcement learning and evaluations call it when a rollout ends. The session is
named by `?session_id=`, by `session_id` in a JSON body, or by a header as in requests. An unknown
session is no error.

An ended session gives its place in the working set back at once, and its sub-agents' sessions do,
too. The next turn makes a session live again.

Source: vllm-project/router pull request 235 (query, shape of the answer), and its caller
PrimeIntellect-ai/prime-rl pull request 3563.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct

from router.api.sessions import MAX_ID_CHARS, SessionHeaders, engine_name, session_hash, session_of
from router.base.errors import BadRequest
from router.http.pages import Asked, OwnRoutes
from router.metrics import Metrics
from router.observers.sessions.session_ledger import Session, SessionLedger
from router.observers.sessions.turn_share import MAX_DIGESTS, Over
from router.replicas.fleet import Fleet

logger = logging.getLogger(__name__)

PATH: Final = "/finish_session"
_EXAMPLE: Final = '?session_id=ID, {"session_id": "ID"}, or the session\'s header'
_NOTE_BYTES: Final = 40


class _Body(Struct, frozen=True):
    session_id: str | None = None


_decode = msgspec.json.Decoder(_Body).decode


class FinishRoute:
    """Ends sessions of callers, here and at other routers; `read` has the headers that name one."""

    def __init__(
        self, ledger: SessionLedger, fleet: Fleet, read: SessionHeaders, metrics: Metrics
    ) -> None:
        self.tell: Callable[[Over, int], None] | None = None
        """Called with what other routers should know, and its size in bytes."""
        self._ledger = ledger
        self._fleet = fleet
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
        result = "ended" if self.finish(name, asked.caller.owner) else "unknown"
        self._metrics.finished_sessions.labels(result).inc()
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

    def finish(self, name: str, owner: str) -> bool:
        """End a session; False: it is not known here, but other routers may know it.

        Args:
            name: As its client names it.
            owner: Whose it is, as `session_hash` has it before a model: "" or `TENANT\\0`.
        """
        models = {model.id for replica in self._fleet.members.replicas for model in replica.models}
        digests = [session_hash(name, owner + model) for model in models]
        digests = [each for each in digests if self._fleet.conversations.last(each) is not None]
        note = Over(session_hash(name, owner), tuple(digests[:MAX_DIGESTS]))
        if self.tell is not None:
            self.tell(note, _NOTE_BYTES + 9 * len(note.sessions))
        return self.receive(note)

    def receive(self, note: Over) -> bool:
        """End a session as a note says; False: it is not known here."""
        sessions = list(self._ended(note.conversation))
        digests = {*note.sessions, *(each for session in sessions for each in session.routing)}
        if not sessions and not digests:
            return False
        for digest in digests:
            self._fleet.conversations.finish(digest)
        logger.info("session finished", extra={"session": engine_name(note.conversation)})
        self._fleet.members.changed()
        return True

    def _ended(self, key: int) -> Iterator[Session]:
        """End a session and all that it started, whatever its client said of who started whom."""
        seen, keys = {key}, [key]
        for each in keys:  # it grows
            session = self._ledger.ended(each)
            if session is not None:
                yield session
                keys += [child for child in session.children if child not in seen]
                seen.update(session.children)


def _in_body(body: bytes | None) -> str | None:
    if not body:
        return None
    try:
        return _decode(body).session_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadRequest(f"send {_EXAMPLE}; the body is no such object") from exc
