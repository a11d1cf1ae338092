"""Drive agent sessions against any OpenAI base URL and measure every turn.

A session sends its next turn when the reply to the last one is complete, its tools have run
(`Turn.wait_s`) and its sub-agents have reported: closed loop, as agents are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import httpx
import orjson

from loadtest.agents import Session, Turn
from loadtest.results import TurnResult
from loadtest.runner.exchange import Exchange


async def drive(
    base_url: str,
    sessions: Iterable[Session],
    *,
    concurrency: int = 16,
    headers: Mapping[str, str] | None = None,
    session_header: str | None = None,
    scripted: bool = False,
    timeout_s: float = 300.0,
    on_result: Callable[[TurnResult], None] | None = None,
) -> list[TurnResult]:
    """Run the sessions to their ends and return every turn's result, in order of completion.

    Args:
        base_url: Of the router or the engine, without `/v1`.
        sessions: Started in order.
        concurrency: Sessions that run at once; sub-agents run beside their parent.
        headers: Sent with every request.
        session_header: Header that carries the session id; None: no session id is sent.
        scripted: Go on with scripted replies instead of the model's, so that every run sends
            the same prompts.
        timeout_s: Longest silence on a connection.
        on_result: Called after every turn.

    A session whose turn fails ends there, its sub-agents excepted; errors are results, not
    exceptions.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency * 4)
    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, timeout=timeout_s, limits=limits
    ) as client:
        driver = _Driver(client, session_header, scripted, on_result)
        gate = asyncio.Semaphore(concurrency)

        async def run_gated(session: Session) -> None:
            async with gate:
                await driver.run(session)

        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(run_gated(session), name=f"session {session.id}")
    return driver.results


async def send(
    client: httpx.AsyncClient,
    turn: Turn,
    *,
    session_header: str | None = None,
    origin_s: float = 0.0,
) -> tuple[TurnResult, str]:
    """Send one turn as a stream; return what was measured and the reply's text.

    `start_s` of the result counts from `origin_s` on the monotonic clock.
    """
    headers = {"content-type": "application/json"}
    if session_header is not None:
        headers[session_header] = turn.session_id
    body = {**turn.body, "stream": True, "stream_options": {"include_usage": True}}
    exchange = Exchange(
        turn.session_id, turn.number, start_s=time.monotonic() - origin_s, keep_text=True
    )
    try:
        async with client.stream(
            "POST", "/v1/chat/completions", content=orjson.dumps(body), headers=headers
        ) as response:
            exchange.begin(response.status_code, response.headers)
            if response.status_code != 200:
                exchange.refuse(await response.aread())
            else:
                async for data in response.aiter_bytes():
                    exchange.receive(data, time.monotonic() - origin_s)
                exchange.close()
    except httpx.TimeoutException as exc:
        exchange.fail("timeout", repr(exc))
    except httpx.ConnectError as exc:
        exchange.fail("connect", repr(exc))
    except httpx.HTTPError as exc:
        exchange.fail("broken", repr(exc))
    return exchange.result(time.monotonic() - origin_s), exchange.reply


class _Driver:
    __slots__ = ("_client", "_on_result", "_scripted", "_session_header", "_start_s", "results")

    def __init__(
        self,
        client: httpx.AsyncClient,
        session_header: str | None,
        scripted: bool,
        on_result: Callable[[TurnResult], None] | None,
    ) -> None:
        self.results: list[TurnResult] = []
        self._client = client
        self._session_header = session_header
        self._scripted = scripted
        self._on_result = on_result
        self._start_s = time.monotonic()

    async def run(self, session: Session) -> None:
        while (turn := session.next_turn()) is not None:
            await asyncio.sleep(turn.wait_s)
            result, reply = await send(
                self._client, turn, session_header=self._session_header, origin_s=self._start_s
            )
            self.results.append(result)
            if self._on_result is not None:
                self._on_result(result)
            if result.error is not None:
                return
            children = session.advance(None if self._scripted else reply)
            async with asyncio.TaskGroup() as group:
                for child in children:
                    group.create_task(self.run(child), name=f"sub-agent {child.id}")
