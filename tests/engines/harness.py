"""Processes of the real-engine suite: the router, and taps on a replica's events.

The engines are those of `loadtest.engines`. Everything listens on 127.0.0.1 (vLLM's event sockets
bind every address), logs into a file, is waited for with a bound, and is killed by its own process
group.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec
import zmq

from loadtest.engines.mooncake import MASTER_READY_S, Master
from loadtest.engines.ports import free_port
from loadtest.engines.process import READY_S as ENGINE_READY_S
from loadtest.engines.process import REPOSITORY, Process, all_up, answers, read_metric
from loadtest.engines.vllm import (
    BLOCK_SIZE,
    ENVIRON,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    Engine,
    engine_python,
    replay,
)
from loadtest.tiny_model import MODEL_DIR
from tests.forks import PYTHONPATH, kill, python_command

__all__ = [
    "BLOCK_SIZE", "ENGINE_READY_S", "ENVIRON", "MASTER_READY_S", "MAX_MODEL_LEN", "MODEL_DIR",
    "NUM_BLOCKS", "REPOSITORY", "ROUTER_READY_S", "Engine", "EventTap", "LossyProxy", "Master",
    "Ours", "Router", "all_up", "answers", "engine_python", "num_removed", "read_metric",
    "replay", "unpack", "wait_until",
]  # fmt: skip

ROUTER_READY_S = 90.0  # beside engines under load, on two cores


class Ours(Process):
    """A command of ours: `python -m` and these words, in a fork that has imported all there is."""

    __slots__ = ()

    def __init__(self, name: str, url: str, words: Sequence[str | Path], log_path: Path) -> None:
        environ = {"PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1"}
        super().__init__(name, url, [*python_command(), "-m", *words], log_path, environ)

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        """Kill it, and what stands for it after it."""
        popen = self._popen
        if signum is signal.SIGKILL and isinstance(popen, subprocess.Popen):
            if popen.poll() is None:
                kill(popen)
        super().kill(signum)


class Router(Ours):
    """`warmroute serve` as a user starts it; `config`, replicas included, is its YAML file.

    It ends at once: there is no front end that would have to notice.
    """

    __slots__ = ("_num_replicas", "admin_url", "decisions_path")

    def __init__(
        self,
        replicas: Sequence[Engine],
        log_dir: Path,
        *,
        config: Mapping[str, Any] | None = None,
        policy: str | None = None,
        options: Sequence[str] = (),
        module: str = "router.cli",
    ) -> None:
        port, admin_port = free_port(), free_port()
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self.decisions_path = log_dir / f"decisions-{port}.jsonl"
        command: list[str | Path] = [
            module, "serve", "--set", "listen.drain_grace_s=0",
            "--port", str(port), "--admin-port", str(admin_port), "--set", "admin.open=true",
            "--decision-log", self.decisions_path, *options,
        ]  # fmt: skip
        self._num_replicas = len(replicas if config is None else config["replicas"])
        if config is None:
            for replica in replicas:
                command += ["--replica", replica.url]
        else:
            config_path = log_dir / f"router-{port}.yaml"
            config_path.write_text(json.dumps(config))  # JSON is YAML
            command += ["--config", config_path]
        if policy is not None:
            command += ["--policy", policy]
        super().__init__(
            f"router-{port}",
            f"http://127.0.0.1:{port}",
            command,
            log_dir / f"router-{port}.log",
        )

    def __enter__(self) -> Self:
        self.start()
        try:
            return self.wait_ready("/readyz", ROUTER_READY_S)
        except BaseException:
            self.kill()
            raise

    def __exit__(self, *_: object) -> None:
        self.kill(signal.SIGTERM)

    def wait_ready(self, path: str, timeout_s: float) -> Self:
        """Wait until it is ready and has found every replica: one that answers makes it ready."""
        super().wait_ready(path, timeout_s)
        wait_until(self._has_found_all, timeout_s, f"all replicas:\n{self.tail()}")
        return self

    def _has_found_all(self) -> bool:
        return self.metric("warmroute_replica_healthy") >= self._num_replicas

    def chat(self, body: Mapping[str, Any]) -> httpx.Response:
        """Send a chat request and return the whole answer, whatever its status."""
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=120)

    def drain(self, replica: str, *, draining: bool = True) -> None:
        """Send a replica no more requests, or again."""
        response = httpx.post(
            f"{self.admin_url}/admin/replicas/{replica}/drain",
            json={"draining": draining},
            timeout=30,
        )
        response.raise_for_status()

    def explain(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Dry-run a request: its `token_ids`, its block `keys` (hex), the candidates' costs."""
        response = httpx.post(
            f"{self.admin_url}/admin/explain", params={"tokens": 1}, json=body, timeout=60
        )
        response.raise_for_status()
        explained: dict[str, Any] = response.json()
        return explained

    def knows_pool(self) -> bool:
        """Return whether a listing has shown how the pool's keys are written."""
        return "@tp_rank" in httpx.get(f"{self.admin_url}/admin/pool", timeout=30).text

    def metric(self, name: str, **labels: str) -> float:
        """Sum one metric of /metrics over the samples with these labels."""
        response = httpx.get(f"{self.url}/metrics", timeout=30)
        response.raise_for_status()
        return read_metric(response.text, name, **labels)

    def state(self, replica: str) -> str | None:
        """Return how well the router knows a replica's cache: exact, degraded or blind."""
        for state in ("exact", "degraded", "blind"):
            if self.metric("warmroute_replica_state", replica=replica, state=state) == 1.0:
                return state
        return None

    def num_known_tokens(self, body: Mapping[str, Any]) -> dict[str, int]:
        """Return how many leading tokens of a request each replica is believed to hold."""
        views = (candidate["view"] for candidate in self.explain(body)["candidates"])
        return {view["id"]: view["num_gpu_tokens"] for view in views}

    def decisions(self) -> list[dict[str, Any]]:
        """Read the decision records written so far."""
        lines = self.decisions_path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]


