"""The study's tables, on a trace of a few requests."""

from __future__ import annotations

from pathlib import Path

from loadtest.docs import MAKERS, fill, queue_model
from loadtest.queue_study import LOADS, WEIGHTS
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
