"""The comparison itself, with warmroute as the only contestant."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadtest.dev.peers import cost
from loadtest.dev.peers.cli import main
from loadtest.dev.peers.page import grid_tables, read
from loadtest.dev.studies.grid_run import GridFile, GridRun
from loadtest.machine import this_machine
from tests.loadtest.studies.samples import run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Name the file of a comparison; its picture goes to a folder beside that file's."""
    return tmp_path / "research" / "comparison.json"


def grid_file(folder: Path, runs: list[GridRun]) -> str:
    path = folder / "grid.json"
    made = GridFile(machine=this_machine(), command="x", runs=tuple(runs))
    path.write_bytes(msgspec.json.encode(made))
    return str(path)


def test_the_grid_is_read_from_earlier_runs(tmp_path: Path, out: Path) -> None:
    """Half an hour of engines is not spent twice. Without slow prefill there is no picture."""
    sticky = "vllm-router sticky_least_loaded"
    file = grid_file(tmp_path, [run(sticky, 1, 30_000), run("kv_aware", 1, 15_000)])

    assert main(["--only", "grid", "--grid-file", file, "--out", str(out)]) == 0

    assert "| `kv_aware` | 15,000 | 0.50 |" in grid_tables(read(out))
    assert not (tmp_path / "images").exists()


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
