"""The admin port's pages about sessions: what they cost, and why tokens were computed."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web

from router.api.sessions import NAME_CHARS, session_hash
from router.base.errors import BadRequest, UnknownSession
from router.http.admin import Handler, json_answer, number_in
from router.observers.sessions.bookkeeper import Findings, SessionNames
from router.observers.sessions.describe import (
    COLUMNS,
    GROUPS,
    SUM_COLUMNS,
    as_row,
    session_fields,
    sum_rows,
    turn_fields,
)
from router.observers.sessions.session_ledger import Session, SessionLedger
from router.records.record import CAUSES, reasons
from router.request.queue import WaitingRoom
from router.tenants import Tenants

_MAX_LIMIT: Final = 20_000
_SLICE: Final = 100
_FORMATS: Final = ("json", "csv")
_ORDERS: Final[dict[str, Callable[[Session], Any]]] = {
    "recent": lambda session: session.last,
    "cost": lambda session: session.totals.spent,
    "computed": lambda session: session.totals.num_tokens - session.totals.num_gpu,
    "turns": lambda session: session.totals.num_turns,
}


class SessionPages:
    """The sessions' ledger."""

    def __init__(
        self,
        ledger: SessionLedger,
        findings: Findings,
        names: SessionNames,
        tenants: Tenants | None,
        room: WaitingRoom,
    ) -> None:
        self._ledger = ledger
        self._room = room
        self._findings = findings
        self._names = names
        self._tenants = tenants

    def routes(self) -> Mapping[str, Handler]:
        return {
            "GET /admin/sessions": self._sessions,
            "GET /admin/sessions/{session}": self._session,
            "GET /admin/requests/{request}": self._request,
            "GET /admin/findings": self._list_findings,
        }

    async def _sessions(self, request: web.Request) -> web.Response:
        query = request.query
        if (group := _named(query, "by", "session", ("session", *GROUPS))) != "session":
            return self._grouped(query, group)
        order = _named(query, "order", "recent", _ORDERS)
        limit = number_in(query, "limit", 100, most=_MAX_LIMIT)
        kind = _named(query, "format", "json", _FORMATS)
        wanted = query.get("tenant")
        chosen, total = await self._chosen(wanted, _ORDERS[order], limit)
        if kind == "csv":
            lines = [_row(session_fields(each), COLUMNS) async for each in _in_slices(chosen)]
            return web.Response(text=_header(COLUMNS) + "".join(lines), content_type="text/csv")
        rows = [_encode(session_fields(each)) async for each in _in_slices(chosen)]
        return json_answer(
            {
                "sessions": rows,
                "total": total,
                "forgotten": self._ledger.num_forgotten,
            }
        )

    def _grouped(self, query: Mapping[str, str], group: str) -> web.Response:
        """Sum the turns of all sessions, forgotten ones, too."""
        rows = sum_rows(self._ledger, group)
        if _named(query, "format", "json", _FORMATS) == "csv":
            header = _header((group, *SUM_COLUMNS[1:]))
            lines = [_row(row, SUM_COLUMNS) for row in rows]
            return web.Response(text=header + "".join(lines), content_type="text/csv")
        return json_answer({"by": group, "rows": rows})

    async def _chosen(
        self, tenant: str | None, order: Callable[[Session], float], limit: int
    ) -> tuple[list[Session], int]:
        """Find the first sessions in an order, and count all; the loop goes on meanwhile."""
        found: list[Session] = []
        values: list[float] = []
        async for each in _in_slices(list(self._ledger)):
            if tenant is None or each.tenant == tenant:
                found.append(each)
                values.append(order(each))
        first = sorted(range(len(found)), key=values.__getitem__, reverse=True)[:limit]
        return [found[i] for i in first], len(found)

    async def _session(self, request: web.Request) -> web.Response:
        name, tenant = request.match_info["session"], request.query.get("tenant")
        keys = set(self._keys(name, tenant))
        session = self._found(name, tenant)
        if session is not None:
            keys = {session.key}
        waits = [
            self._room.describe(waiting)
            for waiting, prompt in self._room
            if (prompt.read.request_id == name or prompt.read.whose.conversation in keys)
            and tenant in (None, prompt.read.inbound.caller.name)
        ]
        if session is not None:
            return json_answer({**self._whole(session), "waits": waits})
        if waits:  # its first turn
            return json_answer({"waits": waits})
        raise UnknownSession(
            f"no session {name[:64]!r} is known; GET /admin/sessions lists those that are"
        )

    async def _request(self, request: web.Request) -> web.Response:
        name = request.match_info["request"]
        session = self._ledger.of_request(name)
        turns = session.turns if session is not None else []
        turn = next((each for each in turns if each.request_id == name), None)
        if session is None or turn is None:
            raise UnknownSession(f"no recent request {name[:64]!r} of a session is known")
        return json_answer({"session": session_fields(session), "turn": turn_fields(turn)})

    async def _list_findings(self, _: web.Request) -> web.Response:
        unnamed = self._names.found
        found = [unnamed.row] if unnamed is not None else []
        found += [{**msgspec.to_builtins(each), "text": each.text} for each in self._findings]
        return json_answer({"findings": found})

    def _whole(self, session: Session) -> dict[str, Any]:
        turns = session.turns
        own = (found for found in self._findings if found.tenant == session.tenant)
        signs = {found.part: found.what for found in own}
        return {
            **session_fields(session),
            "reasons": reasons([turn.computed for turn in turns], signs),
            "turns_shown": [turn_fields(turn) for turn in turns],
            "children": [session_fields(each) for each in self._children(session)],
        }

    def _children(self, session: Session) -> list[Session]:
        found = [self._ledger.get(key) for key in session.children]
        return [each for each in found if each is not None]

    def _found(self, name: str, tenant: str | None) -> Session | None:
        """Find a session by our name for it, by its client's, or by one of its requests."""
        for key in self._keys(name, tenant):
            session = self._ledger.get(key)
            if session is not None and tenant in (None, session.tenant):
                return session
        session = self._ledger.of_request(name)
        is_asked = session is not None and tenant in (None, session.tenant)
        return session if is_asked else None

    def _keys(self, name: str, tenant: str | None) -> Iterator[int]:
        if len(name) == NAME_CHARS:
            try:
                yield int(name, 16)
            except ValueError:
                pass
        if "/" in name:  # a sub-agent, as its title is written
            yield from self._keys(name.replace("/", "\0", 1), tenant)
        if tenant is None:
            yield session_hash(name, "")
        known = self._tenants.names if self._tenants is not None else ()
        for each in known:
            if tenant in (None, each):
                yield session_hash(name, f"{each}\0")


async def _in_slices(sessions: list[Session]) -> AsyncIterator[Session]:
    """Yield sessions, with a pause for others every few milliseconds."""
    for number, session in enumerate(sessions):
        if number % _SLICE == 0:
            await asyncio.sleep(0)
        yield session


def _encode(fields: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(fields))


def _row(fields: dict[str, Any], columns: tuple[str, ...]) -> str:
    return _csv(as_row(fields, columns, _CAUSES))


def _header(columns: tuple[str, ...]) -> str:
    return _csv((*columns, *(f"cause_{cause}" for cause in _CAUSES)))


def _csv(cells: Iterable[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


_CAUSES: Final = ("cached", *CAUSES)


def _named(query: Mapping[str, str], name: str, default: str, known: Any) -> str:
    value = query.get(name, default)
    if value not in known:
        raise BadRequest(f"{name} must be one of: {', '.join(known)}", param=name)
    return value
