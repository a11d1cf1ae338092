"""What of a request reaches a replica: the body's bytes, the query, the session, for each API.

The replica is a server of ours that keeps what it is sent. Bodies are what clients may send and a
router that parses and writes them again may change: a `cache_salt` (dropped, it changes the block
hashes), a null content (dropped, it can change the template), a field of tomorrow, spaces.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from aiohttp import web
from msgspec import Struct

from loadtest.bench.setting import TINY_MODEL
from loadtest.peers.contestants import MODEL, Contestant
from loadtest.peers.front import in_front
from router.tls import system_tls

CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
_SESSION: Final = "peers-1"
_QUERY: Final = "?trace=1"

_quiet = logging.getLogger(__name__)  # some try HTTP/2 first, which is no error of theirs
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False

_BODIES: Final = {
    CHAT: b"""{"model": "tiny", "messages": [{"role": "user", "content": "list the files"},
 {"role": "assistant", "content": null, "tool_calls": [{"id": "a", "type": "function",
  "function": {"name": "ls", "arguments": "{}"}}]},
 {"role": "tool", "tool_call_id": "a", "content": "README.md"}],
 "cache_salt": "ours", "max_tokens": 4, "chat_template_kwargs": {"enable_thinking": false},
 "field_of_tomorrow": {"deep": [1, 2.50, null]}}""",
    MESSAGES: b"""{"model": "tiny", "max_tokens": 4, "cache_salt": "ours",
 "system": [{"type": "text", "text": "You are terse.", "cache_control": {"type": "ephemeral"}}],
 "messages": [{"role": "user", "content": "list the files"}], "field_of_tomorrow": 1}""",
    RESPONSES: b"""{"model": "tiny", "input": "list the files", "max_output_tokens": 4,
 "cache_salt": "ours", "store": false, "field_of_tomorrow": 1}""",
}

_ANSWERS: Final[dict[str, dict[str, Any]]] = {
    CHAT: {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"},
                     "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
    },
    MESSAGES: {
        "id": "msg_1", "type": "message", "role": "assistant", "model": MODEL,
        "content": [{"type": "text", "text": "ok"}], "stop_reason": "end_turn",
        "stop_sequence": None, "usage": {"input_tokens": 9, "output_tokens": 1},
    },
    RESPONSES: {
        "id": "resp_1", "object": "response", "created_at": 1, "model": MODEL,
        "status": "completed", "output": [], "parallel_tool_calls": True, "tool_choice": "auto",
        "tools": [], "temperature": 1.0, "top_p": 1.0, "truncation": "disabled",
        "usage": {"input_tokens": 9, "output_tokens": 1, "total_tokens": 10,
                  "input_tokens_details": {"cached_tokens": 0},
                  "output_tokens_details": {"reasoning_tokens": 0}},
    },
}  # fmt: skip


class Forwarded(Struct, frozen=True, kw_only=True):
    """What one contestant passed on; `apis` says for each API what became of its body."""

    name: str
    apis: dict[str, str]
    has_query: bool
    session: str  # what became of its header
    lost_fields: tuple[str, ...]  # of the chat body


class _Seen(Struct, frozen=True):
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


async def observe(contestant: Contestant, folder: Path, log_dir: Path) -> Forwarded:
    """Send each API's body through a contestant.

    Raises:
        ChildDied: it did not start.
    """
    seen: list[_Seen] = []
    apis: dict[str, str] = {}
    async with (
        _replica(seen) as url,
        in_front(contestant, [url], folder, log_dir) as front,
        httpx.AsyncClient(timeout=10.0, trust_env=False, verify=system_tls()) as client,
    ):
        for path, body in _BODIES.items():
            headers = {"Content-Type": "application/json", "X-Session-ID": _SESSION}
            answer = await client.post(f"{front.url}{path}{_QUERY}", content=body, headers=headers)
            arrived = [one for one in seen if one.path == path]
            if not arrived:
                apis[path] = f"refused ({answer.status_code})"
            else:
                apis[path] = "identical" if arrived[-1].body == body else "rewritten"
    chat = next((one for one in seen if one.path == CHAT), None)
    return Forwarded(
        name=contestant.name,
        apis=apis,
        has_query=chat is not None and chat.query == _QUERY[1:],
        session=_session(chat),
        lost_fields=() if chat is None else _lost(chat.body),
    )


def _session(chat: _Seen | None) -> str:
    found = None if chat is None else chat.headers.get("x-session-id")
    if found is None:
        return "no"
    return "as sent" if found == _SESSION else "as a digest"


def _lost(body: bytes) -> tuple[str, ...]:
    """Name what the chat body had and this one has not."""
    return tuple(
        name
        for name, mark in {
            "`cache_salt`": b'"cache_salt"',
            "null content": b'"content":null',
            "unknown fields": b'"field_of_tomorrow"',
            "template arguments": b'"enable_thinking"',
        }.items()
        if mark not in body.replace(b'": ', b'":')
    )


@asynccontextmanager
async def _replica(seen: list[_Seen]) -> AsyncIterator[str]:
    """Serve one replica that keeps what it is sent."""
    card = {"id": MODEL, "object": "model", "root": str(TINY_MODEL), "max_model_len": 65_536}
    pages = {
        "/v1/models": {"object": "list", "data": [card]},
        "/version": {"version": "0.32.0"},
        "/kv_event_sources": {"0": {"publisher": "null", "endpoint": "tcp://*:9"}},
    }

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            page = pages.get(request.path)
            return web.json_response(page) if page is not None else web.Response()
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen.append(_Seen(request.path, request.query_string, headers, body))
        if request.path.endswith("/render"):
            return web.json_response({"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]})
        return web.json_response(_ANSWERS.get(request.path, {}))

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app, access_log=None, logger=_quiet)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
