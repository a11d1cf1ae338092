"""KV events in memory: what a router gets of a replica in its own process."""

from __future__ import annotations

import asyncio

from loadtest.demo.memory_events import MemoryEvents, MemoryPublisher
from loadtest.emulator.events import PublisherOptions


async def test_batches_arrive_in_order_and_can_be_replayed() -> None:
    """A subscriber is up at once, gets what is published from then on, and the rest on request."""
    publisher = MemoryPublisher(PublisherOptions(host="127.0.0.1", port=0, replay_port=0), 0)
    try:
        publisher.publish_payload(b"early")
        events = MemoryEvents(publisher.config.endpoint.replace("*", "127.0.0.1"))

        first = await events.receive(1.0)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(events.receive(60.0))
            await asyncio.sleep(0)
            publisher.publish_payload(b"one")
            publisher.publish_payload(b"two")
        nothing = await events.receive(0.001)
        async with events.replay(0) as replies:
            replayed = await replies.receive()
            rest = await replies.receive()
    finally:
        publisher.close()

    assert (first.is_up, first.messages) == (True, [])
    assert waiting.result().messages == [(1, b"one"), (2, b"two")]
    assert nothing.messages == []
    assert replayed == [(0, b"early"), (1, b"one"), (2, b"two")]
    assert rest == []
    assert replies.is_complete
