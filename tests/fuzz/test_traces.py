"""Fuzz: a trace is read, or refused by file, line and field; nothing else comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from loadtest.traces.errors import WorkloadError
from loadtest.traces.reading import read_workload
from tests.fuzz.damage import FIXED, mutated
from tests.loadtest.traces.samples import messages, mooncake


def lines(*entries: Any) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


SAMPLES = {
    "mooncake": lines(
        mooncake(0, 700, [1, 2]),
        mooncake(10, 40, [3], session_id="s", delay=5.0, context_mode="deltas_without_responses"),
        mooncake(20, 40, [4], session_id="s", delay=5.0, after=[["s", 0]]),
    ),
    "messages": lines(messages("hello", "hi", timestamp=5)),
}


@FIXED
@given(
    data=mutated(list(SAMPLES.values())),
    skip_bad=st.booleans(),
)
def test_any_trace(file: Path, data: bytes, skip_bad: bool) -> None:
    """Its turns are whole, and refer to each other, or it is refused with its place."""
    file.write_bytes(data)

    try:
        workload = read_workload(file, skip_bad=skip_bad)
    except WorkloadError:
        return
    keys = {(turn.session_id, turn.number) for turn in workload.turns}
    assert len(keys) == len(workload.turns) > 0
    for turn in workload.turns:
        assert turn.num_input_tokens > 0
        assert turn.arrival_s >= 0.0
        assert keys.issuperset(turn.after)
