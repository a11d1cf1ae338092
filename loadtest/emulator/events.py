"""KV events of one rank over ZMQ: a PUB socket, and a ROUTER that replays what was missed.

Source: vllm/distributed/kv_events.py ZmqEventPublisher, 0.32.0. Frames are `[topic, sequence,
payload]`, and the sequence counts from 0. A replay request is one 8-byte sequence number. The reply
is every buffered batch from there on, and an end marker with sequence -1.
"""

from __future__ import annotations

from collections import deque
from socket import AF_INET, SOCK_STREAM, getaddrinfo

import zmq
import zmq.asyncio
from msgspec import Struct

from router.base.addresses import unbracketed
from router.kv_events.wire import END_OF_REPLAY, EventBatch, KvEvent, encode

HIGH_WATER_MARK = 100_000

_DEEP = b"\x91" * 5_000 + b"\xc0"  # msgpack: lists of one list, and a null in the last
GARBAGE = (
    b"\x93\xcb" + bytes(8) + b"\x91\x82\xa4type\xa7Unknown\xa1x" + _DEEP + b"\xc0",
    _DEEP,
    b"\x93\xcb" + bytes(8) + b"\x91\x81\xa4type\xacBlockRemoved\xc0",
    b"\xff not msgpack at all",
    b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
    b"",
)
"""Batches that no engine sends; the first is a batch with an event of a type unknown so far."""


class PublisherOptions(Struct, frozen=True, kw_only=True):
    host: str
    port: int  # 0: any
    replay_port: int  # 0: any
    buffer_steps: int = 10_000


class PublisherConfig(Struct, frozen=True, kw_only=True):
    """What `/kv_event_sources` says about one rank; field for field vLLM's KVEventsConfig."""

    enable_kv_cache_events: bool
    publisher: str
    endpoint: str
    replay_endpoint: str | None
    buffer_steps: int
    hwm: int = HIGH_WATER_MARK
    max_queue_size: int = 100_000
    topic: str = ""


class EventPublisher:
    """Publishes one rank's batches; create it inside the running loop, `close` it at the end.

    `num_to_drop` batches are numbered and buffered but not sent (a gap); while `silent`, nothing
    is sent at all.
    """

    __slots__ = (
        "_rank",
        "_replay",
        "buffer",
        "config",
        "next_sequence",
        "num_to_drop",
        "ports",
        "pub",
        "silent",
    )

    def __init__(self, options: PublisherOptions, rank: int) -> None:
        self._rank = rank
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=options.buffer_steps)
        self.next_sequence = 0
        self.num_to_drop = 0
        self.silent = False
        context = zmq.asyncio.Context.instance()
        self.pub: zmq.Socket[bytes] = zmq.Socket(context, zmq.PUB)
        self.pub.set_hwm(HIGH_WATER_MARK)
        self._replay = context.socket(zmq.ROUTER)
        try:
            port = _bind(self.pub, options.host, options.port)
            replay_port = _bind(self._replay, options.host, options.replay_port)
        except zmq.ZMQError:
            self.close()
            raise
        self.ports = port, replay_port
        self.config = PublisherConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"tcp://*:{port}",
            replay_endpoint=f"tcp://*:{replay_port}",
            buffer_steps=options.buffer_steps,
        )

    def publish(self, events: list[KvEvent], ts: float) -> None:
        """Send one batch; never blocks (a subscriber that is too slow loses it, as with vLLM)."""
        batch = EventBatch(ts=ts, events=events, dp_rank=self._rank)
        self.publish_payload(encode(batch))

    def publish_garbage(self, count: int) -> None:
        """Send `count` payloads of `GARBAGE`, numbered and buffered as batches are."""
        for number in range(count):
            self.publish_payload(GARBAGE[number % len(GARBAGE)])

    def publish_payload(self, payload: bytes) -> None:
        """Send bytes as the next batch, whatever they are."""
        sequence = self.next_sequence
        self.next_sequence += 1
        self.buffer.append((sequence, payload))
        if self.num_to_drop > 0:
            self.num_to_drop -= 1
        elif not self.silent:
            self.pub.send_multipart((b"", sequence.to_bytes(8, "big"), payload))

    def truncate(self, num_kept: int) -> None:
        """Forget all but the last `num_kept` buffered batches."""
        while len(self.buffer) > num_kept:
            self.buffer.popleft()

    async def serve_replays(self) -> None:
        """Answer replay requests until cancelled."""
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) == 3:  # anything else vLLM ignores too
                await self._replay_from(frames[0], int.from_bytes(frames[2], "big"))

    def close(self) -> None:
        """Close both sockets; their ports are free a moment later."""
        for socket in (self.pub, self._replay):
            if socket.closed:
                continue
            endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
            if isinstance(endpoint, bytes) and endpoint.strip(b"\0"):
                socket.unbind(endpoint.rstrip(b"\0"))
            socket.close(linger=0)

    async def _replay_from(self, client: bytes, start: int) -> None:
        for sequence, payload in tuple(self.buffer):
            if sequence >= start:
                frames = [client, b"", b"", sequence.to_bytes(8, "big"), payload]
                await self._replay.send_multipart(frames)
        await self._replay.send_multipart([client, b"", b"", END_OF_REPLAY, b""])


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> int:
    host = unbracketed(host)
    if host not in ("", "::", "0.0.0.0"):  # ZeroMQ binds no names; by a name it connects to IPv4
        found = getaddrinfo(host, None, type=SOCK_STREAM)
        host = str(min(found, key=lambda each: each[0] != AF_INET)[4][0])
    socket.setsockopt(zmq.IPV6, int(":" in host))
    address = {"": "*", "::": "*", "0.0.0.0": "*"}.get(host, f"[{host}]" if ":" in host else host)
    socket.bind(f"tcp://{address}:{port or '*'}")
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return int(endpoint.rstrip(b"\0").rpartition(b":")[2])
