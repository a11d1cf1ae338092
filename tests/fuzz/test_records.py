"""Fuzz: of decision records those that are some are read; others are named, by line."""

from __future__ import annotations

from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.experiments.records import RecordsError, load
from tests.fuzz.damage import FIXED, mutated
from tests.loadtest.experiments.samples import Scene, records

GOOD = [msgspec.json.encode(record) + b"\n" for record in records(Scene(num_sessions=3))[:4]]


@settings(FIXED, max_examples=25)
@given(
    data=mutated(GOOD) | mutated((b"".join(GOOD),)) | st.binary(max_size=80), skip_bad=st.booleans()
)
def test_records_are_read_or_refused(file: Path, data: bytes, skip_bad: bool) -> None:
    """What is left out is counted."""
    file.write_bytes(data)

    try:
        found = load([str(file)], skip_bad=skip_bad)
    except RecordsError:
        return
    assert all(line.line >= 1 and line.reason for line in found.bad_lines)
    assert 0 < found.num_records <= data.count(b"\n") + 1
    assert skip_bad or all(line.is_torn for line in found.bad_lines)
