"""Drive agent sessions against any OpenAI base URL and measure every turn.

A session sends its next turn when the reply to the last one is complete, its tools have run
(`Turn.wait_s`) and its sub-agents have reported: closed loop, as agents are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import aiohttp
import orjson

from loadtest.agents import Session, Turn
from loadtest.results import TurnResult
from loadtest.runner.exchange import Exchange
from loadtest.runner.requests import CHAT
from loadtest.runner.sending import make_client, send


async def drive(
    base_url: str,
    sessions: Iterable[Session],
    *,
    concurrency: int = 16,
    scripted: bool = False,
    on_result: Callable[[TurnResult], None] | None = None,
) -> list[TurnResult]:
    """Run the sessions to their ends and return every turn's result, in order of completion.

    Args:
        base_url: Of the router or the engine, without `/v1`.
        sessions: Started in order.
        concurrency: Sessions that run at once; sub-agents run beside their parent.
        scripted: Go on with scripted replies instead of the model's, so that every run sends
            the same prompts.
        on_result: Called after every turn.

    A session whose turn fails ends there, its sub-agents excepted; errors are results, not
    exceptions.
    """
    async with make_client(timeout_s=300.0, base_url=base_url) as client:
        driver = _Driver(client, scripted, on_result)
        gate = asyncio.Semaphore(concurrency)

        async def run_gated(session: Session) -> None:
            async with gate:
                await driver.run(session)

        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(run_gated(session), name=f"session {session.id}")
    return driver.results


async def send_turn(
    client: aiohttp.ClientSession,
    turn: Turn,
    *,
    origin_s: float = 0.0,
) -> tuple[TurnResult, str]:
    """Send one turn as a stream; return what was measured and the reply's text.

    Args:
        client: Of `make_client`, with a base URL.
        origin_s: `start_s` of the result counts from here, on the monotonic clock.
    """

    def clock() -> float:
        return time.monotonic() - origin_s

    body = {**turn.body, "stream": True, "stream_options": {"include_usage": True}}
    exchange = Exchange(turn.session_id, turn.number, start_s=clock(), keep_text=True)
    await send(client, CHAT, orjson.dumps(body), exchange, clock, headers={})
    return exchange.result(clock()), exchange.reply


class _Driver:
    __slots__ = ("_client", "_on_result", "_scripted", "_start_s", "results")

    def __init__(
        self,
        client: aiohttp.ClientSession,
        scripted: bool,
        on_result: Callable[[TurnResult], None] | None,
    ) -> None:
        self.results: list[TurnResult] = []
        self._client = client
        self._scripted = scripted
        self._on_result = on_result
        self._start_s = time.monotonic()

    async def run(self, session: Session) -> None:
        while (turn := session.next_turn()) is not None:
            await asyncio.sleep(turn.wait_s)
            result, reply = await send_turn(self._client, turn, origin_s=self._start_s)
            self.results.append(result)
            if self._on_result is not None:
                self._on_result(result)
            if result.error is not None:
                return
            children = session.advance(None if self._scripted else reply)
            async with asyncio.TaskGroup() as group:
                for child in children:
                    group.create_task(self.run(child), name=f"sub-agent {child.id}")
