"""Table, words, JSON and picture from made-up runs."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from loadtest.demo import picture
from loadtest.demo.report import (
    SCHEMA_VERSION,
    Report,
    least_tokens,
    make_report,
    settings,
    show,
    words,
    write_json,
)
from loadtest.demo.run import Run
from loadtest.demo.workload import FULL, plan
from loadtest.extras import MissingExtra
from tests.loadtest.demo.samples import made_run, turn

PLAN = plan(FULL)
RUNS = [
    made_run("round_robin", ttft_s=0.4, cached=200),
    made_run("session_sticky", ttft_s=0.2, cached=700),
    made_run("kv_aware", ttft_s=0.1, cached=800),
]


def _report(runs: Sequence[Run] = RUNS) -> Report:
    seeds = sorted({run.seed for run in runs})
    return make_report(FULL, seeds, [PLAN] * len(seeds), runs)


def test_summaries_are_by_run_and_comparisons_by_baseline() -> None:
    """kv_aware is held against every other policy, by each measure."""
    report = _report()

    assert [run.policy for run in report.runs] == ["round_robin", "session_sticky", "kv_aware"]
    assert report.runs[0].recomputed_tokens == {"r1": 9600, "r2": 9600, "r3": 9600}
    assert report.runs[0].imbalance == 1.0
    assert report.runs[2].prediction_exact_ratio == 1.0
    assert {(c.arm, c.baseline) for c in report.comparisons} == {
        ("kv_aware", "round_robin"),
        ("kv_aware", "session_sticky"),
    }
    assert len(report.comparisons) == 6


def test_without_kv_aware_the_last_policy_is_compared() -> None:
    """Any list of policies gives a comparison."""
    report = _report(RUNS[:2])

    assert {c.arm for c in report.comparisons} == {"session_sticky"}


def test_words_call_a_spread_a_spread_and_worse_worse() -> None:
    """The text follows the figures, not the hope."""
    worse = [made_run("session_sticky", ttft_s=0.1), made_run("kv_aware", ttft_s=0.3)]

    said = "\n".join(words(_report(worse)))

    assert "mean TTFT × 3.00" in said
    assert "), more" in said
    assert "recomputed tokens × 1.00 (1.00 to 1.00), within the spread" in said


def test_headline_compares_recomputed_tokens_with_the_best_first() -> None:
    """The verdict needs no clock; a loss is called one, and so is a draw."""
    lost = [made_run("round_robin", cached=800), made_run("kv_aware", cached=700)]
    drawn = [made_run("round_robin"), made_run("kv_aware")]

    assert _report().headline == (
        "kv_aware recomputes 33 % fewer prompt tokens than session_sticky "
        "and 75 % fewer than round_robin"
    )
    assert _report(lost).headline == "kv_aware recomputes 50 % more prompt tokens than round_robin"
    assert "no fewer and no more prompt tokens than round_robin" in _report(drawn).headline
    assert _report(RUNS[2:]).headline == "kv_aware recomputes 7.2K prompt tokens"


def test_verdict_and_tokens_come_first() -> None:
    """What holds on every machine leads, times follow."""
    console = Console(file=io.StringIO(), width=100)

    show(_report(), console)

    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("kv_aware recomputes 33 % fewer")
    assert lines[2].split()[:3] == ["policy", "recomputed", "hit"]


def test_words_always_carry_the_caveat() -> None:
    """That replicas are emulated, and time is virtual, is said every time."""
    caveat = words(_report())[-1]

    assert "emulated" in caveat
    assert "Time is virtual" in caveat
    assert "session id" in caveat


def test_words_name_every_limit() -> None:
    """Failures, other prompts and caches not known exactly are all said."""
    doubtful = made_run("kv_aware", failed=True, view="degraded")
    odd = made_run("session_sticky")
    odd.results[0] = turn("s0", 0, prompt=2000)

    said = "\n".join(words(_report([odd, doubtful])))

    assert "1 turns FAILED (http_503)" in said
    assert "1 turns had another prompt" in said
    assert "kv_aware: r2 degraded" in said


def test_repetitions_are_given_as_a_range() -> None:
    """Two seeds: rows are numbered, and the range over seeds stands beside the interval."""
    runs = [
        made_run(policy, ttft_s=ttft, seed=seed)
        for seed in (1, 2)
        for policy, ttft in (("session_sticky", 0.2), ("kv_aware", 0.1 * seed))
    ]
    console = Console(file=io.StringIO(), width=100)

    report = _report(runs)
    show(report, console)

    assert "rounds 0.50 to 1.00" in " ".join(words(report))
    assert isinstance(console.file, io.StringIO)
    assert "kv_aware #2" in console.file.getvalue()


def test_everything_fits_a_hundred_columns() -> None:
    """Settings, table and words, with the longest policy name."""
    console = Console(file=io.StringIO(), width=100)
    slow = [made_run("session_sticky", ttft_s=1.5), made_run("kv_aware", ttft_s=3.2)]

    show(_report(slow), console)

    assert isinstance(console.file, io.StringIO)
    assert max(map(len, console.file.getvalue().splitlines())) <= 100
    assert max(map(len, settings(FULL, PLAN))) <= 100


def test_json_says_its_version(tmp_path: Path) -> None:
    """results.json reads back as the report."""
    report = _report()

    write_json(report, tmp_path)

    plain = json.loads((tmp_path / "results.json").read_text())
    assert plain["schema_version"] == SCHEMA_VERSION
    assert msgspec.convert(plain, Report) == report


def test_least_tokens_counts_every_text_once() -> None:
    """The preamble once, then what each turn adds to the last prompt and its reply."""
    results = [
        turn("s0", 0, prompt=1000, output=50),
        turn("s0", 1, prompt=1400, output=10),  # + 350
        turn("s1", 0, prompt=1100),  # + 100 beyond the preamble
        turn("s0.2.0", 0, prompt=1500),  # forked after turn 1: + 90
        turn("s0.9.0", 0, prompt=9000),  # of a turn that never succeeded: not counted
        turn("s1", 1, error="timeout"),
    ]

    assert least_tokens(results) == 1000 + 350 + 100 + 90
    assert least_tokens([]) == 0


def test_run_without_a_success_is_reported_too() -> None:
    """What is not known is None or 0, not a crash."""
    bare = msgspec.structs.replace(made_run("kv_aware"), results=[turn("s0", 0, error="connect")])

    report = _report([bare])

    assert report.runs[0].recomputed_tokens == {"r1": 0, "r2": 0, "r3": 0}
    assert report.runs[0].imbalance == 1.0
    assert report.runs[0].prediction_exact_ratio is None
    assert report.num_errors == 1
    assert report.comparisons == []


def test_picture_is_drawn_as_png_and_svg(tmp_path: Path) -> None:
    """Both files are there and are what their names say; a failed run is drawn as well."""
    runs = [*RUNS[:2], msgspec.structs.replace(RUNS[2], policy="prefix_hash", results=[])]

    paths = picture.draw(_report(runs), tmp_path)

    assert [path.name for path in paths] == ["demo.png", "demo.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in paths[1].read_bytes()


def test_bars_split_new_text_from_what_is_computed_again() -> None:
    """The parts add up to what the run computed, and the first one is the same for all."""
    report = _report()

    parts = [picture.split(report, run) for run in report.runs]

    assert [sum(part) for part in parts] == [28800, 10800, 7200]
    assert {part[0] for part in parts} == {report.least_tokens}


def test_without_matplotlib_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture is an extra; its absence names the extra."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(MissingExtra, match="plots"):
        picture.draw(_report(), tmp_path)
