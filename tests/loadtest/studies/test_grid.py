from __future__ import annotations

import pytest
from msgspec.structs import replace

from loadtest.studies import grid
from loadtest.studies.grid import LOADS, POOLS, Case, Cell, cells_of, report, verdict
from policies import POLICIES
from tests.loadtest.simulator.workloads import conversations


def cell(ratio: float) -> Cell:
    return Cell(
        case="x", load=0.9, pool=None, mean_s={"kv_aware": ratio, "min_ttft": 1.0, "random": 2.0}
    )


def test_a_loss_is_marked_and_said() -> None:
    """More than 3 % over the best other policy is a loss."""
    assert cell(1.05).best_other == "min_ttft"
    assert cell(1.05).is_lost
    assert not cell(1.03).is_lost
    assert (
        "Worse by more than 3 % in 1 of 2 cells:\n\n- x, no pool, load 0.9, against `min_ttft`: +5"
        in (verdict([cell(0.9), cell(1.05)]))
    )
    assert "Nowhere" in verdict([cell(0.9), cell(1.02)])


def test_every_policy_in_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell for each load and pool, with all policies in it; draws are averaged."""
    monkeypatch.setattr(grid, "POLICIES", {name: POLICIES[name] for name in ("random", "kv_aware")})
    draws = (conversations(4), conversations(4, seed=1))
    case = Case(name="x", draws=draws, num_blocks=100)

    cells = cells_of(case)

    assert [(c.pool, c.load) for c in cells] == [(pool, load) for pool in POOLS for load in LOADS]
    assert all(list(c.mean_s) == ["random", "kv_aware"] for c in cells)
    one = cells_of(replace(case, draws=draws[:1]))
    assert cells[0].mean_s["random"] != one[0].mean_s["random"]
    assert report(cells).count("\n| x |") == len(POOLS)


def test_generated_cases_are_drawn_alike() -> None:
    """The same seeds give the same workloads; every case has turns."""
    first, again = grid.generated_cases([0]), grid.generated_cases([0])

    assert [case.name for case in first] == ["agents", "siblings", "shared"]
    assert first == again
    assert all(len(case.draws[0].turns) > 100 for case in first)
