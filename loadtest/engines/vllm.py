"""Real vLLM replicas with the tiny model: CPU builds, KV events with replay, small caches."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import zmq

from loadtest.engines.fork_client import Forked, ForkServer
from loadtest.engines.ports import free_port
from loadtest.engines.process import REPOSITORY, Process, read_metric
from loadtest.tiny_model import MODEL_DIR

INSTALLED_PYTHON: Final = REPOSITORY / ".engines" / "venv" / "bin" / "python"
_YIELD: Final = REPOSITORY / ".engines" / "yield.so"  # site/yield.c says why
PRELOAD: Final = {"LD_PRELOAD": str(_YIELD)} if _YIELD.exists() else {}

BLOCK_SIZE: Final = 32  # the CPU attention wants a multiple of 32
NUM_BLOCKS: Final = 768  # small, so that a few sessions evict each other
MAX_MODEL_LEN: Final = 16_384  # NUM_BLOCKS * BLOCK_SIZE must hold one request of this length

TOOL_OPTIONS: Final = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")

ENVIRON: Final = {
    **PRELOAD,
    "PYTHONPATH": str(Path(__file__).parent / "site"),  # its sitecustomize.py says why
    # The model runs in the engine's core, not in a third process, as on a machine with one GPU.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
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

_CPU_INFO: Final = Path("/proc/cpuinfo")


def is_wide(cpu_info: str) -> bool:
    """Return whether engines are to compute in float32, by what Linux says of the processors.

    x86 without AVX-512 multiplies 16-bit matrices in a loop: 2,048 tokens of 256 values take 50
    times as long as in float32. (torch 2.13.0; a KV cache of float32 is twice as large.)
    """
    flags = [line for line in cpu_info.splitlines() if line.startswith("flags")]
    return bool(flags) and not any("avx512" in line for line in flags)


_IS_WIDE: Final = _CPU_INFO.exists() and is_wide(_CPU_INFO.read_text())
_NUMBER_OPTIONS: Final = ("--dtype", "float32") if _IS_WIDE else ()
BLOCK_BYTES: Final = (32 if _IS_WIDE else 16) << 10  # of the tiny model's KV

_fork_servers: dict[Path, ForkServer] = {}

_TOKENIZE_FIELDS = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message",
    "add_special_tokens", "chat_template", "chat_template_kwargs",
)  # fmt: skip


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


def fork_server(python: Path, log_path: Path) -> ForkServer:
    """Return the process that an interpreter's engines are forked from; start it if need be."""
    if python not in _fork_servers:
        _fork_servers[python] = ForkServer(python, {**os.environ, **ENVIRON}, log_path)
    return _fork_servers[python]


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
        options: Sequence[str] = TOOL_OPTIONS,
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
            "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events),
            *_NUMBER_OPTIONS, *options,
        ]  # fmt: skip
        super().__init__(
            name,
            f"http://127.0.0.1:{port}",
            command,
            log_dir / f"{name}.log",
            {**ENVIRON, **(environ or {})},
        )

    def _spawn(self) -> subprocess.Popen[bytes] | Forked:
        python, _, _, *options = self._command
        return fork_server(Path(python), self.log_path).fork(
            [python, *options], self._environ, REPOSITORY, self.log_path
        )

    def replayable(self) -> list[int]:
        """List the numbers of the event batches it can replay."""
        *batches, _ = replay(self.replay_endpoint, 0)
        return [int.from_bytes(frames[2], "big") for frames in batches]

    def reset_prefix_cache(self, *, external: bool = False) -> None:
        """Empty the cache (dev mode), as a restart would; with `external` the pool, too.

        The engine publishes in steps: `AllBlocksCleared` leaves with the next request, so a
        short one follows (too short for a block of its own).
        """
        response = httpx.post(
            f"{self.url}/reset_prefix_cache",
            params={"reset_external": "true"} if external else None,
            timeout=30,
            trust_env=False,
        )
        response.raise_for_status()
        self.complete([1, 2, 3])

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a chat request to this replica itself, past the router."""
        response = _post(f"{self.url}/v1/chat/completions", body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def complete(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        """Complete token ids, one token unless asked otherwise; return the answer."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
        response = _post(f"{self.url}/v1/completions", {**body, **fields})
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def tokenize(self, body: Mapping[str, Any]) -> list[int]:
        """Ask for the token ids of a chat or completion request."""
        wanted = (*_TOKENIZE_FIELDS, "prompt") if "prompt" in body else _TOKENIZE_FIELDS
        fields = {key: body[key] for key in wanted if key in body}
        response = _post(f"{self.url}/tokenize", fields)
        response.raise_for_status()
        tokens: list[int] = response.json()["tokens"]
        return tokens

    def metric(self, name: str, **labels: str) -> float:
        """Sum a counter or gauge of the engine's /metrics over all labels but those given."""
        page = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        return read_metric(page, name, **labels)


def _post(url: str, body: Mapping[str, Any]) -> httpx.Response:
    return httpx.post(url, json=body, timeout=60, trust_env=False)


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
