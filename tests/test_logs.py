"""router.base.logs: a constant message, data in fields."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import time
from typing import cast

import pytest

from router.base import logs
from tests.waiting import PATIENCE_S


def record(message: str, **fields: object) -> logging.LogRecord:
    """Build what a logger passes to its handlers."""
    return logging.getLogger("router.x").makeRecord(
        "router.x", logging.INFO, "f", 1, message, (), None, extra=fields
    )


def test_text_is_one_line_with_fields() -> None:
    """Values with spaces are quoted, None is left out, line breaks cannot forge a line."""
    line = logs.TextFormatter().format(
        record("routed", replica="r1", why="two words", reported=None, evil="a\nb")
    )

    assert line.endswith('info    routed replica=r1 why="two words" evil=a\\nb')


def test_control_characters_do_not_reach_a_terminal() -> None:
    """Neither the end of a line nor an escape sequence: a client's words may be in a field."""
    path = "/a\r\n12:00 info ok\x1b[2J\x9b1m\u2028/b"
    line = logs.TextFormatter().format(record("refused", path=path))

    assert line.isprintable()
    assert r"/a\r\n12:00 info ok\x1b[2J\x9b1m\u2028/b" in line


def test_json_is_one_object() -> None:
    """Fields are keys beside time, level and message."""
    entry = json.loads(logs.JsonFormatter().format(record("routed", tokens=3)))

    assert (entry["message"], entry["level"], entry["tokens"]) == ("routed", "info", 3)
    assert entry["time"] > 0


def test_a_traceback_is_kept() -> None:
    """In both shapes."""
    try:
        raise ValueError("boom")
    except ValueError as exc:
        failed = record("failed")
        failed.exc_info = (type(exc), exc, exc.__traceback__)

    assert "ValueError: boom" in logs.TextFormatter().format(failed)
    assert "ValueError: boom" in json.loads(logs.JsonFormatter().format(failed))["traceback"]


class _Unprintable:
    def __str__(self) -> str:
        raise ValueError


def test_a_line_that_cannot_be_written_is_reported() -> None:
    """And those after it are written."""
    stream = io.BytesIO()
    writer = logs.LineWriter(cast(io.RawIOBase, stream), logs.TextFormatter())
    writer.start()
    writer.emit(record("first", what=_Unprintable()))
    writer.emit(record("second"))
    writer.stop(within_s=PATIENCE_S)

    first, second = stream.getvalue().decode().splitlines()
    assert first == "a log line of router.x could not be written: ValueError"
    assert second.endswith("second")


def test_a_closed_stream_does_no_harm() -> None:
    """The lines are lost, and counted."""
    lost: list[int] = []
    stream = io.BytesIO()
    writer = logs.LineWriter(cast(io.RawIOBase, stream), logs.TextFormatter(), lost=lost.append)
    stream.close()
    writer.start()
    writer.emit(record("lost"))
    writer.stop(within_s=PATIENCE_S)

    assert sum(lost) == 1


def test_a_stream_that_nobody_reads_is_left_behind() -> None:
    """What it did not take is lost and counted; stopping takes no longer than it may."""
    lost: list[int] = []
    reader, stream = os.pipe()
    with io.FileIO(reader), io.FileIO(stream, "w") as full:
        writer = logs.LineWriter(full, logs.TextFormatter(), lost=lost.append)
        writer.start()
        for number in range(3_000):
            writer.emit(record(f"line {number}", why="x" * 100))
        writer.stop(within_s=0.2)

        assert sum(lost) > 1_000
        os.read(reader, 1 << 20)  # let the thread go


def test_too_many_lines_are_dropped() -> None:
    """What waits is bounded; the oldest lines are kept, and the others are counted."""
    lost: list[int] = []
    stream = io.BytesIO()
    writer = logs.LineWriter(
        cast(io.RawIOBase, stream), logs.TextFormatter(), lost=lost.append, max_waiting=2
    )
    for number in range(3):
        writer.emit(record(f"line {number}"))
    writer.start()
    writer.stop(within_s=PATIENCE_S)

    assert stream.getvalue().decode().count("line") == 2
    assert sum(lost) == 1


def test_a_line_of_a_finalizer_is_written() -> None:
    """It may come in the middle of another line, from any thread, and holds nothing up."""
    stream = io.BytesIO()
    writer = logs.LineWriter(cast(io.RawIOBase, stream), logs.TextFormatter())

    class Dropped:
        def __init__(self) -> None:
            self.circle = self

        def __del__(self) -> None:
            writer.emit(record("finalized"))

    writer.start()
    for _ in range(2_000):
        Dropped()
        writer.emit(record("line"))
    gc.collect()
    writer.stop(within_s=PATIENCE_S)

    assert stream.getvalue().decode().count("finalized") == 2_000


def test_fields_may_come_as_one() -> None:
    """A line for each request has its fields in one, written as any others; absent ones are not."""
    many = record("routed", fields={"tokens": 3, "pool": None, "why": "two words"})
    single = record("routed", tokens=3, pool=None, why="two words")
    single.created = many.created
    single.msecs = many.msecs

    for formatter in (logs.TextFormatter(), logs.JsonFormatter()):
        assert formatter.format(many) == formatter.format(single)


def test_a_line_has_its_own_time() -> None:
    """In local time, to the millisecond, in whatever order lines come."""
    formatter = logs.TextFormatter()
    for created in (1_000.25, 1_000.75, 5_000.0, 1_000.5):
        line = record("x")
        line.created, line.msecs = created, created % 1 * 1000
        clock = time.strftime("%H:%M:%S", time.localtime(created))

        assert formatter.format(line).startswith(f"{clock}.{int(created % 1 * 1000):03d} ")


def test_lines_are_written_by_another_thread(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`start` logs router's loggers at the level asked for; the listener flushes at its stop."""
    for name in ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing"):
        monkeypatch.setattr(logging, name, getattr(logging, name))  # as it is, afterwards
    root, ours = logging.getLogger(), logging.getLogger("router")
    before = (root.handlers[:], root.level, ours.level)
    try:
        listener = logs.start(level="info", as_json=False)
        logging.getLogger("router.request.story").info("routed", extra={"replica": "r1"})
        logging.getLogger("router.request.story").debug("hidden")
        listener.stop(within_s=PATIENCE_S)
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        ours.setLevel(before[2])

    written = capfd.readouterr().err
    assert "routed replica=r1" in written
    assert "hidden" not in written
