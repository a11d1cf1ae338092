"""What is kept can be reported again; what is not ours is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from loadtest.compare.report import make_report
from loadtest.compare.store import StoreError, load, prepare, run_path, save_run
from loadtest.results import Run
from tests.loadtest.compare.samples import made_run, made_runs, made_setting

SETTING = made_setting(("kv_aware", "kv_aware:alpha=8"))
RUNS = made_runs(SETTING, {"kv_aware": 0.1, "kv_aware:alpha=8": 0.2})


def kept(out: Path, runs: list[Run] = RUNS) -> Path:
    prepare(out, SETTING)
    for run in runs:
        save_run(out, run)
    return out


def test_what_was_kept_makes_the_same_report(tmp_path: Path) -> None:
    """Setting, runs and their order come back; so does every figure."""
    setting, runs = load(kept(tmp_path / "out"))

    assert setting == SETTING
    assert runs == RUNS
    assert make_report(setting, runs) == make_report(SETTING, RUNS)


def test_part_of_a_comparison_is_read_too(tmp_path: Path) -> None:
    """Two of four runs, the last one cut off in the middle of a line."""
    out = kept(tmp_path, RUNS[:2])
    path = run_path(out, RUNS[1])
    path.write_bytes(path.read_bytes()[:-20])

    setting, runs = load(out)

    assert [run.info.is_complete for run in runs] == [True, False]
    report = make_report(setting, runs)
    assert not report.is_complete
    assert "2 runs never began" in report.note


def test_a_directory_in_use_is_not_written_over(tmp_path: Path) -> None:
    """Another run's results may be in it."""
    kept(tmp_path)

    with pytest.raises(StoreError, match="holds a comparison already"):
        prepare(tmp_path, SETTING)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        prepare(tmp_path / "file", SETTING)


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    """A directory without a setting, and a comparison without runs."""
    with pytest.raises(StoreError, match=r"has no compare\.json"):
        load(tmp_path / "none")
    prepare(tmp_path, SETTING)
    with pytest.raises(StoreError, match="no run file"):
        load(tmp_path)


def test_runs_of_another_workload_are_refused(tmp_path: Path) -> None:
    """File, line and field are named."""
    out = kept(tmp_path, RUNS[:1])
    other = replace(RUNS[1], info=replace(RUNS[1].info, workload="another one"))
    save_run(out, other)

    with pytest.raises(StoreError, match=r"line 1, workload: 'another one' is not that"):
        load(out)


def test_runs_of_another_arm_and_runs_twice_are_refused(tmp_path: Path) -> None:
    """A comparison knows its arms and has one run of each in a round."""
    out = kept(tmp_path, RUNS[:1])
    (out / "runs" / "copy.jsonl").write_bytes(run_path(out, RUNS[0]).read_bytes())
    with pytest.raises(StoreError, match="in round 1 is in"):
        load(out)
    (out / "runs" / "copy.jsonl").unlink()
    save_run(out, made_run("random", 1))

    with pytest.raises(StoreError, match="'random' is no variant of this comparison"):
        load(out)


def test_other_versions_and_damaged_files_are_refused(tmp_path: Path) -> None:
    """The message has the version that was expected."""
    out = kept(tmp_path, RUNS[:1])
    setting = json.loads((out / "compare.json").read_text())

    (out / "compare.json").write_text(json.dumps(setting | {"schema": "warmroute.compare/9"}))
    with pytest.raises(StoreError, match=r"'warmroute.compare/9' is another version"):
        load(out)
    (out / "compare.json").write_text(json.dumps(setting | {"arms": 3}))
    with pytest.raises(StoreError, match="arms"):
        load(out)
    (out / "compare.json").write_text("{")
    with pytest.raises(StoreError, match=r"compare\.json"):
        load(out)
    (out / "compare.json").write_text(json.dumps(setting))
    run_path(out, RUNS[0]).write_text('{"schema": "warmroute.run/9"}\n')
    with pytest.raises(StoreError, match=r"warmroute\.run/9"):
        load(out)
