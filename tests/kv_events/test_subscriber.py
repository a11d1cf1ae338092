"""Sockets and frames: what a real publisher sends comes out as sequences and payloads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.base.addresses import reachable_endpoint
from router.base.errors import ConfigError, UpstreamUnreachable
from router.kv_events import subscriber as engine_events
from router.kv_events.subscriber import EngineEvents, Message, Received, parse_reply
from router.kv_events.wire import END_OF_REPLAY
from tests.kv_events.publisher import Publisher

SEVEN = (7).to_bytes(8, "big")


async def receive_until(source: EngineEvents, num_messages: int) -> list[Message]:
    """Collect live messages; link changes are let pass."""
    messages: list[Message] = []
    async with asyncio.timeout(60):
        while len(messages) < num_messages:
            messages += (await source.receive(1.0)).messages
    return messages


async def link_change(source: EngineEvents, is_up: bool) -> None:
    async with asyncio.timeout(60):
        while (await source.receive(1.0)).is_up is not is_up:
            pass


async def replayed_for_ever(source: EngineEvents) -> None:
    """Ask again and again, until the publisher's thread has all that it was given."""
    async with asyncio.timeout(30.0):
        while True:
            await replayed(source, 0)


async def replayed(source: EngineEvents, start: int) -> tuple[list[Message], bool]:
    messages: list[Message] = []
    async with source.replay(start) as replies:
        while more := await replies.receive():
            messages += more
        assert await replies.receive() == []
        return messages, replies.is_complete


@pytest.mark.parametrize(
    ("endpoint", "url", "expected"),
    [
        ("tcp://*:5557", "http://10.0.0.7:8000", "tcp://10.0.0.7:5557"),
        ("tcp://0.0.0.0:5557", "http://vllm-1:8000/v1", "tcp://vllm-1:5557"),
        ("tcp://[::]:5557", "http://[fd00::1]:8000", "tcp://[fd00::1]:5557"),
        ("tcp://:::5557", "http://localhost", "tcp://localhost:5557"),
        ("tcp://10.1.1.1:5557", "http://10.0.0.7:8000", "tcp://10.1.1.1:5557"),
        ("ipc:///run/kv", "http://10.0.0.7:8000", "ipc:///run/kv"),
    ],
)
def test_a_bound_endpoint_becomes_one_to_connect_to(endpoint: str, url: str, expected: str) -> None:
    """Wildcards are the replica's own host; a named host stays."""
    assert reachable_endpoint(endpoint, url) == expected


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("inproc://kv", "http://a"),
        ("ipc://", "http://a"),
        ("tcp://*", "http://a"),
        ("tcp://*:port", "http://a"),
        ("5557", "http://a"),
        ("tcp://*:5557", "not-a-url"),
    ],
)
def test_an_unreachable_endpoint_is_refused(endpoint: str, url: str) -> None:
    """The message names what is wrong."""
    with pytest.raises(ValueError, match=r"endpoint|URL"):
        reachable_endpoint(endpoint, url)


@pytest.mark.parametrize("topic", [(), (b"kv",), (b"",)])
def test_replies_of_both_shapes_are_read(topic: tuple[bytes, ...]) -> None:
    """With the topic frame, and without it as before the fix of vllm#45174."""
    assert parse_reply([b"", *topic, SEVEN, b"payload"]) == (7, b"payload")
    assert parse_reply([b"", *topic, END_OF_REPLAY, b""]) is None


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"", b"payload"],
        [b"x", SEVEN, b"p"],
        [b"", b"7", b"p"],
        [b"", b"", b"", SEVEN, b""],
    ],
)
def test_replies_of_no_known_shape_are_refused(frames: list[bytes]) -> None:
    """The message has the sizes, not the contents."""
    with pytest.raises(ValueError, match="unknown shape"):
        parse_reply(frames)


async def test_published_batches_arrive_in_order_and_in_bounded_pieces() -> None:
    """A busy publisher is drained in pieces, so that the loop gets its turns."""
    with Publisher() as publisher:
        source = EngineEvents(publisher.endpoint, None, "kv")
        await link_change(source, True)
        await asyncio.to_thread(publisher.subscribed.wait)
        for number in range(600):
            publisher.publish(b"%d" % number)
        messages = await receive_until(source, 600)
        source.close()
        source.close()

    assert messages == [(number, b"%d" % number) for number in range(600)]
    assert not source.has_replay


async def test_other_topics_are_not_ours() -> None:
    """A topic selects by prefix."""
    with Publisher(topic=b"other") as publisher:
        source = EngineEvents(publisher.endpoint, publisher.replay_endpoint, "kv")
        await link_change(source, True)
        await asyncio.to_thread(publisher.subscribed.wait)
        publisher.publish(b"theirs")

        assert await source.receive(0.05) == Received([])
        assert source.has_replay
        source.close()


@asynccontextmanager
async def left_by_its_publisher() -> AsyncIterator[tuple[EngineEvents, tuple[int, int]]]:
    """Make a source whose publisher has gone, and the ports for the next one."""
    with Publisher() as first:
        source = EngineEvents(first.endpoint, None, "kv")
        await link_change(source, True)
        first.close()
        await link_change(source, False)
        yield source, (first.ports[0], first.ports[1])
        source.close()


async def test_a_publisher_that_goes_and_comes_back_is_noticed() -> None:
    """Without a single batch in between."""
    async with left_by_its_publisher() as (source, ports):
        with Publisher(ports=ports):
            await link_change(source, True)


