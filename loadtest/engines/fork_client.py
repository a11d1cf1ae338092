"""Engines by fork: importing vLLM takes 12 s of processor time, and an engine would do it thrice.

A process of the engines' interpreter imports vLLM once (`site/fork_server.py`). Every engine is a
fork of it. A fork has its own command line, environment, session and log.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

SERVER: Final = Path(__file__).parent / "site" / "fork_server.py"


class Forked:
    """An engine's process, with what `Process` uses of a `Popen`; its parent is the server."""

    __slots__ = ("_pidfd", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def __del__(self) -> None:
        os.close(self._pidfd)

    def poll(self) -> int | None:
        """Return None while it runs, then 0: only its parent may ask for the exit status."""
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        status = self._ended_within(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return status

    def _ended_within(self, timeout_s: float | None) -> int | None:
        ended, _, _ = select.select([self._pidfd], [], [], timeout_s)
        return 0 if ended else None


class ForkServer:
    """The process that has imported vLLM. It ends with this one, and its engines with it."""

    __slots__ = ("_lock", "_popen")

    def __init__(self, python: Path, environ: Mapping[str, str], log_path: Path) -> None:
        self._lock = threading.Lock()
        with log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                [str(python), str(SERVER)],
                env=dict(environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        atexit.register(self._close)

    def fork(
        self, argv: Sequence[str], environ: Mapping[str, str], cwd: Path, log_path: Path
    ) -> Forked:
        """Start an engine: `argv` is what follows the interpreter, program name included.

        Raises:
            RuntimeError: the server has ended; its log says why.
        """
        order = {
            "argv": list(argv), "environ": dict(environ), "cwd": str(cwd), "log": str(log_path),
        }  # fmt: skip
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with self._lock:
            try:
                self._popen.stdin.write(json.dumps(order).encode() + b"\n")
                self._popen.stdin.flush()
                answer = self._popen.stdout.readline()
            except BrokenPipeError:
                answer = b""
        if not answer:
            raise RuntimeError(
                f"the process that engines are forked from ended {self._popen.wait()}"
            )
        return Forked(int(answer))

    def _close(self) -> None:
        with self._popen:  # closes its stdin, on which it ends
            pass
