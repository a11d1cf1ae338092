"""An engine's KV events over ZeroMQ: subscribe, drain, replay. The only module that imports zmq.

What must live here: sockets, frames, endpoints. What must not: the contents of a batch, or whether
it is the next one (sequence). Source of the framing: ZmqEventPublisher in
vllm/distributed/kv_events.py, 0.32.0.

    published         topic, sequence (8 bytes, big-endian), payload
    replay request    "", first wanted sequence                      (REQ framing, to a ROUTER)
    replay reply      "", topic, sequence, payload                   each batch still buffered
                      "", sequence, payload                          before the fix of vllm#45174
    end of replay     sequence -1, empty payload, in the same shape
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Final

import zmq
import zmq.asyncio
from msgspec import Meta, Struct
from zmq.utils.monitor import parse_monitor_message

from router.base.addresses import address_of, host_port
from router.base.backoff import Backoff
from router.base.errors import ConfigError, UpstreamUnreachable
from router.base.host_names import Names
from router.index.candidate_stream import StreamReason
from router.kv_events.wire import END_OF_REPLAY, MAX_PAYLOAD_BYTES

logger = logging.getLogger(__name__)

Message = tuple[int, bytes]
"""Sequence and payload."""

REPLAY_TIMEOUT_S: Final = 5.0
"""Longest wait for the first reply of a replay."""

_NEXT_REPLY_S: Final = 1.0  # for the next one: an engine sends all in one go, or has dropped some

MAX_REPLAY_BYTES: Final = 1 << 30
MAX_REPLAY_MESSAGES: Final = 200_000
MAX_REPLAY_S: Final = 300.0
"""A replay beyond any of these is given up: vLLM's buffer has 10,000 batches by default."""

MAX_DRAINED: Final = 256
"""Messages taken at once; the caller yields to the loop before it takes more."""


_LINK_EVENTS: Final = zmq.Event.CONNECTED | zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED

_MAX_SOCKETS: Final = 16_384  # of the process, three a rank; ZeroMQ's default is 1,023

_POLLIN: Final = int(zmq.POLLIN)  # as a flag it takes half a microsecond more

_RECONNECT_S: Final = (1.0, 60.0)

_HWM: Final = 100_000  # the publisher's own default; beyond it batches and replies are lost


_HOST_PORT: Final = re.compile(r"tcp://([A-Za-z0-9_.-]+):([0-9]+)")

_Address = Annotated[str, Meta(max_length=1_024)]


class EventSource(Struct, frozen=True):
    """Where one rank publishes its KV events (vLLM's KVEventsConfig, resolved)."""

    endpoint: _Address
    replay_endpoint: _Address | None = None
    topic: _Address = ""
    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"  # "null": events are created and dropped
    is_configured: bool = False  # the endpoint is the configuration's, not what the engine reports

    @property
    def connects(self) -> bool:
        """Whether the engine connects to the endpoint, as far as that shows: nobody can subscribe.

        vLLM binds what has a wildcard, which 0.0.0.0 is none of. But for `tcp://*:0` it reports the
        address that it bound. Source: ZmqEventPublisher._is_bind_endpoint, 0.32.0.
        """
        endpoint = self.endpoint
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        return not binds and not self.is_configured


class Received(Struct, frozen=True):
    """Result of one wait: batches in order, and whether the publisher came or went.

    `is_up` None: no change. After True there may be batches missing before the first one here.
    """

    messages: list[Message]
    is_up: bool | None = None
    num_odd: int = 0  # messages of no known shape; where it was a batch there is a gap
    why_unheard: str | None = None  # why no publisher has answered so far; None: one has


