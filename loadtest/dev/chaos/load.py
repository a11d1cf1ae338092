"""Agents in closed loops over both routers, and hostile clients among them.

An agent has two base URLs. If a connection is refused it uses the other one, as a client with a
list of servers does. Nothing else is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import aiohttp
import orjson
from msgspec import Struct
from yarl import URL

from loadtest import agent_text
from loadtest.agents import Profile, Session, plan_session
from loadtest.dev.chaos.answers import (
    Api,
    Expected,
    Oracle,
    difference,
    is_beginning,
    is_error,
    read_stream,
    read_whole,
)
from loadtest.dev.chaos.ledger import Ledger, Seen
from loadtest.dev.chaos.plan import ROUTERS
from loadtest.dev.chaos.stack import BODY_BYTES, Stack

PATIENCE_S: Final = 45.0
_LEAVES: Final = 0.04  # share of requests whose client does not wait
_HAVE_TOOLS: Final = 0.4  # share of sessions
_HOSTILE: Final = 0.06  # share of turns before which something hostile is sent
_NUM_LARGE: Final = 6
_REFUSED_PAUSE_S: Final = 0.2
_PROFILE: Final = Profile(
    num_turns=8,
    scale_tokens=0.05,
    scale_time=0.03,
    sub_agent_share=0.0,
    output_sigma=0.5,
    num_output_tokens=400,
    tool_wait_s=5.2,
)

_PATHS: Final[Mapping[Api, str]] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}


class Request(Struct, kw_only=True):
    """What is sent. `expected` None: nothing but an error may be the answer."""

    id: str
    kind: str
    path: str
    api: str
    body: bytes
    expected: Expected | None = None
    streams: bool = False
    wants_usage: bool = False
    headers: dict[str, str] = {}
    patience_s: float = PATIENCE_S
    allowed: tuple[int, ...] = ()  # statuses that are right for a hostile request


class Load:
    """All clients of a run; use as a context."""

    def __init__(self, stack: Stack, ledger: Ledger, oracle: Oracle, seed: int) -> None:
        self._stack = stack
        self._ledger = ledger
        self._oracle = oracle
        self._seed = seed
        self._num_requests = 0
        self._num_sessions = 0
        system, self._tools = agent_text.preamble(
            _PROFILE.tokens(_PROFILE.num_shared_tokens), variant="chaos"
        )
        self._system = {"role": "system", "content": system}
        self._client: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def run(self, num_agents: int, until: Callable[[], bool]) -> None:
        """Run agents; each ends after the request it is in once `until` is true."""
        async with asyncio.TaskGroup() as tg:
            for number in range(num_agents):
                tg.create_task(self._work(number, until))

    async def send_large(self, router: str) -> None:
        """Send several bodies just below the limit at once."""
        text = "word " * ((BODY_BYTES - 4096) // 5)
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        async with asyncio.TaskGroup() as tg:
            for _ in range(_NUM_LARGE):
                request = Request(
                    id=self._new_id(),
                    kind="large body",
                    path=_PATHS["chat"],
                    api="chat",
                    body=orjson.dumps(body),
                    allowed=(400, 413, 429, 503),
                )
                tg.create_task(self._send(router, request))

    def _new_id(self) -> str:
        self._num_requests += 1
        return f"chaos-{self._seed}-{self._num_requests}"

    # ---------------------------------------------------------------- an agent

    async def _work(self, number: int, until: Callable[[], bool]) -> None:
        dice = random.Random(f"chaos/{self._seed}/agent {number}")
        await asyncio.sleep(dice.random())
        while not until():
            await self._converse(dice, until)

    async def _converse(self, dice: random.Random, until: Callable[[], bool]) -> None:
        """Run one session to its end; a failed turn goes on with the right answer."""
        index = self._num_sessions
        self._num_sessions += 1
        session = Session(
            _PROFILE, f"s{index}", plan_session(_PROFILE, index), [self._system], self._tools, None
        )
        router = dice.choice(ROUTERS)
        has_tools = dice.random() < _HAVE_TOOLS
        while (turn := session.next_turn()) is not None and not until():
            await asyncio.sleep(0.0 if not turn.number else min(turn.wait_s, 2.0))
            if dice.random() < _HOSTILE:
                await self._send(dice.choice(ROUTERS), self._hostile(dice))
            if dice.random() < 0.1:
                router = _other(router)
            if not has_tools:
                del turn.body["tools"]
            request = self._shaped(turn.body, dice)
            request.headers["X-Session-ID"] = session.id
            await self._send_somewhere(router, request)
            assert request.expected is not None
            session.advance(request.expected.texts[0])

    async def _send_somewhere(self, router: str, request: Request) -> None:
        """Send to a router, to the other one if nothing listens there, until one takes it."""
        while not await self._send(router, request):
            router = _other(router)
            await asyncio.sleep(_REFUSED_PAUSE_S)

    def _shaped(self, chat: dict[str, Any], dice: random.Random) -> Request:
        """Make a request of a turn: of each API, streamed or whole."""
        roll, id_ = dice.random(), self._new_id()
        api: Api = "chat"
        body = dict(chat)
        if roll < 0.2:
            api = "completions"
            text = "\n".join(str(m.get("content") or "") for m in chat["messages"])
            prompt = self._oracle.ids(text) if roll < 0.1 else text
            body = {"model": "tiny", "prompt": prompt, "max_tokens": chat["max_tokens"]}
        elif roll < 0.23:
            body |= {"n": 2, "temperature": 1.0}
        elif roll < 0.43:
            api, body = "messages", _message_body(chat)
        elif roll < 0.63:
            api, body = "responses", _response_body(chat, id_)
        streams = dice.random() < 0.6
        wants_usage = True
        if streams:
            body["stream"] = True
            if api in ("chat", "completions"):
                wants_usage = dice.random() < 0.75
            if wants_usage and api in ("chat", "completions"):
                body["stream_options"] = {"include_usage": True}
        patience_s = dice.uniform(0.01, 0.5) if dice.random() < _LEAVES else PATIENCE_S
        return Request(
            id=id_,
            kind="agent",
            path=_PATHS[api],
            api=api,
            body=orjson.dumps(body),
            expected=self._oracle.expect(api, body, id_),
            streams=streams,
            wants_usage=wants_usage,
            patience_s=patience_s,
        )

    def _hostile(self, dice: random.Random) -> Request:
        """Make a request that is wrong, or fails wherever it goes."""
        chat: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"poison {dice.random()}"}],
            "max_tokens": 8,
        }
        id_ = self._new_id()
        wrong, no_route, failing = (400, 413, 415, 422), (400, 403, 404, 405), (400, 500, 502, 503)

        def made(kind: str, body: bytes | dict[str, Any], **fields: Any) -> Request:
            data = body if isinstance(body, bytes) else orjson.dumps(body)
            return Request(
                **{"kind": kind, "path": _PATHS["chat"], "api": "chat", "body": data} | fields,
                id=id_,
            )

        def poison(kind: str) -> dict[str, Any]:
            return chat | {"emulator": {"poison": kind}}

        dying = poison("die_after") | {"stream": True}
        odd_header = {"X-Session-ID": "\x80\xff"}
        return dice.choice(
            [
                made("not JSON", b'{"model": "tiny", "messages": [', allowed=wrong),
                made("deep JSON", b'{"model":"tiny","messages":' + b"[" * 100_000, allowed=wrong),
                made("wrong types", chat | {"messages": "wrong"}, allowed=wrong),
                made("no tokens", chat | {"max_tokens": -1}, allowed=wrong),
                made("no such model", chat | {"model": "no-such-model"}, allowed=(404,)),
                made("too large", b"x" * (BODY_BYTES + 1), allowed=(413,)),
                made("empty messages", chat | {"messages": []}, allowed=wrong),
                made("odd path", chat, path="/v1/../%2e/reset_prefix_cache", allowed=no_route),
                made("no such route", chat, path="/v1/nothing", allowed=no_route),
                made("odd session", chat | {"messages": 1}, allowed=wrong, headers=odd_header),
                made("poison 500", poison("status"), allowed=failing),
                made("poison death", poison("die_before"), allowed=failing),
                made("poison stream", dying, allowed=(*failing, 200), streams=True),
            ]
        )

    # ---------------------------------------------------------------- one request

    async def _send(self, router: str, request: Request) -> bool:
        """Send one request and record its outcome; False: nothing listens there."""
        loop = asyncio.get_running_loop()
        server = self._stack.servers[router]
        seen = Seen(
            id=request.id,
            kind=request.kind,
            api=request.api,
            router=router,
            life=server.life.number,
            start_s=loop.time(),
        )
        received = bytearray()
        try:
            async with asyncio.timeout(request.patience_s):
                await self._exchange(seen, request, received)
            self._judge(seen, request, bytes(received))
        except aiohttp.ClientConnectorError:
            if request.kind == "agent":
                return False
            seen.outcome = "router gone"
        except TimeoutError:
            is_meant = request.patience_s < PATIENCE_S
            seen.outcome = "left" if is_meant else "unclear"
            seen.detail = "" if is_meant else f"no end after {PATIENCE_S:g} s"
        except (aiohttp.ClientError, OSError) as exc:
            await self._broken(seen, exc, received, request)
        seen.end_s = loop.time()
        self._ledger.close(seen)
        return True

    async def _exchange(self, seen: Seen, request: Request, received: bytearray) -> None:
        headers = {"Content-Type": "application/json", "X-Request-Id": seen.id} | request.headers
        url = self._stack.urls[seen.router] + request.path
        async with self._client.request(
            "POST", _raw(url), data=request.body, headers=headers
        ) as answer:
            seen.status = answer.status
            seen.replica = answer.headers.get("x-warmroute-replica")
            async for piece in answer.content.iter_any():
                received += piece

    async def _broken(
        self, seen: Seen, exc: Exception, received: bytearray, request: Request
    ) -> None:
        """Record a broken connection: its router went, or there was no reason."""
        await asyncio.sleep(0.1)  # until the end of a process is noted
        loop = asyncio.get_running_loop()
        lives = self._stack.servers[seen.router].lives[seen.life :]
        seen.has_text = request.streams and read_stream(bytes(received)).has_text
        if any(
            life.how in ("killed", "died") and life.end_s and life.end_s >= seen.start_s
            for life in lives
        ):
            seen.outcome = "router gone"
        else:
            seen.outcome = "unclear"
            seen.detail = f"{type(exc).__name__}: {exc} after {len(received)} bytes"
        seen.end_s = loop.time()

    def _judge(self, seen: Seen, request: Request, body: bytes) -> None:
        """Decide in which of the few ways a request has ended."""
        assert seen.status is not None
        if seen.status != 200:
            self._judge_error(seen, request, body, seen.status)
            return
        read = read_stream(body) if request.streams else read_whole(body)
        seen.has_text = read.has_text
        if read.error is not None and request.streams:
            seen.detail = str(read.error)[:300]
            is_clear = read.fault is None and not read.num_done
            seen.outcome = "error event" if is_clear else "unclear"
            if not is_clear:
                seen.detail = f"{read.fault or '[DONE] after an error'}: {seen.detail}"
            return
        if request.expected is None:
            seen.outcome, seen.detail = "wrong", f"{request.kind} was answered"
            return
        if read.is_aborted and is_beginning(read, request.expected):
            seen.outcome, seen.detail = "aborted", f"after {read.texts or 'nothing'}"[:300]
            return
        found = difference(
            read, request.expected, streams=request.streams, wants_usage=request.wants_usage
        )
        seen.outcome, seen.detail = ("right", "") if found is None else ("wrong", found)

    def _judge_error(self, seen: Seen, request: Request, body: bytes, status: int) -> None:
        seen.detail = f"{status} {body[:250].decode(errors='replace')}"
        found: Any = None
        with contextlib.suppress(orjson.JSONDecodeError):
            found = orjson.loads(body)
        has_shape = is_error(found) or (seen.replica is not None and isinstance(found, dict))
        if not has_shape:
            seen.outcome = "unclear"
        elif request.expected is None and status in request.allowed:
            seen.outcome = "refused"
        elif b"request_kills_replicas" in body:  # it was at two deaths, by chance
            seen.outcome = "refused"
        elif status >= 500 or status == 429:
            seen.outcome = "error"
        else:
            seen.outcome = "wrong"


def _other(router: str) -> str:
    return next(name for name in ROUTERS if name != router)


def _message_body(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Ask for the same by the Messages API, with the tools' words in the user's mouth."""
    system, *rest = chat["messages"]
    return {
        "model": "tiny",
        "system": system["content"],
        "messages": [{"role": _role(each), "content": each["content"] or "-"} for each in rest],
        "max_tokens": chat["max_tokens"],
    }


def _response_body(chat: Mapping[str, Any], id_: str) -> dict[str, Any]:
    """Ask for the same by the Responses API, whose answer repeats the metadata."""
    system, *rest = chat["messages"]
    return {
        "model": "tiny",
        "instructions": system["content"],
        "input": [{"role": _role(each), "content": each["content"] or "-"} for each in rest],
        "max_output_tokens": chat["max_tokens"],
        "metadata": {"request": id_},
    }


def _role(message: Mapping[str, Any]) -> str:
    return "assistant" if message["role"] == "assistant" else "user"


def _raw(url: str) -> URL:
    """Send a URL as it is written."""
    return URL(url, encoded=True)
