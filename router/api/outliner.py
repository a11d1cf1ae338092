"""Outlines bodies in a process of its own, one at a time, which ends with the body.

A process: a decoder that runs for a second holds the interpreter all the while, whichever thread it
is in, and what it built would stay in our memory in pieces. Starting one takes 60 ms.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from router.api import outline
from router.api.outline import Outline
from router.errors import Overloaded, PayloadTooLarge

_DEADLINE_S: Final = 15.0
_MAX_WAITING: Final = 16
_PROGRAM: Final = """\
import runpy, sys
sys.path[:] = sys.argv[2:]
runpy.run_path(sys.argv[1], run_name="__main__")
"""


class Outliner:
    """Runs router.api.outline beside the loop."""

    __slots__ = ("_num_waiting", "_thread")

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outline")
        self._num_waiting = 0

    async def outline(self, body: bytes) -> Outline:
        """Outline a body.

        Raises:
            PayloadTooLarge: it takes more memory or time than is allowed.
            Overloaded: many wait for this already.
        """
        if self._num_waiting >= _MAX_WAITING:
            raise Overloaded("too many large bodies are being read; try again")
        self._num_waiting += 1
        try:
            run = asyncio.get_running_loop().run_in_executor(self._thread, _run, body)
            outlined = await run
        finally:
            self._num_waiting -= 1
        if outlined is None:
            raise PayloadTooLarge("the body holds too many values to be read")
        return outlined

    def close(self) -> None:
        """Release the thread; what runs ends with its deadline."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _run(body: bytes) -> Outline | None:
    """Outline in a new process; None: it failed. Blocking."""
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(outline.__file__), *sys.path]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        killer = threading.Timer(_DEADLINE_S, process.kill)
        killer.start()
        try:
            _write(process.stdin.fileno(), body)
            process.stdin.close()
            answer = _read(process.stdout.fileno())
        except OSError:
            process.kill()
            return None
        finally:
            killer.cancel()
    try:
        return msgspec.json.decode(answer, type=Outline)
    except msgspec.DecodeError:
        return None


def _write(pipe: int, body: bytes) -> None:
    """Write it all, in pieces as large as the pipe takes, without holding the interpreter."""
    left = memoryview(body)
    while left:
        left = left[os.write(pipe, left) :]


def _read(pipe: int) -> bytes:
    parts = []
    while part := os.read(pipe, 65_536):
        parts.append(part)
    return b"".join(parts)
