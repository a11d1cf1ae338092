"""KV events from an emulated replica to a router in the same process, without ZeroMQ.

libzmq has threads and a clock of its own, which virtual time cannot wait for. This takes the place
of `router.kv_events.subscriber.EngineEvents`: the same batches, byte for byte, at the moment in
which they are published.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import Any, Final

from loadtest.emulator.events import EventPublisher, PublisherOptions
from router.kv_events.subscriber import EngineEvents, Message, Received

_OPEN: Final[dict[int, MemoryPublisher]] = {}  # by port


class MemoryPublisher(EventPublisher):
    """Publishes one rank's batches to subscribers in this process."""

    def __init__(self, options: PublisherOptions, rank: int) -> None:
        super().__init__(options, rank)
        self.published = asyncio.Event()  # a new one for each batch
        _OPEN[self.ports[0]] = self

    def publish_payload(self, payload: bytes) -> None:
        super().publish_payload(payload)
        self.published.set()
        self.published = asyncio.Event()

    def since(self, start: int) -> list[Message]:
        """Return the batches from a sequence on."""
        newest_first = takewhile(lambda message: message[0] >= start, reversed(self._buffer))
        return list(newest_first)[::-1]


class MemoryEvents(EngineEvents):
    """Follows the publisher of an endpoint."""

    def __init__(self, endpoint: str, *_: Any, **__: Any) -> None:
        self.endpoint = endpoint
        self._publisher = _OPEN[int(endpoint.rpartition(":")[2])]
        self._next = self._publisher.next_sequence
        self._is_new = True

    @property
    def has_replay(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: there are no sockets."""

    async def receive(self, timeout_s: float) -> Received:
        if self._is_new:
            self._is_new = False
            return Received([], is_up=True)
        if self._next == self._publisher.next_sequence:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._publisher.published.wait()
            except TimeoutError:
                return Received([])
        messages = self._publisher.since(self._next)
        self._next = self._publisher.next_sequence
        return Received(messages)

    @asynccontextmanager
    async def replay(self, start: int) -> AsyncIterator[Any]:
        yield _Replies(self._publisher.since(start))


class _Replies:
    """The answer to a replay request, in one piece."""

    is_complete = True

    def __init__(self, messages: list[Message]) -> None:
        self._messages = messages

    async def receive(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages
