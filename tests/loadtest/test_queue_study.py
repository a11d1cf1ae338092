"""The study's tables, on a trace of a few requests."""

from __future__ import annotations

from pathlib import Path

from loadtest.docs import MAKERS, fill, queue_model, staleness
from loadtest.queue_study import LOADS, ROUTERS, WEIGHTS
from policies import POLICIES


def test_every_policy_and_weight_has_a_row(tmp_path: Path) -> None:
    """One row per policy and per pair of weights, one column per load."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            f'{{"timestamp": {number * 100}, "input_length": 1500, "output_length": 1, '
            f'"hash_ids": [0, {number % 3 + 1}, {number + 10}]}}\n'
            for number in range(12)
        )
    )

    text = fill(
        "<!-- generated: queue-model -->\n<!-- end -->",
        MAKERS | {"queue-model": lambda: queue_model(trace)},
    )

    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert "12 requests of `trace.jsonl`" in text
    assert len(rows) == len(POLICIES) + len(WEIGHTS) + 4
    assert all(row.count("|") == len(LOADS) + 2 for row in rows)


def test_routers_that_hear_at_once_are_as_one(tmp_path: Path) -> None:
    """A row for each number of routers and each delay; with none the figures are one router's."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            f'{{"timestamp": {number // 10 * 3000}, "input_length": 2000, "output_length": 1, '
            f'"hash_ids": [0, {number % 7 + 1}, {number + 10}, {number + 1000}]}}\n'
            for number in range(60)
        )
    )

    text = fill(
        "<!-- generated: staleness -->\n<!-- end -->",
        MAKERS | {"staleness": lambda: staleness(trace)},
    )

    rows = [line.split("|")[2:] for line in text.splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(ROUTERS)
    assert rows[0] == rows[1]
    assert rows[0] != rows[-1]
