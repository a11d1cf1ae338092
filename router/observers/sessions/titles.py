"""Sessions by their clients' own ids, for an operator who allows it (`session.show_ids`).

An id is read again from a request, once a session, and kept if its digest is the session's. Only
the admin port shows it. It is in no log, record or metric, and no other router gets it.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from router.api.sessions import SessionHeaders, session_hash, session_of
from router.observers.sessions.session_ledger import Session
from router.request.results import Inbound, Read

MAX_CHARS: Final = 80
_MAX_BYTES: Final = 1 << 20  # of a body that is parsed once more: 3 ms


class SessionTitles:
    """Finds what clients call their sessions; `read` has the headers that may say it."""

    def __init__(self, read: SessionHeaders) -> None:
        self._headers = read

    def note(self, session: Session | None, read: Read) -> None:
        """Keep the id of a session that has none yet."""
        if session is None or session.title is not None or not read.whose.is_named:
            return
        found = self._in_headers(session, read.inbound) or self._in_body(session, read.inbound)
        session.title = _shown(found) if found is not None else ""

    def _in_headers(self, session: Session, inbound: Inbound) -> str | None:
        return self._named(session, inbound, None)

    def _in_body(self, session: Session, inbound: Inbound) -> str | None:
        if inbound.body is None or len(inbound.body) > _MAX_BYTES:
            return None
        try:
            body = orjson.loads(inbound.body)
        except orjson.JSONDecodeError:
            return None
        return self._named(session, inbound, body) if isinstance(body, dict) else None

    def _named(self, session: Session, inbound: Inbound, body: dict[str, Any] | None) -> str | None:
        """Return the id if it is this session's."""
        found = session_of(inbound.headers, body, self._headers, inbound.path)
        if found is None or not found.is_named:
            return None
        is_it = session_hash(found.name, inbound.caller.owner) == session.key
        return found.name if is_it else None


def _shown(name: str) -> str:
    """Write an id in one line; a sub-agent's has a slash in front of its own part."""
    text = "".join(sign if sign.isprintable() else "?" for sign in name.replace("\0", "/"))
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 1]}…"
