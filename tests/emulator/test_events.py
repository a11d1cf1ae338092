"""Events and replays as they come over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from loadtest.emulator.events import EventPublisher, PublisherOptions
from router.kv_events.wire import END_OF_REPLAY, AllBlocksCleared, BlockRemoved, BlockStored, decode

STORED = BlockStored(
    block_hashes=[7],
    parent_block_hash=None,
    token_ids=[1, 2],
    block_size=2,
    medium="GPU",
    extra_keys=[None],
    group_idx=0,
)


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    with zmq.asyncio.Context() as context:
        yield context


def publisher(**options: object) -> EventPublisher:
    base = {"host": "127.0.0.1", "port": 0, "replay_port": 0}
    return EventPublisher(PublisherOptions(**base | options), 3)  # type: ignore[arg-type]


async def subscribed(context: zmq.asyncio.Context, source: EventPublisher) -> zmq.asyncio.Socket:
    """Connect a subscriber and wait until the publisher knows of it (XPUB-style, by probing)."""
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(f"tcp://127.0.0.1:{source.ports[0]}")
    while not await socket.poll(5):
        source.publish([AllBlocksCleared()], 0.0)
    return socket


async def replayed(
    context: zmq.asyncio.Context, source: EventPublisher, start: int
) -> list[list[bytes]]:
    """Ask for a replay as vLLM's own client does, with an empty delimiter frame."""
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{source.ports[1]}")
    replies: list[list[bytes]] = []
    async with asyncio.TaskGroup() as group:
        server = group.create_task(source.serve_replays())
        await socket.send_multipart([b"too short"])
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        while not replies or END_OF_REPLAY not in replies[-1]:
            replies.append(await socket.recv_multipart())
        server.cancel()
    socket.close(linger=0)
    return replies


async def test_batches_are_numbered_from_zero_in_three_frames(
    context: zmq.asyncio.Context,
) -> None:
    """Topic, sequence and payload; the payload names time, events and rank."""
    source = publisher()
    socket = await subscribed(context, source)
    source.publish([STORED, BlockRemoved(block_hashes=[7], medium="GPU", group_idx=0)], 1.5)

    frames: list[bytes] = []
    while not frames or int.from_bytes(frames[1], "big") < source.next_sequence - 1:
        frames = await socket.recv_multipart()

    batch = decode(frames[2], with_tokens=True)
    assert frames[0] == b""
    assert (batch.ts, batch.dp_rank) == (1.5, 3)
    assert batch.events[0] == STORED
    assert isinstance(batch.events[1], BlockRemoved)
    socket.close(linger=0)
    source.close()


async def test_a_replay_sends_the_buffered_batches_from_a_number_on(
    context: zmq.asyncio.Context,
) -> None:
    """Each in four frames: delimiter, topic, sequence and payload."""
    source = publisher(buffer_steps=3)
    for _ in range(5):
        source.publish([STORED], 0.0)

    replies = await replayed(context, source, 3)

    assert [len(reply) for reply in replies] == [4] * 3
    numbers = [int.from_bytes(reply[2], "big", signed=True) for reply in replies]
    assert numbers == [3, 4, -1]
    assert decode(replies[0][3], with_tokens=True).events == [STORED]
    source.truncate(1)
    assert len(await replayed(context, source, 0)) == 2
    source.close()


async def test_dropped_batches_leave_a_gap_that_a_replay_fills(
    context: zmq.asyncio.Context,
) -> None:
    """A dropped batch has a number and is in the buffer, but is not sent; silence sends none."""
    source = publisher()
    socket = await subscribed(context, source)
    while await socket.poll(5):
        await socket.recv_multipart()
    first = source.next_sequence
    source.num_to_drop = 1
    source.publish([STORED], 0.0)
    source.silent = True
    source.publish([STORED], 0.0)
    source.silent = False
    source.publish([STORED], 0.0)

    frames = await socket.recv_multipart()

    assert int.from_bytes(frames[1], "big") == first + 2
    assert len(await replayed(context, source, first)) == 4
    socket.close(linger=0)
    source.close()


async def test_the_sources_are_described_as_vllm_does() -> None:
    """Endpoints with a wildcard host and the bound port."""
    source = publisher(buffer_steps=9, host="0.0.0.0")

    assert source.config.endpoint == f"tcp://*:{source.ports[0]}"
    assert source.config.replay_endpoint == f"tcp://*:{source.ports[1]}"
    assert source.config.buffer_steps == 9
    source.close()
