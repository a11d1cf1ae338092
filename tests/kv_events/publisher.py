"""An engine's event publisher as vLLM writes it, with switches for what goes wrong.

Follows ZmqEventPublisher in vllm/distributed/kv_events.py, 0.32.0: a PUB and a ROUTER in one
thread, a bounded buffer, replies (client, "", topic, sequence, payload).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Self

import zmq

from router.kv_events.wire import END_OF_REPLAY
from tests.ports import free_port


class Publisher:
    """A publisher thread on free loopback ports (or the ones given, to come back on)."""

    def __init__(
        self,
        *,
        ports: tuple[int, int] | None = None,
        topic: bytes = b"kv",
        buffer_steps: int = 10_000,
        has_topic_in_replies: bool = True,
        most_replies: int | None = None,
    ) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)  # PUB that shows subscriptions
        self._router = self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
        self.ports = tuple(
            self._bind(socket, free_port() if ports is None else ports[number])
            for number, socket in enumerate((self._pub, self._router))
        )
        self._topic = topic
        self._has_topic = has_topic_in_replies
        self._most_replies = most_replies  # of a replay; its ROUTER drops the others, and the end
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._orders: queue.Queue[tuple[str, bytes] | list[bytes]] = queue.Queue()
        self._next = 0
        self.subscribed = threading.Event()
        self.num_replays = 0
        self._is_running = True
        self._thread = threading.Thread(target=self._run, name="publisher")
        self._thread.start()

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], port: int) -> int:
        socket.bind(f"tcp://127.0.0.1:{port}")
        return port

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[0]}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[1]}"

    def publish(self, payload: bytes) -> None:
        """Publish a batch and keep it for replay."""
        self._orders.put(("publish", payload))

    def lose(self, payload: bytes) -> None:
        """Keep a batch for replay without publishing it: a gap."""
        self._orders.put(("lose", payload))

    def shout(self, frames: list[bytes]) -> None:
        """Publish any frames."""
        self._orders.put(frames)

    def wait(self) -> None:
        """Wait until everything asked for so far is published or kept."""
        self._orders.join()

    def close(self) -> None:
        self._is_running = False
        self._thread.join()
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while self._is_running:
            if self._pub.poll(0):
                self.subscribed.set()
                self._pub.recv()
            if self._router.poll(0):
                self._replay()
            try:
                order = self._orders.get(timeout=0.002)
            except queue.Empty:
                continue
            self._follow(order)
            self._orders.task_done()

    def _follow(self, order: tuple[str, bytes] | list[bytes]) -> None:
        if isinstance(order, list):
            self._pub.send_multipart(order)
            return
        kind, payload = order
        sequence, self._next = self._next, self._next + 1
        self._buffer.append((sequence, payload))
        if kind == "publish":
            self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))

    def _replay(self) -> None:
        client, _, start = self._router.recv_multipart()
        self.num_replays += 1
        topic = (self._topic,) if self._has_topic else ()
        wanted = [each for each in self._buffer if each[0] >= int.from_bytes(start, "big")]
        for sequence, payload in wanted[: self._most_replies]:
            reply = (client, b"", *topic, sequence.to_bytes(8, "big"), payload)
            self._router.send_multipart(reply)
        if self._most_replies is not None and len(wanted) > self._most_replies:
            return
        empty = (b"",) if self._has_topic else ()
        self._router.send_multipart((client, b"", *empty, END_OF_REPLAY, b""))
