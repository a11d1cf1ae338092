"""The fork server of a run of tests: one for all workers, which imports for its first client."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

STARTUP = Path(__file__).parent / "startup"
ROOT = STARTUP.parents[1]
ADDRESS = "TESTS_FORK_SERVER"
SCRIPT = "TESTS_FORK_PYTHON"

PYTHONPATH = f"{STARTUP}{os.pathsep}{ROOT}"
"""What the server and those who want its forks have in common."""


class ForkServer:
    """The process; what inherits our environment from now on finds it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        path = str(Path(self._folder.name) / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, str(STARTUP / "fork_server.py"), str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env=os.environ | {"PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
        os.environ[ADDRESS] = path
        script = Path(self._folder.name) / "python"
        script.write_text(f'#!/bin/sh\nexec {shlex.join(python_command())} "$@"\n')
        script.chmod(0o755)
        os.environ[SCRIPT] = str(script)

    def close(self) -> None:
        """End it; its forks end with their clients."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._folder.cleanup()


def python_command() -> list[str]:
    """Return what to start instead of `sys.executable`; PYTHONPATH and HF_HUB_OFFLINE as above."""
    return [sys.executable, "-I", "-S", str(STARTUP / "fork_client.py"), sys.executable]


def python_environment() -> dict[str, str]:
    """Return our environment with what forks need."""
    return os.environ | {"PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1"}


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a fork, and its client ends after it; or the process, if it is no client."""
    name, _, pid = Path(f"/proc/{process.pid}/comm").read_text().strip().partition(" ")
    if name == "fork":
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    else:
        process.kill()


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have forks for what is started as `sys.executable`, by this process and by its forks.

    Processor time and memory of such a child, read by its number, are its client's.
    """
    monkeypatch.setattr("sys.executable", os.environ[SCRIPT])
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TESTS_FORKED_CHILDREN", "1")
