from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from loadtest.simulator import Halves, Setup
from loadtest.studies import ratios
from loadtest.studies.ratios import Case, Cell, cells, report
from tests.loadtest.simulator.workloads import conversations

FLEETS = (
    ("whole", Setup(num_replicas=3)),
    ("1:2", Setup(num_replicas=0, halves=Halves(num_prefill=1, num_decode=2))),
)
CASE = Case(
    name="few",
    workload=conversations(3),
    paces=(("slow", {"load": 0.5}), ("2 sessions", {"loop": "closed", "concurrency": 2})),
)


@pytest.fixture(scope="module")
def few() -> list[Cell]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ratios, "FLEETS", FLEETS)
        return cells([CASE])


def test_every_fleet_at_every_pace(few: list[Cell]) -> None:
    """Without and with a pool; prompts are apart only where there are halves."""
    assert [(c.has_pool, c.fleet, c.pace) for c in few] == [
        (has_pool, fleet, pace)
        for has_pool in (False, True)
        for fleet in ("whole", "1:2")
        for pace in ("slow", "2 sessions")
    ]
    assert all((c.apart_ratio > 0.0) == (c.fleet == "1:2") for c in few)
    assert all(0.0 < c.goodput[0] <= c.goodput[1] for c in few)


def test_the_best_are_bold(few: list[Cell]) -> None:
    """In each column and for each limit, whichever fleet it is."""
    low = replace(few[0], goodput=(1.0, 2.0))
    high = replace(few[2], goodput=(3.0, 1.99))

    found = report([low, high])

    assert "| whole | 1.00, **2.00**;" in found
    assert "| 1:2 | **3.00**, **1.99**;" in found
    assert "`few`, no pool:" in found


def test_the_command_prints_tables_and_writes_cells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a trace the agents alone."""
    monkeypatch.setattr(ratios, "FLEETS", FLEETS[:1])
    monkeypatch.setattr(ratios, "agents_case", lambda: CASE)
    file = tmp_path / "cells.json"

    assert ratios.main(["--json", str(file)]) == 0

    assert "| prefill:decode | slow | 2 sessions |" in capsys.readouterr().out
    assert len(msgspec.json.decode(file.read_bytes(), type=list[Cell])) == 4
