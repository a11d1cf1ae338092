"""Decision records of a router before it knew sessions and causes, and of one that does.

`records/before-sessions.jsonl` was written at commit 8394ecb: two agents with three turns each.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from loadtest.estimate.cli import estimate
from loadtest.experiments import redecide
from loadtest.experiments.cli import report
from loadtest.experiments.records import load
from router.records.record import Change, Computed, DecisionRecord, Loss, Move

BEFORE = Path(__file__).parent / "records" / "before-sessions.jsonl"

CAUSES = Computed(
    tokens={"changed": 500, "moved": 400, "evicted": 300, "new": 20},
    num_before=1200,
    change=Change(part="system", offset=0, digest="0123456789abcdef", num_in_row=3),
    move=Move(origin="r1", ttft_here_ms=120.0, ttft_there_ms=900.0),
    loss=Loss(replica="r1", since_s=12.5, num_between_tokens=90_000, ago_s=3.0),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Six records of each time."""
    old = [
        msgspec.json.decode(line, type=DecisionRecord) for line in BEFORE.read_bytes().splitlines()
    ]
    assert [record.computed for record in old] == [None] * 6
    new = [
        replace(
            record,
            request_id=f"{record.request_id}-2",
            at=record.at + 60,
            session="1cc2079c1ac1f2f3",
            computed=CAUSES,
        )
        for record in old
    ]
    path = tmp_path / "decisions.jsonl"
    packed = b"".join(msgspec.json.encode(record) + b"\n" for record in new)
    assert packed.count(b'"computed":{"tokens":{"changed":500') == 6
    path.write_bytes(BEFORE.read_bytes() + packed)
    return path


def test_a_report_reads_them(file: Path) -> None:
    found = load([str(file)])
    result = CliRunner().invoke(report, [str(file)])

    assert (found.num_records, found.num_bad) == (12, 0)
    assert "12 records" in result.output
    assert result.exit_code == 2, result.output  # none is of an experiment


def test_each_is_decided_as_it_was(file: Path) -> None:
    found = redecide([file])

    assert found.agrees
    assert found.num_same == 12


def test_an_estimate_reads_them(file: Path) -> None:
    result = CliRunner().invoke(estimate, [str(file), "--cache-tokens", "4000"])

    assert result.exit_code == 0, result.output
    assert "12 requests in 2 sessions" in result.output
