"""A server in a process group of its own: it logs into a file and is waited for with a bound."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

import httpx

from loadtest.engines.fork_client import Forked

REPOSITORY: Final = Path(__file__).resolve().parents[2]
READY_S: Final = 180.0  # an engine: 15 s the first of all, if nothing else runs; then some seconds


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
        self._popen: subprocess.Popen[bytes] | Forked | None = None

    def start(self) -> Self:
        """Start, without waiting."""
        assert self._popen is None, f"{self.name} runs already"
        self._popen = self._spawn()
        return self

    def _spawn(self) -> subprocess.Popen[bytes] | Forked:
        return self._run(self._command)

    def _run(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command with this process's environment and log."""
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, path: str, timeout_s: float) -> Self:
        """Wait until a GET of `path` answers 200; if it never does, raise with the log's end."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            assert self._popen is not None
            status = self._popen.poll()
            if status is not None:
                raise RuntimeError(f"{self.name} exited {status}:\n{self.tail()}")
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
    processes: Sequence[Process], path: str = "/health", timeout_s: float = READY_S
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


def answers(url: str) -> bool:
    """Return whether a GET gives 200."""
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def read_metric(text: str, name: str, **labels: str) -> float:
    """Sum the samples of one metric whose labels include `labels`; 0.0 if there are none."""
    return sum(value for value in _samples(text, name, labels))


def _samples(text: str, name: str, labels: Mapping[str, str]) -> Iterator[float]:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == name and all(pair in series for pair in wanted):
            yield float(value)