class EngineEvents:
    """The event stream of one rank.

    ZeroMQ reconnects by itself when a connection ends. It gives a connection up if the other side
    broke the protocol, or sent more than `MAX_PAYLOAD_BYTES` at once. So a connection that has been
    down for some time is created again. ZeroMQ gets addresses: with a name it would ask a resolver
    itself, in the one thread that all streams share, and each time that it connects.

    Args:
        endpoint: Where the engine publishes, e.g. `tcp://10.0.0.1:5557`.
        replay_endpoint: Where it replays; None: nowhere.
        topic: Prefix of the topics wanted; empty for all.
        replay_timeout_s: Longest wait for the first replay reply.
        connects: See `EventSource`.
        names: The addresses of hosts; None: no other client shares them.

    Raises:
        ConfigError: ZeroMQ cannot make sense of the endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
        connects: bool = False,
        names: Names | None = None,
    ) -> None:
        self._names = names or Names()
        self._connects = connects
        self._is_open = False  # something listens there
        self._was_up = False
        self._context = _shared_context()
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        self.endpoint = endpoint
        self._is_odd_logged = False
        self._backoff = Backoff(*_RECONNECT_S)
        self._up_s: float | None = None  # since when it is connected; None: it is not
        self._reconnect_s = 0.0  # when to connect, if it is not up until then
        self._connected_to: str | None = None  # the endpoint, with an address; None: not yet
        self._has_address = True
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        self._sub = plain.socket(zmq.SUB)
        _configure(self._sub)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._monitor = self._sub.get_monitor_socket(_LINK_EVENTS)
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that watches the sockets
        if _named(endpoint) is None:
            try:
                self._connect(endpoint)
            except ConfigError:
                self.close()
                raise

    @property
    def has_replay(self) -> bool:
        """Whether there is a replay endpoint."""
        return self._replay_endpoint is not None

    def close(self) -> None:
        """Close the sockets; idempotent."""
        if not self._sub.closed:
            if self._loop is not None:
                self._loop.remove_reader(_descriptor(self._sub))
                self._loop.remove_reader(_descriptor(self._monitor))
            self._sub.disable_monitor()
            self._monitor.close(linger=0)
            self._sub.close(linger=0)

    async def receive(self, timeout_s: float) -> Received:
        """Wait for something, then take what is there, at most `MAX_DRAINED` messages.

        Raises:
            UpstreamUnreachable: The socket failed (not: the engine is gone, that is no error).
        """
        try:
            received = self._take()
            if received is None and self._up_s is None and time.monotonic() >= self._reconnect_s:
                await self._connect_again(timeout_s)
                received = self._take()
            if received is None:
                await self._wait(timeout_s)
                received = self._take()
            return received or Received([], why_unheard=self._why_unheard())
        except zmq.ZMQError as exc:
            raise UpstreamUnreachable(self.endpoint, f"event stream failed: {exc}") from exc

    def _take(self) -> Received | None:
        """Drain messages and link events; None: nothing was there."""
        messages, num_odd = self._drain_messages()
        is_up = self._drain_link()
        self._note_link(is_up)
        self._was_up = self._was_up or bool(is_up)
        if not messages and not num_odd and is_up is None:
            return None
        return Received(messages, is_up, num_odd, self._why_unheard())

    async def _wait(self, timeout_s: float) -> None:
        """Wait until a socket may have something, after both had nothing.

        A poller of zmq.asyncio takes 60 us more for each batch. The sockets' descriptors tell only
        of what is new, so nothing is awaited between finding them empty and this.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            for each in (self._sub, self._monitor):
                loop.add_reader(_descriptor(each), self._signalled, each)
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _signalled(self, socket: zmq.Socket[bytes]) -> None:
        socket.getsockopt(zmq.EVENTS)  # or the descriptor stays readable, and the loop spins
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _why_unheard(self) -> str | None:
        if self._was_up:
            return None
        if not self._has_address:
            return f"{StreamReason.HOST_UNKNOWN} ({self.endpoint})"
        reason = StreamReason.NO_PUBLISHER if self._is_open else StreamReason.NOT_LISTENING
        return f"{StreamReason.CONNECTS if self._connects else reason} ({self.endpoint})"

    def _drain_messages(self) -> tuple[list[Message], int]:
        messages: list[Message] = []
        num_odd = 0
        for frames in _drain(self._sub, MAX_DRAINED):
            sequence = -1
            if len(frames) == 3 and len(frames[1]) == 8:
                sequence = int.from_bytes(frames[1], "big", signed=True)
            if sequence >= 0:
                messages.append((sequence, frames[2]))
                continue
            num_odd += 1
            if not self._is_odd_logged:
                self._is_odd_logged = True
                logger.warning("event message of unknown shape", extra={"endpoint": self.endpoint})
        return messages, num_odd

    def _drain_link(self) -> bool | None:
        is_up: bool | None = None
        for frames in _drain(self._monitor, MAX_DRAINED):
            event = parse_monitor_message(frames)["event"]
            if event == zmq.Event.CONNECTED:
                self._is_open = True
            else:
                is_up = event == zmq.Event.HANDSHAKE_SUCCEEDED
        return is_up

    def _note_link(self, is_up: bool | None) -> None:
        now_s = time.monotonic()
        if is_up:
            self._up_s = now_s
        elif is_up is not None:
            if self._up_s is not None and now_s - self._up_s > _RECONNECT_S[1]:
                self._backoff.reset()
            self._up_s = None
            self._reconnect_s = now_s + self._backoff.next_s()

    async def _connect_again(self, timeout_s: float) -> None:
        """Connect, with growing pauses, where ZeroMQ may have given up, or the host has moved."""
        if self._connected_to is not None and (named := _named(self.endpoint)):
            self._names.doubt(named[0])
        try:
            async with asyncio.timeout(timeout_s):
                endpoint = await self._with_address(self.endpoint)
        except (TimeoutError, socket.gaierror):
            self._has_address = self._connected_to is not None
            self._reconnect_s = time.monotonic() + self._backoff.next_s()
        else:
            self._connect(endpoint)

    def _connect(self, endpoint: str) -> None:
        if self._connected_to is not None:
            if _has_message(self._sub):  # receiving it after a disconnect aborts: libzmq#2163
                return  # once it is taken, the next call connects
            with suppress(zmq.ZMQError):  # it has given up: there is nothing to disconnect
                self._sub.disconnect(self._connected_to)
        self._reconnect_s = time.monotonic() + self._backoff.next_s()
        _connect(self._sub, endpoint)
        self._connected_to, self._has_address = endpoint, True

    async def _with_address(self, endpoint: str) -> str:
        """Write an endpoint with an address of its host, IPv4 if there is one.

        Raises:
            socket.gaierror: the host has no address.
        """
        if (named := _named(endpoint)) is None:
            return endpoint
        host, port = named
        addresses = await self._names.addresses(host)
        address = next((each for each in addresses if ":" not in each), addresses[0])
        return f"tcp://{host_port(address, port)}"

    @asynccontextmanager
    async def replay(self, start: int) -> AsyncIterator[Replies]:
        """Ask for all batches from sequence `start` that the engine still has.

        Raises:
            UpstreamUnreachable: The socket failed. A dead peer is no error but no reply.
        """
        assert self._replay_endpoint is not None
        try:
            endpoint = await self._with_address(self._replay_endpoint)
        except socket.gaierror as exc:
            text = f"its host name does not resolve ({exc.strerror})"
            raise UpstreamUnreachable(self._replay_endpoint, text) from exc
        dealer = self._context.socket(zmq.DEALER)
        try:
            _configure(dealer)
            _connect(dealer, endpoint)
            await dealer.send_multipart([b"", start.to_bytes(8, "big")])
            yield Replies(dealer, self._replay_timeout_s)
        except zmq.ZMQError as exc:
            raise UpstreamUnreachable(self._replay_endpoint, f"replay failed: {exc}") from exc
        finally:
            dealer.close(linger=0)


