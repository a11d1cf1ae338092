"""Log lines: a constant message, data in fields; as text or JSON; written off the event loop.

Fields come from `extra=`. A line for each request has all of them in one, `fields`, because logging
copies each field into the record. No prompt text, key or token is ever a field.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO, RawIOBase
from queue import Empty, SimpleQueue
from typing import Any, Final

import orjson

_STANDARD: Final = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {
    "message",
    "asctime",
    "taskName",
}
_MAX_WAITING: Final = 50_000  # lines; more are dropped, the loop is not held
_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # of terminals, and line ends
_PAUSE_S: Final = 0.02
_STOP_S: Final = 2.0  # for what waits at the end
_AT_ONCE: Final = 32  # lines formatted without giving up the GIL: half a millisecond


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    own = record.__dict__
    given = own.get("fields")
    if given is None:
        given = {key: value for key, value in own.items() if key not in _STANDARD}
    return {key: value for key, value in given.items() if value is not None}


class TextFormatter(logging.Formatter):
    """`12:00:00.123 info  routed replica=r1 cached=12032 why="…"`."""

    def __init__(self) -> None:
        super().__init__()
        self._second = -1
        self._clock = ""  # what it is written as

    def _time_of(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._clock = second, time.strftime("%H:%M:%S", time.localtime(second))
        return f"{self._clock}.{int(record.msecs):03d}"

    def format(self, record: logging.LogRecord) -> str:
        """Write one line (more for a traceback)."""
        parts = [self._time_of(record), f"{record.levelname.lower():7}", record.getMessage()]
        for key, value in _fields(record).items():
            text = str(value)
            parts.append(f'{key}="{text}"' if " " in text else f"{key}={text}")
        line = " ".join(parts)
        if not line.isprintable():
            line = _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], line)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (unix seconds), level, message, the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line."""
        entry = {
            "time": record.created,
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(entry, default=str).decode()


class LineWriter(logging.Handler):
    """Takes lines without waiting; a thread of its own formats and writes them.

    The thread sleeps until there is a line, and then a moment longer. Waking it for each line costs
    more than the line (CPU of a 20 KB request, one in flight: 952 us instead of 816). A line may
    come from a finalizer, in the middle of another line. `SimpleQueue.put` is the only way to wake
    a thread that may be entered again.

    Lines are lost if nobody reads them, or too slowly; the router goes on, and ends in time.

    Args:
        stream: Unbuffered: a stalled write must hold no lock that the end of the process needs.
        lost: Called with how many lines were lost.
    """

    def __init__(
        self,
        stream: RawIOBase,
        formatter: logging.Formatter,
        *,
        lost: Callable[[int], object] = lambda number: None,
        max_waiting: int = _MAX_WAITING,
    ) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._stream = stream
        self._lost = lost
        self._max_waiting = max_waiting
        self._waiting: SimpleQueue[logging.LogRecord | None] = SimpleQueue()  # None: wake up
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line for the thread; too many are dropped: traffic goes before its log."""
        if self._waiting.qsize() < self._max_waiting:
            self._waiting.put(record)
        else:
            self._lost(1)

    def start(self) -> None:
        """Start to write."""
        self._thread.start()

    def stop(self, within_s: float = _STOP_S) -> None:
        """Write what is left, and end; a write that takes longer is given up."""
        self._stopping.set()
        self._waiting.put(None)
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._lost(self._waiting.qsize())

    def _run(self) -> None:
        while not self._stopping.is_set():
            first = self._waiting.get()
            self._stopping.wait(_PAUSE_S)
            self._write([first])

    def _write(self, records: list[logging.LogRecord | None]) -> None:
        """Write these, and then all that wait."""
        while records:
            lines = [self._line(record) for record in records if record is not None]
            left = memoryview("".join(lines).encode(errors="backslashreplace"))
            try:
                while left:
                    if not (num_written := self._stream.write(left)):  # it does not block, full
                        raise BlockingIOError
                    left = left[num_written:]
            except (OSError, ValueError):  # stderr is full or closed
                self._lost(len(lines))
            records = self._take()

    def _take(self) -> list[logging.LogRecord | None]:
        """Remove and return some of what waits."""
        records: list[logging.LogRecord | None] = []
        with suppress(Empty):
            while len(records) < _AT_ONCE:
                records.append(self._waiting.get_nowait())
        return records

    def _line(self, record: logging.LogRecord) -> str:
        try:
            return f"{self.format(record)}\n"
        except Exception as exc:  # of a field's own __str__, say
            return f"a log line of {record.name} could not be written: {type(exc).__name__}\n"


def start(
    *, level: str, as_json: bool, lost: Callable[[int], object] = lambda number: None
) -> LineWriter:
    """Log `router` and what it uses to stderr; stop the returned writer at the end.

    Args:
        lost: Called with how many lines were lost, from any thread.
    """
    # No line shows the caller, so logging need not walk through frames for it.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    if sys.stderr is None:  # it was closed at the start
        stream = FileIO(os.devnull, "w")
    else:
        stream = FileIO(sys.stderr.fileno(), "w", closefd=False)
    writer = LineWriter(stream, JsonFormatter() if as_json else TextFormatter(), lost=lost)
    root = logging.getLogger()
    root.handlers[:] = [writer]
    root.setLevel(logging.WARNING)
    logging.getLogger("router").setLevel(level.upper())
    writer.start()
    return writer
