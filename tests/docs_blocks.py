"""The code blocks of the documentation, and a shell to run them in.

Conventions for documents. The line before a fenced block may be a comment:

    <!-- run -->                               run it; it must succeed
    <!-- run: shows TEXT -->                   and TEXT must be in what it writes
    <!-- run twice: shows TEXT -->             and TEXT must be in what it writes the second time
    <!-- run: in the background, until URL --> start it; go on when URL answers 200; end it at last
    <!-- keep -->                              write a Python block into its file, run it later
    <!-- not run: REASON -->                   required on `sh` blocks that are not run

Blocks of one document run in order, in one empty directory. A Python block that begins with
`# NAME.py` has that name there. Documents write the ports of a real installation; they are
exchanged for free ones: 8001 and 8002 are two emulated replicas that serve `Qwen/Qwen3-8B`, 6379
is a Redis, 8080 and 8081 are the router's, 8090 and 8091 a second router's, 8011, 8012 and 9003 are
for blocks that start replicas and a pool's master themselves. `warmroute`, `python` and
the router's default ports are this checkout's, this interpreter's and the exchanged ones.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from msgspec import Struct

from tests.forks import PYTHONPATH, python_command
from tests.ports import free_port
from tests.redis_servers import binaries

ROOT = Path(__file__).resolve().parent.parent

ENGINE_PORTS = (8001, 8002)
ROUTER_PORT, ADMIN_PORT = 8080, 8081
REDIS_PORT = 6379
OTHER_PORTS = (REDIS_PORT, 8090, 8091, 8011, 8012, 9003)
MODEL = "Qwen/Qwen3-8B"

# What documents may name; tests/engines/test_1_quick_start.py compares it with the real parser.
VLLM_FLAGS = frozenset(
    {
        "--anthropic-disabled-thinking-effort",
        "--api-key",
        "--lora-modules",
        "--chat-template",
        "--chat-template-content-format",
        "--default-chat-template-kwargs",
        "--tokenizer-mode",
        "--data-parallel-external-lb",
        "--data-parallel-hybrid-lb",
        "--data-parallel-size",
        "--mm-hasher-algorithm",
        "--max-model-len",
        "--media-io-kwargs",
        "--reasoning-parser",
        "--sse-keep-alive-interval",
        "--tool-call-parser",
        "--enable-auto-tool-choice",
        "--enable-prompt-tokens-details",
        "--enable-scale-out",
        "--kv-events-config",
        "--speculative-config",
        "--mm-processor-cache-gb",
        "--kv-transfer-config",
        "--no-enable-prefix-caching",
        "--num-gpu-blocks-override",
        "--otlp-traces-endpoint",
        "--port",
        "--tensor-parallel-size",
        "--disable-log-stats",
        "--prefix-caching-hash-algo",
        "--trust-remote-code",
        "--trust-request-chat-template",
    }
)

READY_S = 120.0
RUN_S = 180.0

_BLOCK = re.compile(
    r"^(?:<!-- (?P<marker>(?:not run|run|keep)\b[^\n]*?) -->\n)?"
    r"```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_SHOWS = re.compile(r"run(?: twice)?: shows (.+)")
_UNTIL = re.compile(r"run: in the background, until (\S+)")


class Block(Struct, frozen=True, kw_only=True):
    """One fenced block; `marker` is the comment before it, None: there is none."""

    language: str
    code: str
    marker: str | None

    @property
    def runs(self) -> bool:
        return self.marker is not None and not self.marker.startswith("not run")

    @property
    def is_run_twice(self) -> bool:
        """Whether only its second run is looked at: what it shows depends on the first."""
        return (self.marker or "").startswith("run twice")

    @property
    def shows(self) -> str:
        """What its output must hold; "" is in every output."""
        found = _SHOWS.fullmatch(self.marker or "")
        return found[1] if found else ""

    @property
    def until(self) -> str | None:
        """The URL to wait for, if the block is to go on in the background."""
        found = _UNTIL.fullmatch(self.marker or "")
        return found[1] if found else None


def blocks(text: str) -> list[Block]:
    """List a document's blocks in order."""
    return [
        Block(language=found["language"], code=found["code"], marker=found["marker"])
        for found in _BLOCK.finditer(text)
    ]


def free_ports() -> dict[int, int]:
    """Choose a free port for every port that documents write."""
    return {port: free_port() for port in (*ENGINE_PORTS, ROUTER_PORT, ADMIN_PORT, *OTHER_PORTS)}