class Replies:
    """The answer to one replay request, in pieces."""

    __slots__ = ("_dealer", "_num_bytes", "_timeout_s", "_until_s", "is_complete", "num_messages")

    def __init__(self, dealer: zmq.asyncio.Socket, timeout_s: float) -> None:
        self._dealer = dealer
        self._timeout_s = timeout_s
        self._num_bytes = 0
        self.num_messages = 0
        self._until_s = time.monotonic() + MAX_REPLAY_S
        self.is_complete = False  # the end marker was seen

    async def receive(self) -> list[Message]:
        """Wait for replies and take what is there; empty: the end, or nothing came in time.

        Raises:
            ValueError: A reply of no known shape, or no end of them.
        """
        if self.is_complete:
            return []
        timeout_s = min(_NEXT_REPLY_S, self._timeout_s) if self.num_messages else self._timeout_s
        await self._dealer.poll(round(timeout_s * 1000))
        messages: list[Message] = []
        for frames in _drain(zmq.Socket.shadow(self._dealer.underlying), MAX_DRAINED):
            message = parse_reply(frames)
            if message is None:
                self.is_complete = True
                break
            messages.append(message)
            self._num_bytes += len(message[1])
        self.num_messages += len(messages)
        if (
            self._num_bytes > MAX_REPLAY_BYTES
            or self.num_messages > MAX_REPLAY_MESSAGES
            or time.monotonic() > self._until_s
        ):
            raise ValueError(f"a replay without end: {self.num_messages} batches so far")
        return messages


def parse_reply(frames: Sequence[bytes]) -> Message | None:
    """Read one reply in either shape, None: the end marker.

    Raises:
        ValueError: Neither shape.
    """
    if len(frames) not in (3, 4) or frames[0] != b"" or len(frames[-2]) != 8:
        raise ValueError(f"replay reply of unknown shape: {[len(frame) for frame in frames]} bytes")
    if frames[-2] == END_OF_REPLAY:
        return None
    sequence = int.from_bytes(frames[-2], "big", signed=True)
    if sequence < 0:
        raise ValueError(f"replay reply of sequence {sequence}")
    return sequence, frames[-1]


def _named(endpoint: str) -> tuple[str, int] | None:
    """Return the host and the port of an endpoint with a name; None: it needs no resolver."""
    parts = _HOST_PORT.fullmatch(endpoint)
    return (parts[1], int(parts[2])) if parts and address_of(parts[1]) is None else None


def _shared_context() -> zmq.asyncio.Context:
    context = zmq.asyncio.Context.instance()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)  # has an effect before the first socket only
    return context


def _configure(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, _HWM)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)  # beyond it ZeroMQ hangs up
    socket.setsockopt(zmq.RECONNECT_IVL, 100)  # ms; ZeroMQ adds its own jitter
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)  # a machine that lost its power does not disconnect
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)


def _connect(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, endpoint: str) -> None:
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as exc:
        raise ConfigError(f"event endpoint {endpoint!r}: {exc}") from exc


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def _drain(socket: zmq.Socket[bytes], max_messages: int) -> list[list[bytes]]:
    """Receive waiting messages without awaiting each: 2 us a message instead of 60.

    Asking whether there is one is faster than the exception that says that there is none.
    """
    taken: list[list[bytes]] = []
    while len(taken) < max_messages and _has_message(socket):
        taken.append(socket.recv_multipart(zmq.NOBLOCK))
    return taken
