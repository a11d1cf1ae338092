"""loadtest.experiments.records: what is read of decision records, and what is said of the rest."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from loadtest.experiments.records import RecordsError, load
from tests.loadtest.experiments.samples import START_S, Scene, records, write

SMALL = Scene(num_sessions=20)
MADE = records(SMALL)


def test_files_globs_directories_and_gzip_are_one(tmp_path: Path) -> None:
    """However files are named, each is read once, packed or not."""
    half = len(MADE) // 2
    write(tmp_path / "decisions-a.jsonl", MADE[:half])
    packed = write(tmp_path / "b", MADE[half:]).read_bytes()
    (tmp_path / "decisions-b.jsonl.gz").write_bytes(gzip.compress(packed))
    (tmp_path / "b").unlink()

    for patterns in (
        [str(tmp_path)],
        [str(tmp_path / "decisions-*")],
        [str(tmp_path / "decisions-a.jsonl"), str(tmp_path / "*.gz"), str(tmp_path)],
    ):
        found = load(patterns)
        assert found.num_records == len(MADE)
        assert len(found.files) == 2
        assert [e.name for e in found.experiments] == ["trial"]


def test_a_torn_last_line_is_left_out_and_named(tmp_path: Path) -> None:
    """A router that still writes is no reason to refuse its file."""
    file = write(tmp_path / "r.jsonl", MADE)
    content = file.read_bytes()
    file.write_bytes(content[:-200])

    found = load([str(file)])

    assert found.num_records == len(MADE) - 1
    assert found.num_bad == 1
    assert str(found.bad_lines[0]) == f"{file}:{len(MADE)}: the line is cut off"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no json", "not JSON"),
        ('{"level": "INFO", "message": "routed"}', "required field `schema`"),
        ("[1, 2]", "Expected `object`"),
        ('{"schema": 7, "request_id": "x"}', "version 7 is unknown (this warmroute reads 1 to 2)"),
        ('{"schema": 1, "request_id": "x", "at": 1.0}', "required field `outcome`"),
        ('{"schema": "one"}', "`$.schema`"),
        ('{"schema": 1', "not JSON"),
    ],
)
def test_foreign_lines_are_named_or_skipped(tmp_path: Path, line: str, said: str) -> None:
    """File, line and field are named; with --skip-bad they are counted instead."""
    file = write(tmp_path / "r.jsonl", MADE)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n")

    with pytest.raises(RecordsError) as caught:
        load([str(file)])
    found = load([str(file)], skip_bad=True)

    assert f"{file}:4: " in str(caught.value)
    assert said in str(caught.value)
    assert "--skip-bad" in str(caught.value)
    assert (found.num_records, found.num_bad) == (len(MADE), 1)
    assert found.bad_lines[0].line == 4


def test_older_records_lack_what_came_later(tmp_path: Path) -> None:
    """Records from before there were variants are records, of no experiment."""
    old = []
    for record in MADE:
        fields = msgspec.to_builtins(record)
        for name in ("assignment", "policy_params"):
            del fields[name]
        old.append(json.dumps(fields))
    file = tmp_path / "old.jsonl"
    file.write_text("\n".join(old) + "\n")

    found = load([str(file)])

    assert found.num_records == len(MADE)
    assert found.num_bad == 0
    with pytest.raises(RecordsError, match="none is of an experiment"):
        found.choose(None)


def test_records_that_are_there_twice_count_once(tmp_path: Path) -> None:
    """A copy of a file beside it changes nothing but a note."""
    write(tmp_path / "a.jsonl", MADE)
    write(tmp_path / "copy.jsonl", MADE[:10])

    found = load([str(tmp_path)])

    assert found.num_records == len(MADE)
    assert found.num_twice == 10


def test_an_experiment_is_chosen_by_name(tmp_path: Path) -> None:
    """One is enough without a name; of several, or for a wrong name, the message names them."""
    write(tmp_path / "a.jsonl", MADE)
    one = load([str(tmp_path)])
    write(tmp_path / "b.jsonl", records(Scene(name="other", num_sessions=20, seed=2)))
    two = load([str(tmp_path)])

    assert one.choose(None) == one.choose("trial")
    assert two.choose("other").name == "other"
    with pytest.raises(RecordsError, match=r"several experiments: other .* trial"):
        two.choose(None)
    with pytest.raises(RecordsError, match=r"no experiment 'tiral'; did you mean 'trial'\?"):
        two.choose("tiral")


def test_nothing_there_is_said(tmp_path: Path) -> None:
    """No file, no record, or a broken archive end with a name."""
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(b'{"schema": 1}\n' * 1000)[:-30])

    with pytest.raises(RecordsError, match=r"nowhere\.jsonl: no such file"):
        load([str(tmp_path / "nowhere.jsonl")])
    with pytest.raises(RecordsError, match="no decision record in"):
        load([str(empty)])
    with pytest.raises(RecordsError, match="broken"):
        load([str(broken)])


def test_of_several_definitions_the_newest_is_chosen(tmp_path: Path) -> None:
    """Each definition of a name is one of its own, of whatever design; an id chooses another."""
    old = Scene(num_sessions=20, trial="0a", control="treatment")
    new = Scene(num_sessions=20, trial="0b", seed=2, start_s=START_S + 9_000)
    slots = Scene(design="switchback", num_sessions=20, trial="0c", seed=3, start_s=START_S + 5_000)
    made = [records(scene) for scene in (old, new, slots)]
    found = load([str(write(tmp_path / "a.jsonl", [r for each in made for r in each]))])

    newest, oldest = found.choose(None), found.choose("trial", "0a")
    assert (newest.trial, newest.num_requests) == ("0b", len(made[1]))
    assert (oldest.trial, oldest.num_requests) == ("0a", len(made[0]))
    assert (newest.arms[0], oldest.arms[0]) == ("control", "treatment")
    assert [each.trial for each in found.trials("trial")] == ["0b", "0c", "0a"]
    with pytest.raises(RecordsError, match=r"no trial '0d' \(there are: 0b \(from 2027-01-15 10:3"):
        found.choose("trial", "0d")
