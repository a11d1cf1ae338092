"""Child processes with a log each: started, awaited, watched, and ended by their own pid.

A child is ready when it has announced itself in its log. A child that ends on its own is an error;
the error has the end of its log.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO, Final

_LEASH: Final = Path(__file__).with_name("leash.py")
_POLL_S: Final = 0.05
PATIENCE_S: Final = 5.0  # between SIGTERM and SIGKILL
_TAIL_LINES: Final = 15
_TAIL_BYTES: Final = 16_384


class ChildDied(Exception):
    """A process of ours ended, or never became ready; the message has the end of its log."""


class Child:
    """One running process.

    `announced` is the match of the pattern that its log had to show.
    """

    __slots__ = ("_process", "announced", "log", "name")

    def __init__(self, name: str, log: Path, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.log = log
        self.announced: re.Match[str]
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_announced(self, pattern: re.Pattern[str], timeout_s: float) -> None:
        """Wait until the log shows `pattern`.

        Raises:
            ChildDied: it ended first, or said nothing of the kind for `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while loop.time() < deadline_s:
            status = self._process.returncode  # before the log: what it said last is in there
            found = pattern.search(self.log.read_text(encoding="utf-8", errors="replace"))
            if found is not None:
                self.announced = found
                return
            if status is not None:
                raise self._died()
            await asyncio.sleep(_POLL_S)
        raise ChildDied(f"{self.name} was not ready after {timeout_s:g} s; {self._log_tail()}")

    async def watch(self) -> None:
        """Wait for an end that was not asked for. Cancel it to stop watching.

        Raises:
            ChildDied: always, as soon as the process has ended.
        """
        await self._process.wait()
        raise self._died()

    async def stop(self) -> None:
        """End the process: ask, wait, kill. Nothing happens if it is gone."""
        if self._process.returncode is not None:
            return
        self._send(signal.SIGTERM)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._process.wait()
        except TimeoutError:
            self._send(signal.SIGKILL)
            await self._process.wait()

    def _send(self, number: signal.Signals) -> None:
        try:
            self._process.send_signal(number)
        except ProcessLookupError:
            return  # ended between the question and the signal

    def _died(self) -> ChildDied:
        status = self._process.returncode
        assert status is not None
        how = f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        return ChildDied(f"{self.name} ended with {how}; {self._log_tail()}")

    def _log_tail(self) -> str:
        text = self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        if not text:
            return f"it said nothing ({self.log})"
        lines = "\n".join(f"    {line}" for line in text.splitlines()[-_TAIL_LINES:])
        return f"the end of its log ({self.log}):\n{lines}"


async def spawn(
    command: Sequence[str], output: BinaryIO, env: Mapping[str, str]
) -> asyncio.subprocess.Process:
    """Start a command that ends with this process, in a session of its own."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-S"),  # the leash needs no packages: 0.1 s less of processor time
        str(_LEASH),
        str(os.getpid()),
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )


@asynccontextmanager
async def running(
    name: str,
    argv: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str],
    python: str | None = None,
) -> AsyncIterator[Child]:
    """Run a Python command for as long as the context lasts.

    The child has a session of its own: Ctrl-C at the terminal reaches the command alone, which then
    ends its children in order.

    Args:
        argv: Arguments of the interpreter.
        python: The interpreter; None: this one.
    """
    with log.open("wb") as output:
        process = await spawn((python or sys.executable, *argv), output, env)
    child = Child(name, log, process)
    try:
        yield child
    finally:
        await child.stop()