class Shell:
    """Runs blocks in `directory`; what is still running ends with the context."""

    def __init__(self, directory: Path, ports: Mapping[int, int]) -> None:
        self._directory = directory
        self._ports = ports
        self._children: list[subprocess.Popen[bytes]] = []
        self._log = directory / ".log"
        self._number = 0
        scripts = directory / ".bin"
        scripts.mkdir()
        python = shlex.join(python_command())
        _write_script(scripts / "python", f'exec {python} "$@"')
        # A request that is shown succeeds, unless the document shows its status.
        curl = shutil.which("curl")
        _write_script(
            scripts / "curl",
            f'case "$*" in *http_code*) exec {curl} "$@";; esac\nexec {curl} --fail "$@"',
        )
        _write_script(scripts / "warmroute", f'exec {python} -m router.cli "$@"')
        servers = [str(Path(each).parent) for each in binaries().values()]  # of Redis
        self._environ = os.environ | {
            "PATH": os.pathsep.join([str(scripts), os.environ["PATH"], *servers]),
            "PYTHONPATH": PYTHONPATH,
            "WARMROUTE_LISTEN_PORT": str(ports[ROUTER_PORT]),
            "WARMROUTE_LISTEN_HOST": "127.0.0.1",
            "WARMROUTE_LISTEN_DRAIN_GRACE_S": "0",
            "WARMROUTE_ADMIN_PORT": str(ports[ADMIN_PORT]),
            "WARMROUTE_ADMIN_URL": f"http://127.0.0.1:{ports[ADMIN_PORT]}",
            "XDG_STATE_HOME": str(directory),  # for the token of the admin API
            "HF_HUB_OFFLINE": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
        for child in self._children:
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()

    @property
    def log(self) -> str:
        """What was written in the background."""
        return self._log.read_text() if self._log.exists() else ""

    def run(self, block: Block) -> str:
        """Run a block to its end, or until it is ready (or keep it only); return what it wrote.

        Raises:
            AssertionError: it failed, or was not ready in time; with what it wrote.
        """
        self._number += 1
        command = self._command(block)
        if block.marker == "keep":
            return ""
        if block.until is not None:
            return self.start(command, self._exchanged(block.until))
        if block.is_run_twice:
            self._run(block, command)
        output = self._run(block, command)
        assert block.shows in output, f"{block.shows!r} is not shown:\n{block.code}\n{output}"
        return output

    def _run(self, block: Block, command: list[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self._directory,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=RUN_S,
            check=False,
        )
        output = done.stdout.decode(errors="replace")
        assert done.returncode == 0, f"status {done.returncode}:\n{block.code}\n{output}"
        return output

    def start(self, command: list[str], url: str) -> str:
        """Start a process and wait until `url` answers 200; return what it wrote by then."""
        self.launch(command)
        return self.wait(url)

    def launch(self, command: list[str]) -> None:
        """Start a process in the background."""
        with self._log.open("ab") as output:
            child = subprocess.Popen(
                command,
                cwd=self._directory,
                env=self._environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children.append(child)

    def wait(self, url: str) -> str:
        """Wait until `url` answers 200 and every process lives; return what they wrote by then."""
        deadline_s = time.monotonic() + READY_S
        while not _answers(url):
            is_dead = any(child.poll() is not None for child in self._children)
            if is_dead or time.monotonic() > deadline_s:
                raise AssertionError(f"{url} is not ready:\n{self._log.read_text()}")
            time.sleep(0.05)
        return self._log.read_text()

    def _command(self, block: Block) -> list[str]:
        code = self._exchanged(block.code)
        if block.language == "python":
            named = re.match(r"# (\w+\.py)\n", code)
            path = self._directory / (named[1] if named else f"block_{self._number}.py")
            path.write_text(code)
            return [*python_command(), str(path)]
        return ["bash", "-euo", "pipefail", "-c", code]

    def _exchanged(self, text: str) -> str:
        """Put this run's ports in the place of the documents'."""
        pattern = "|".join(map(str, self._ports))
        return re.sub(rf"\b({pattern})\b", lambda found: str(self._ports[int(found[1])]), text)


def _answers(url: str) -> bool:
    """Ask once, at a cost that shows in no test: a client of httpx takes 20 ms to make."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.netloc, timeout=10.0)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
