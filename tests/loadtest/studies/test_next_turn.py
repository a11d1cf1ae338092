"""loadtest.dev.studies.next_turn: agents with a person, before emulated engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.dev.studies import next_turn
from loadtest.dev.studies.next_turn import Cell, on_emulators, order_of, table

SMALL = Cell(num_engines=1, num_sessions=2, num_rounds=2, num_calls=3, pause_s=1.5, tool_s=0.01)


async def test_prompts_are_computed_early(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While the persons pause."""
    monkeypatch.setitem(next_turn.CELLS, "small", SMALL)

    found = await on_emulators("instant", "small", 1, "auto", tmp_path)

    returns = [step.result for step in found.steps if step.kind == "return"]
    assert len(returns) == 2
    assert found.counts["sent"] > 0
    assert "| small | 1 | auto |" in table([found])


def test_variants_alternate() -> None:
    """Each seed begins with the other variant."""
    assert list(order_of(["a"], [1, 2], ["off", "auto"])) == [
        ("a", 1, "off"),
        ("a", 1, "auto"),
        ("a", 2, "auto"),
        ("a", 2, "off"),
    ]