async def test_what_comes_before_it_connects_again_is_received() -> None:
    """ZeroMQ had connected by itself. A disconnect then ended the process (libzmq#2163)."""
    async with left_by_its_publisher() as (source, ports):
        with Publisher(ports=ports) as second:
            await asyncio.to_thread(second.subscribed.wait)
            second.publish(b"payload")
            await asyncio.sleep(2.1)  # the caller is busy; its pause before connecting is over

            assert await receive_until(source, 1) == [(0, b"payload")]


async def test_a_message_that_waits_delays_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is taken, the next call connects, without another pause."""
    async with left_by_its_publisher() as (source, _):
        source._reconnect_s = 0.0
        with monkeypatch.context() as patch:
            patch.setattr(engine_events, "_has_message", lambda _: True)
            source._connect(source.endpoint)
        assert source._reconnect_s == 0.0
        source._connect(source.endpoint)
        assert source._reconnect_s > 0.0


@pytest.mark.parametrize("has_topic", [True, False])
async def test_a_replay_brings_what_is_buffered(has_topic: bool) -> None:
    """From the first wanted sequence to the end marker."""
    with Publisher(has_topic_in_replies=has_topic) as publisher:
        for number in range(500):
            publisher.lose(b"%d" % number)
        source = EngineEvents(publisher.endpoint, publisher.replay_endpoint, "kv")
        async with asyncio.timeout(60):
            while len((await replayed(source, 0))[0]) < 500:
                pass
            messages, is_complete = await replayed(source, 100)
        source.close()

    assert is_complete
    assert messages == [(number, b"%d" % number) for number in range(100, 500)]


async def test_a_dead_replay_endpoint_is_no_reply_in_time() -> None:
    """No error, no waiting for ever, nothing left open."""
    with Publisher() as publisher:
        publisher.close()
        source = EngineEvents(
            publisher.endpoint, publisher.replay_endpoint, "kv", replay_timeout_s=0.05
        )

        assert await replayed(source, 0) == ([], False)
        source.close()


async def test_a_nonsensical_endpoint_is_the_operators_error() -> None:
    """It is refused at once, and by name."""
    with pytest.raises(ConfigError, match="nonsense"):
        EngineEvents("nonsense")


async def test_a_nonsensical_replay_endpoint_is_refused_when_it_is_asked() -> None:
    """The stream itself goes on."""
    with Publisher() as publisher:
        source = EngineEvents(publisher.endpoint, "nonsense")
        with pytest.raises(ConfigError, match="nonsense"):
            async with source.replay(0):
                pass
        source.close()


async def replay_over_a_closed_socket(source: EngineEvents) -> None:
    async with source.replay(0) as replies:
        replies._dealer.close(linger=0)
        await replies.receive()


async def test_a_socket_that_fails_is_an_error_of_our_own() -> None:
    """No caller has to know ZeroMQ's exceptions."""
    with Publisher() as publisher:
        source = EngineEvents(publisher.endpoint, publisher.replay_endpoint)
        with pytest.raises(UpstreamUnreachable, match="replay failed"):
            await replay_over_a_closed_socket(source)
        source.close()
        with pytest.raises(UpstreamUnreachable, match="event stream failed"):
            await source.receive(0.01)


async def test_a_message_beyond_the_limit_cuts_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZeroMQ hangs up on it instead of keeping it, connects anew, and the next one comes."""
    monkeypatch.setattr(engine_events, "MAX_PAYLOAD_BYTES", 1000)
    with Publisher() as publisher:
        source = EngineEvents(publisher.endpoint, topic="kv")
        try:
            await link_change(source, True)
            await asyncio.to_thread(publisher.subscribed.wait)
            publisher.publish(b"a" * 1000)
            assert await receive_until(source, 1) == [(0, b"a" * 1000)]
            publisher.publish(b"a" * 1001)
            await link_change(source, False)
            later: list[Message] = []
            async with asyncio.timeout(60):
                while not later:
                    publisher.publish(b"b")
                    later = (await source.receive(0.2)).messages

            assert later[0][1] == b"b"
        finally:
            source.close()


async def test_messages_of_no_shape_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Too few frames, too many, a short sequence, a negative one; the sane one after them comes."""
    with Publisher() as publisher:
        source = EngineEvents(publisher.endpoint, topic="kv")
        try:
            await link_change(source, True)
            await asyncio.to_thread(publisher.subscribed.wait)
            odd = [[b"kv"], [b"kv"] * 100, [b"kv", b"7", b"x"], [b"kv", END_OF_REPLAY, b"x"]]
            for frames in odd:
                publisher.shout(frames)
            publisher.publish(b"sane")
            num_odd, messages = 0, []
            async with asyncio.timeout(60):
                while not messages:
                    received = await source.receive(1.0)
                    num_odd += received.num_odd
                    messages += received.messages
        finally:
            source.close()

    assert (num_odd, messages) == (4, [(0, b"sane")])
    assert len(caplog.records) == 1


@pytest.mark.parametrize("limit", ["MAX_REPLAY_BYTES", "MAX_REPLAY_MESSAGES"])
async def test_a_replay_without_end_is_given_up(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many batches, or bytes, are no buffer."""
    monkeypatch.setattr(engine_events, limit, 3)
    with Publisher() as publisher:
        for _ in range(10):
            publisher.lose(b"ab")
        source = EngineEvents(publisher.endpoint, publisher.replay_endpoint)
        try:
            with pytest.raises(ValueError, match="without end"):
                await replayed_for_ever(source)
        finally:
            source.close()
