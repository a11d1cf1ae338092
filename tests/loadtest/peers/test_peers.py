"""The comparison itself, with warmroute as the only contestant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from loadtest.dev.peers import cli, cost
from loadtest.dev.peers.cli import main
from loadtest.dev.peers.contestants import CONTESTANTS
from loadtest.dev.peers.page import Comparison, cost_table, grid_tables, read
from loadtest.dev.studies.cells import Cell
from loadtest.dev.studies.grid_run import GridFile, GridRun
from loadtest.machine import this_machine
from tests.loadtest.studies.samples import run

OURS = CONTESTANTS[0]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Name the file of a comparison; its picture goes to a folder beside that file's."""
    return tmp_path / "research" / "comparison.json"


def grid_file(folder: Path, runs: list[GridRun]) -> str:
    path = folder / "grid.json"
    made = GridFile(machine=this_machine(), command="x", runs=tuple(runs))
    path.write_bytes(msgspec.json.encode(made))
    return str(path)


async def test_what_a_request_costs_is_measured(tmp_path: Path) -> None:
    """Every size has a figure, and the router's CPU and memory are the router's."""
    steps: list[str] = []

    found = await cost.measure(
        OURS, cost.material(is_quick=True), tmp_path, tmp_path, steps.append, is_quick=True
    )

    assert len(found.added) == len(cost.SIZES)
    assert found.turn.num_bytes > 2_000 * 3
    assert found.direct_per_s > found.requests_per_s > 0
    assert found.loaded_cpu_ms > 0
    assert found.rss_mib > 10
    assert any("in flight" in step for step in steps)
    table = cost_table(Comparison(machine=this_machine(), date="", costs=(found,)))
    assert "| warmroute `kv_aware` | " in table
    assert "16 in flight" in table


def test_the_grid_is_read_from_earlier_runs(tmp_path: Path, out: Path) -> None:
    """Half an hour of engines is not spent twice. Without slow prefill there is no picture."""
    file = grid_file(tmp_path, [run("session_hash", 1, 30_000), run("kv_aware", 1, 15_000)])

    assert main(["--only", "grid", "--grid-file", file, "--out", str(out)]) == 0

    assert "| `kv_aware` | 15,000 | 0.50 |" in grid_tables(read(out))
    assert not (tmp_path / "images").exists()


def test_the_picture_shows_warmroute_the_session_hash_and_others(tmp_path: Path, out: Path) -> None:
    """warmroute's other policies are not drawn."""
    pytest.importorskip("matplotlib")
    slow = Cell(working_set=1.7, prefill="slow")
    tokens = {
        "session_hash": 2_000_000, "kv_aware": 1_000_000, "least_loaded": 4_000_000,
        "smg cache_aware": 3_000_000,
    }  # fmt: skip
    file = grid_file(tmp_path, [replace(run(arm, 1, n), cell=slow) for arm, n in tokens.items()])

    assert main(["--only", "grid", "--grid-file", file, "--out", str(out)]) == 0

    drawn = (tmp_path / "images" / "comparison.svg").read_text()
    for name in ("warmroute", "session hash", "smg cache_aware", "1.00", "3.00"):
        assert f"<!-- {name} -->" in drawn
    assert "least_loaded" not in drawn


def test_a_grid_that_is_stopped_keeps_what_is_done(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier grid stays until the first new run is there."""
    file = grid_file(tmp_path, [run("session_hash", 1, 30_000)])
    flags = ["--only", "grid", "--routers", "warmroute", "--out", str(out)]
    assert main([*flags, "--grid-file", file]) == 0
    done = [run("session_hash", 2, 20_000), run("kv_aware", 2, 10_000)]
    kept = []
    for runs in ([], done):

        def stopped(*args: Any, runs: list[GridRun] = runs, **_: Any) -> None:
            for each in runs:
                args[3](each)
            raise KeyboardInterrupt

        monkeypatch.setattr(cli, "place", stopped)
        assert main(flags) == 130
        kept.append([each.num_computed_tokens for each in read(out).grid])

    assert kept == [[30_000], [20_000, 10_000]]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--routers", "nginx"], "none has nginx in its name"),
        (["--only", "speed"], "invalid choice"),
        (["--grid-file", "/nowhere.json"], "nowhere"),
    ],
)
def test_wrong_flags_are_named(
    flags: list[str], said: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is installed or measured."""
    with pytest.raises(SystemExit):
        main([*flags, "--out", str(out)])

    assert said in capsys.readouterr().err


def test_what_fails_is_said_in_one_line(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are sent at once fail as a group; what was found before is written."""

    async def fail(*_: object, **__: object) -> None:
        raise ExceptionGroup("load", [RuntimeError("the router answered 500"), RuntimeError("so")])

    monkeypatch.setattr(cost, "measure", fail)
    flags = ["--routers", "warmroute", "--folder", str(tmp_path), "--out", str(out), "--quick"]

    assert main([*flags, "--only", "cost"]) == 1

    assert "the router answered 500" in capsys.readouterr().err.splitlines()
    assert out.exists()