class _Subscriber:
    """Reads a replica's published messages on a thread of its own."""

    __slots__ = ("_context", "_source", "_stop", "_thread")

    def __init__(self, source: str) -> None:
        self._source = source
        self._context = zmq.Context()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reads {source}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.term()

    def _run(self) -> None:
        raise NotImplementedError


class EventTap(_Subscriber):
    """Records every raw message a replica publishes.

    Reads the wire without the router's decoder: the engine's word against the router's.
    """

    __slots__ = ("_lock", "_messages")

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._messages: list[tuple[bytes, bytes, bytes]] = []
        self._lock = threading.Lock()

    def messages(self) -> list[tuple[bytes, bytes, bytes]]:
        """Return (topic, sequence, payload) of everything seen so far."""
        with self._lock:
            return list(self._messages)

    def events(self) -> list[Any]:
        """Return the events of everything seen so far, as msgpack gives them."""
        return [event for _, _, payload in self.messages() for event in unpack(payload)[1]]

    def _run(self) -> None:
        subscriber = self._context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.RCVHWM, 0)
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.subscribe(b"")
        subscriber.connect(self._source)
        while not self._stop.is_set():
            if subscriber.poll(50):
                topic, sequence, payload = subscriber.recv_multipart()
                with self._lock:
                    self._messages.append((topic, sequence, payload))
        subscriber.close()


def num_removed(taps: tuple[EventTap, EventTap]) -> int:
    """Count the blocks both replicas evicted."""
    return sum(
        len(event["block_hashes"])
        for tap in taps
        for event in tap.events()
        if event["type"] == "BlockRemoved"
    )


class LossyProxy(_Subscriber):
    """Passes a replica's published messages on, except while it is to lose them."""

    __slots__ = ("_is_losing", "endpoint", "num_lost")

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.num_lost = 0
        self._is_losing = threading.Event()

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Lose every message inside the `with`; it ends when at least one was lost."""
        num_lost_before = self.num_lost
        self._is_losing.set()
        try:
            yield
            wait_until(lambda: self.num_lost > num_lost_before, 60, "a message to lose")
        finally:
            self._is_losing.clear()

    def _run(self) -> None:
        with self._context.socket(zmq.SUB) as source, self._context.socket(zmq.PUB) as sink:
            for side in (source, sink):
                side.setsockopt(zmq.LINGER, 0)
            source.subscribe(b"")
            source.connect(self._source)
            sink.bind(self.endpoint)
            while not self._stop.is_set():
                if not source.poll(50):
                    continue
                frames = source.recv_multipart()
                if self._is_losing.is_set():
                    self.num_lost += 1
                else:
                    sink.send_multipart(frames)


def unpack(payload: bytes) -> Any:
    """Decode one message's payload: `[ts, [event, ...], rank]`."""
    return msgspec.msgpack.decode(payload)


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll a condition; raise TimeoutError naming `what` if it does not come true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s} s: {what}")
        time.sleep(0.05)


async def until(
    condition: Callable[[], bool], what: str = "what was to follow during the load"
) -> None:
    """Wait for something while requests go on.

    Raises:
        TimeoutError: it did not come within two minutes.
    """
    await asyncio.to_thread(wait_until, condition, 120, what)
