"""Run files: what is written is read again, also after a crash; damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.results import Predicted, Run, RunInfo, TurnResult
from loadtest.runner.run_file import UNFINISHED, RunFileError, RunWriter, read_run, write_run

INFO = RunInfo(
    label="a", target="http://127.0.0.1:1", workload="w", loop="open", settings={"model": "tiny"}
)
TURNS = tuple(
    TurnResult(
        session_id="s",
        number=number,
        start_s=1.5,
        total_s=2.5,
        ttft_s=0.25,
        predicted=Predicted(gpu=16),
        due_s=1.0,
        late_s=0.5,
    )
    for number in range(3)
)


def write(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def test_a_run_comes_back(tmp_path: Path) -> None:
    """What `write_run` wrote, `read_run` reads."""
    run = Run(info=INFO, turns=TURNS)

    write_run(tmp_path / "run.jsonl", run)

    assert read_run(tmp_path / "run.jsonl") == run


def test_a_run_is_complete_only_at_its_end(tmp_path: Path) -> None:
    """Until `end` the file says that the run is not over, and has every turn so far."""
    path = tmp_path / "run.jsonl"
    with RunWriter(path) as writer:
        writer.begin(INFO)
        writer.add(TURNS[0])
        early = read_run(path)
        writer.add(TURNS[1])
        writer.end(INFO)

    assert (early.info.is_complete, early.info.note) == (False, UNFINISHED)
    assert early.turns == TURNS[:1]
    assert read_run(path) == Run(info=INFO, turns=TURNS[:2])


def test_a_long_note_is_cut_not_the_file(tmp_path: Path) -> None:
    """The first line never grows over the turns behind it."""
    path = tmp_path / "run.jsonl"
    info = RunInfo(label="a", target="t", workload="w", loop="open", note="n" * 5000)
    with RunWriter(path) as writer:
        writer.begin(INFO)
        writer.add(TURNS[0])
        writer.end(info)

    run = read_run(path)

    assert run.turns == TURNS[:1]
    assert 500 < len(run.info.note) < 5000


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    """Nothing is written over unless that is asked for."""
    path = write(tmp_path / "run.jsonl", "precious")

    with pytest.raises(FileExistsError), RunWriter(path):
        pass

    assert path.read_text() == "precious\n"
    with RunWriter(path, overwrite=True) as writer:
        writer.begin(INFO)
    assert read_run(path).turns == ()


def test_a_cut_off_last_line_is_left_out(tmp_path: Path) -> None:
    """After a crash in the middle of a line the rest is kept, and the note says so."""
    path = tmp_path / "run.jsonl"
    write_run(path, Run(info=INFO, turns=TURNS))
    path.write_bytes(path.read_bytes()[:-30])

    run = read_run(path)

    assert run.turns == TURNS[:2]
    assert not run.info.is_complete
    assert "line 4, the last one, is cut off" in run.info.note


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([""], "empty"),
        (["hello"], "line 1: no run file"),
        ([{"timestamp": 0, "hash_ids": []}], "line 1: no run file"),
        ([[1, 2]], "line 1: no run file"),
        ([{"schema": "warmroute.run/2"}], "line 1, schema: 'warmroute.run/2' is another version"),
        ([{"schema": "warmroute.run/1"}], "line 1: Object missing required field `label`"),
        (["INFO", "{nonsense", {}], "line 2: not JSON"),
        (["INFO", {"session_id": "s", "number": "one"}], "line 2, number: Expected `int`"),
        (
            ["INFO", {"session_id": "s", "number": 1, "start_s": 0, "total_s": 1, "ttft_s": "x"}],
            "line 2, ttft_s: Expected `float | null`",
        ),
        (["INFO", "", {"number": 1}], "line 3: Object missing required field"),
    ],
)
def test_damage_is_named(tmp_path: Path, lines: list[object], words: str) -> None:
    """Foreign, empty, newer and damaged files: an error with file, line and field."""
    info = {"schema": "warmroute.run/1", "label": "", "target": "", "workload": "", "loop": "open"}
    path = write(tmp_path / "run.jsonl", *(info if line == "INFO" else line for line in lines))

    with pytest.raises(RunFileError) as caught:
        read_run(path)

    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_fields_of_tomorrow_are_passed_over(tmp_path: Path) -> None:
    """A field that this version does not know is no reason to refuse a file of its schema."""
    path = tmp_path / "run.jsonl"
    write_run(path, Run(info=INFO, turns=TURNS))
    path.write_text(path.read_text().replace('"session_id"', '"mood":"good","session_id"'))

    assert read_run(path).turns == TURNS
