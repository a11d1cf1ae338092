"""Load on several routers in front of real engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

from loadtest.agents import Session
from loadtest.results import TurnResult
from loadtest.runner.sending import make_client
from tests.engines.drive import send_turn
from tests.engines.harness import (
    Router,
)


class Load:
    """Sessions at several routers: every session goes from one to the other and back.

    A client tries again only where the router it asked was killed, at another one; and where an
    answer that had begun broke off with its engine: no replica can go on with that.
    """

    def __init__(self, routers: Sequence[Router]) -> None:
        self.routers = routers
        self.results: list[TurnResult] = []
        self.num_retried = 0
        self.num_broken_off = 0
        self.killed_replica: str | None = None
        self.pause_s = 0.0  # before each turn
        self._down: set[int] = set()
        self._stopped = False

    @contextmanager
    def down(self, index: int) -> Iterator[None]:
        """Say that a router is killed."""
        self._down.add(index)
        try:
            yield
        finally:
            self._down.discard(index)

    def stop(self) -> None:
        """Let the turns that run come to their end."""
        self._stopped = True

    async def more(self, num_results: int) -> None:
        """Wait for so many more turns."""
        target = len(self.results) + num_results
        async with asyncio.timeout(60):
            while len(self.results) < target:
                assert not self._stopped
                await asyncio.sleep(0.02)

    async def run(self, sessions: Sequence[Session], *, concurrency: int) -> None:
        """Run the sessions to their ends, or until it is stopped."""
        gate = asyncio.Semaphore(concurrency)
        start_s = time.monotonic()
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(make_client(base_url=r.url, timeout_s=120))
                for r in self.routers
            ]

            async def run(position: int, session: Session) -> None:
                async with gate:
                    while not self._stopped and (turn := session.next_turn()) is not None:
                        await asyncio.sleep(turn.wait_s + self.pause_s)
                        index = (position + turn.number) % len(clients)
                        result, reply = await send_turn(clients[index], turn, origin_s=start_s)
                        if self._may_retry(result, index):
                            other = clients[(index + 1) % len(clients)]
                            result, reply = await send_turn(other, turn, origin_s=start_s)
                        self.results.append(result)
                        if result.error is not None:
                            return
                        session.advance(reply)

            async with asyncio.TaskGroup() as group:
                for position, session in enumerate(sessions):
                    group.create_task(run(position, session), name=f"session {position}")

    def _may_retry(self, result: TurnResult, index: int) -> bool:
        is_missed = result.error in ("connect", "broken") and index in self._down
        is_broken_off = result.error == "stream" and result.replica == self.killed_replica
        self.num_retried += is_missed
        self.num_broken_off += is_broken_off
        return is_missed or is_broken_off


def failures(results: Sequence[TurnResult]) -> list[str]:
    return [f"{r.error}: {r.error_message}" for r in results if r.error is not None]
