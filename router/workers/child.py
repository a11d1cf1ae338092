"""One process that is started again when it ends, until it should end."""

from __future__ import annotations

import asyncio
import logging
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, Final

from router.base.backoff import Backoff

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_STEADY_S: Final = 60.0  # a process that lived for so long begins a new series of ends
_LOOK_S: Final = 0.02
_NOT_STARTED: Final = 127  # as shells have it


class Child:
    """A process of the parent's.

    Args:
        what: It is, for the log.
        command: Returns what to start; its argument says whether it ran before.
        is_up: Whether the process that runs is in service.
        on_end: Called when a process has ended.
        output: Where it writes; None: where the parent does.
        gives_up: Whether `run` ends if the first process ends before it was in service.

    was_up: A process of it was in service.
    failed, status: How the first process ended, if `run` gave up.
    """

    def __init__(
        self,
        what: str,
        command: Callable[[bool], Sequence[str]],
        is_up: Callable[[], bool],
        *,
        on_end: Callable[[], None] = lambda: None,
        output: IO[Any] | None = None,
        gives_up: bool = True,
    ) -> None:
        self.was_up = False
        self.failed: str | None = None
        self.status = 0
        self._what = what
        self._command = command
        self._look_up = is_up
        self._on_end = on_end
        self._output = output
        self._gives_up = gives_up
        self._process: Process | None = None
        self._is_up = False
        self._owes_reload = False
        self._ending = asyncio.Event()

    @property
    def is_settled(self) -> bool:
        """Whether the first process was in service, or will not be."""
        return self.was_up or self.failed is not None

    async def run(self) -> None:
        """Keep it running until `end`."""
        loop = asyncio.get_running_loop()
        pauses, num_ends, num_starts = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), 0, 0
        while not self._ending.is_set():
            begun_s = loop.time()
            status = await self._run_once(is_again=num_starts > 0)
            num_starts += 1
            if self._ending.is_set():
                return
            if self._gives_up and not self.was_up:
                self.failed, self.status = how(status), status
                return
            if loop.time() - begun_s >= _STEADY_S:
                num_ends = 0
                pauses.reset()
            num_ends += 1
            self._log_end(num_ends, status)
            await self._pause(pauses.next_s())

    async def _run_once(self, *, is_again: bool) -> int:
        self._owes_reload = False
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command(is_again),
                stdin=PIPE,  # it ends with this process; no preexec_fn: after a fork that can hang
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,  # Ctrl-C is the parent's to pass on
            )
        except OSError as exc:  # no memory, or no process is left
            fields = {"what": self._what, "reason": exc.strerror}
            logger.error("process cannot be started", extra=fields)
            return _NOT_STARTED
        if self._ending.is_set():  # meanwhile
            self.signal(signal.SIGTERM)
        async with asyncio.TaskGroup() as tg:
            looking = tg.create_task(self._until_up(), name=f"{self._what}: until it is up")
            status = await process.wait()
            looking.cancel()
        self._process, self._is_up = None, False
        self._on_end()
        return status

    async def _until_up(self) -> None:
        while not self._look_up():  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(_LOOK_S)
        self._is_up = True
        self.was_up = True
        if self._owes_reload:
            self.reload()

    def _log_end(self, num_ends: int, status: int) -> None:
        """Log the first two ends of a series: one that goes on must not flood the log."""
        fields = {"what": self._what, "how": how(status)}
        if num_ends == 1:
            logger.warning("process ended; it is started again", extra=fields)
        elif num_ends == 2:
            fields["longest_pause_s"] = f"{_LONGEST_PAUSE_S:g}"
            logger.error("process ends again and again; pauses between starts grow", extra=fields)
        else:
            logger.debug("process ended; it is started again", extra=fields)

    async def _pause(self, pause_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._ending.wait()

    def end(self, number: signal.Signals) -> None:
        """End it by a signal, and not be started again."""
        self._ending.set()
        self.signal(number)

    def reload(self) -> None:
        """Send SIGHUP, once it is in service: before that it would end by it."""
        self._owes_reload = not self._is_up
        if self._is_up:
            self.signal(signal.SIGHUP)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if there is one."""
        with suppress(ProcessLookupError):
            if self._process is not None and self._process.returncode is None:
                self._process.send_signal(number)


def how(status: int) -> str:
    """Describe how a process ended."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
