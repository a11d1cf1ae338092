"""The comparison itself, with warmroute as the only contestant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from loadtest.machine import this_machine
from loadtest.peers import cli, cost, forwarding, kill
from loadtest.peers.cli import main
from loadtest.peers.contestants import CONTESTANTS
from loadtest.peers.page import page, read
from loadtest.studies.cells import Cell
from loadtest.studies.grid_run import GridFile, GridRun
from tests.loadtest.studies.samples import run

OURS = CONTESTANTS[0]


@pytest.mark.usefixtures("forked_children")
async def test_warmroute_forwards_what_it_was_sent(tmp_path: Path) -> None:
    """Bodies of all three APIs arrive byte for byte; the session id as a digest."""
    found = await forwarding.observe(OURS, tmp_path, tmp_path)

    assert set(found.apis.values()) == {"identical"}
    assert found.has_query
    assert (found.session, found.lost_fields) == ("as a digest", ())


async def test_what_a_request_costs_is_measured(tmp_path: Path) -> None:
    """Every size has a figure, and the router's CPU and memory are the router's."""
    steps: list[str] = []

    found = await cost.measure(
        OURS, cost.material(is_quick=True), tmp_path, tmp_path, steps.append, is_quick=True
    )

    assert len(found.added) == len(cost.SIZES)
    assert found.turn.num_bytes > 2_000 * 3
    assert found.requests_per_s > 0
    assert found.direct_per_s > found.requests_per_s
    assert found.loaded_cpu_ms > 0
    assert found.rss_mib > 10
    assert any("in flight" in step for step in steps)


@pytest.mark.usefixtures("forked_children")
async def test_a_killed_replica_ends_no_other_turn(tmp_path: Path) -> None:
    """Turns that fail were on the replica that died, as streams; what was not begun is retried."""
    found = await kill.kill(OURS, 1, tmp_path, tmp_path, is_quick=True)

    assert found.num_planned == 12
    assert found.num_done + sum(found.errors.values()) <= found.num_planned
    assert set(found.errors) <= {"stream"}


@pytest.mark.usefixtures("forked_children")
def test_parts_are_renewed_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was measured before stays on the page."""
    out = tmp_path / "research" / "comparison.md"
    flags = ["--folder", str(tmp_path), "--routers", "warmroute", "--out", str(out), "--quick"]
    source = tmp_path / "grid.json"
    source.write_bytes(grid_file([run("session_hash", 1, 30_000)]))
    assert main([*flags, "--only", "forwarding"]) == 0
    assert main([*flags, "--only", "grid", "--grid-file", str(source)]) == 0

    text = out.read_text()

    assert "## What reaches the engine" in text
    assert "## What is computed again" in text
    assert page(read(out.with_suffix(".json"))) == text


def test_the_picture_is_drawn_with_the_page(tmp_path: Path) -> None:
    """It shows warmroute, the session hash and other routers, not warmroute's other policies."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "research" / "comparison.md"
    source = tmp_path / "grid.json"
    slow = Cell(working_set=1.7, prefill="slow")
    runs = [
        replace(run(arm, 1, num), cell=slow)
        for arm, num in {
            "session_hash": 2_000_000, "kv_aware": 1_000_000, "least_loaded": 4_000_000,
            "smg cache_aware": 3_000_000,
        }.items()
    ]  # fmt: skip
    source.write_bytes(grid_file(runs))

    assert main(["--only", "grid", "--grid-file", str(source), "--out", str(out)]) == 0

    drawn = (tmp_path / "images" / "comparison.svg").read_text()
    assert "](../images/comparison.svg)" in out.read_text()
    named = [f"<!-- {name} -->" in drawn for name in ("warmroute", "session hash", "1.00", "3.00")]
    assert all(named)
    assert "<!-- smg cache_aware -->" in drawn
    assert "least_loaded" not in drawn


def test_a_comparison_without_slow_prefill_has_no_picture(tmp_path: Path) -> None:
    """A page never links to a picture that was not drawn."""
    out = tmp_path / "research" / "comparison.md"
    source = tmp_path / "grid.json"
    source.write_bytes(grid_file([run("session_hash", 1, 30_000)]))

    assert main(["--only", "grid", "--grid-file", str(source), "--out", str(out)]) == 0

    assert not (tmp_path / "images").exists()
    assert "comparison.svg" not in out.read_text()


def test_the_grid_is_read_from_earlier_runs(tmp_path: Path) -> None:
    """Half an hour of engines is not spent twice."""
    out = tmp_path / "research" / "comparison.md"
    source = tmp_path / "grid.json"
    source.write_bytes(grid_file([run("session_hash", 1, 30_000), run("kv_aware", 1, 15_000)]))

    code = main(["--only", "grid", "--grid-file", str(source), "--out", str(out)])

    assert code == 0
    assert "| `kv_aware` | 15,000 | 0.50 |" in out.read_text()


def test_a_grid_that_is_stopped_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier one stays until the first run is there."""
    out = tmp_path / "research" / "comparison.md"
    source = tmp_path / "grid.json"
    source.write_bytes(grid_file([run("session_hash", 1, 30_000)]))
    flags = ["--only", "grid", "--routers", "warmroute", "--out", str(out)]
    assert main([*flags, "--grid-file", str(source)]) == 0
    done = [run("session_hash", 2, 20_000), run("kv_aware", 2, 10_000)]
    kept = []
    for runs in ([], done):

        def stopped(*args: Any, runs: list[GridRun] = runs, **_: Any) -> None:
            for each in runs:
                args[3](each)
            raise KeyboardInterrupt

        monkeypatch.setattr(cli, "place", stopped)
        assert main(flags) == 130
        kept.append([each.num_recomputed_tokens for each in read(out.with_suffix(".json")).grid])

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
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is installed or measured."""
    with pytest.raises(SystemExit):
        main([*flags, "--out", str(tmp_path / "research" / "page.md")])

    assert said in capsys.readouterr().err


def grid_file(runs: list[GridRun]) -> bytes:
    return msgspec.json.encode(GridFile(machine=this_machine(), command="x", runs=tuple(runs)))


def test_what_fails_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are sent at once fail as a group; what was found before is written."""

    async def fail(*_: object) -> None:
        raise ExceptionGroup("load", [RuntimeError("the router answered 500"), RuntimeError("so")])

    monkeypatch.setattr(forwarding, "observe", fail)
    out = tmp_path / "research" / "page.md"
    flags = ["--routers", "warmroute", "--folder", str(tmp_path), "--out", str(out)]

    assert main([*flags, "--only", "forwarding"]) == 1

    assert capsys.readouterr().err.splitlines()[0] == "the router answered 500"
    assert out.exists()
