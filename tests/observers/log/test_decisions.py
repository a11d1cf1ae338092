"""router.observers.log.decisions: records to a file, bounded, never in the way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from router.observers.log import decisions as decision_log
from router.observers.log.decisions import DecisionLog
from router.records.record import DecisionRecord
from tests.samples import decision_record


async def write_all(log: DecisionLog, *records: DecisionRecord) -> None:
    """Run the log until it is stopped, as the lifecycle does."""
    for record in records:
        log.recorded(record)
    async with asyncio.TaskGroup() as tg:
        task = tg.create_task(log.run())
        await asyncio.sleep(0)
        task.cancel()


async def test_records_are_lines_that_decode_to_themselves(tmp_path: Path) -> None:
    """What was queued is in the file when the log has stopped, in order."""
    file = tmp_path / "decisions.jsonl"
    records = [decision_record("a"), decision_record("b")]

    await write_all(DecisionLog(file, on_drop=lambda: None), *records)

    lines = file.read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=DecisionRecord) for line in lines] == records


async def test_more_than_fits_is_dropped_and_counted(tmp_path: Path, monkeypatch: object) -> None:
    """A slow disk loses records, not time."""
    drops: list[int] = []
    log = DecisionLog(tmp_path / "d.jsonl", on_drop=lambda: drops.append(1))

    for _ in range(decision_log.MAX_WAITING + 3):
        log.recorded(decision_record())

    assert len(drops) == 3


async def test_a_disk_that_refuses_loses_records_only(tmp_path: Path) -> None:
    """The log goes on and counts what it lost."""
    drops: list[int] = []
    log = DecisionLog(tmp_path / "missing" / "d.jsonl", on_drop=lambda: drops.append(1))

    await write_all(log, decision_record(), decision_record())

    assert len(drops) == 2
