"""Fuzz: a trace is read, or refused by file, line and field; nothing else comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.traces.errors import WorkloadError
from loadtest.traces.formats import FORMATS
from loadtest.traces.reading import read_workload
from tests.fuzz.damage import FIXED, mutated
from tests.loadtest.traces.samples import bailian, mooncake


def lines(*entries: Any) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


SAMPLES = {
    "mooncake": lines(
        mooncake(0, 700, [1, 2]),
        mooncake(10, 40, [3], session_id="s", delay=5.0, context_mode="deltas_without_responses"),
        mooncake(20, 40, [4], session_id="s", delay=5.0, after=[["s", 0]]),
    ),
    "bailian": lines(bailian(1, -1, 0.5), bailian(2, 1, 3.0, turn=2)),
    "sharegpt": lines(
        {
            "id": "a",
            "conversations": [
                {"from": "human", "value": "hello"},
                {"from": "gpt", "value": "hi"},
                {"from": "tool", "value": "x"},
                {"from": "gpt", "value": "bye"},
            ],
        }
    ),
    "messages": lines(
        {
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "hi"},
            ],
            "timestamp": 5,
        }
    ),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file to write traces to."""
    return tmp_path_factory.mktemp("trace") / "trace.jsonl"


@FIXED
@given(
    data=mutated([*SAMPLES.values(), b"[" + SAMPLES["sharegpt"].strip() + b"]"]),
    format=st.none() | st.sampled_from(list(FORMATS)),
    skip_bad=st.booleans(),
)
def test_any_trace(file: Path, data: bytes, format: str | None, skip_bad: bool) -> None:
    """Its turns are whole, and refer to each other, or it is refused with its place."""
    file.write_bytes(data)

    try:
        workload = read_workload(file, format=format, skip_bad=skip_bad)
    except WorkloadError:
        return
    keys = {(turn.session_id, turn.number) for turn in workload.turns}
    assert len(keys) == len(workload.turns) > 0
    for turn in workload.turns:
        assert turn.num_input_tokens > 0
        assert turn.arrival_s >= 0.0
        assert keys.issuperset(turn.after)
