"""Log lines: a constant message, data in fields; as text or JSON; written off the event loop.

Fields come from `extra=`. No prompt text, key or token is ever a field.
"""

from __future__ import annotations

import logging
import logging.handlers
import queue
from typing import Any, Final

import orjson

_STANDARD: Final = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {
    "message",
    "asctime",
    "taskName",
}
_MAX_WAITING: Final = 50_000  # lines; more are dropped, the loop is not held


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {
        key: value
        for key, value in record.__dict__.items()
        if key not in _STANDARD and value is not None
    }


class TextFormatter(logging.Formatter):
    """`12:00:00.123 info  routed replica=r1 cached=12032 why="…"`."""

    default_time_format = "%H:%M:%S"
    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        """Write one line (more for a traceback)."""
        parts = [self.formatTime(record), f"{record.levelname.lower():7}", record.getMessage()]
        for key, value in _fields(record).items():
            text = str(value)
            parts.append(f'{key}="{text}"' if " " in text else f"{key}={text}")
        line = " ".join(parts).replace("\n", "\\n")
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


class _BoundedQueueHandler(logging.handlers.QueueHandler):
    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # formatted by the listener's thread; nothing here is pickled

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            pass  # a log that cannot be written must not stop traffic


def start(*, level: str, as_json: bool) -> logging.handlers.QueueListener:
    """Log `router` and what it uses to stderr; stop the returned listener at the end."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_WAITING)
    listener = logging.handlers.QueueListener(lines, handler)
    root = logging.getLogger()
    root.handlers[:] = [_BoundedQueueHandler(lines)]
    root.setLevel(logging.WARNING)
    logging.getLogger("router").setLevel(level.upper())
    listener.start()
    return listener
