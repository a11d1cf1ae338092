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
from loadtest.demo.run import Run, parse_load
from loadtest.demo.workload import FULL, plan
from loadtest.extras import MissingExtra
from loadtest.results import TurnResult
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
    assert report.runs[0].recomputed_tokens == (9000, 18000, 27000)
    assert report.runs[0].imbalance == 1.5
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


def test_words_always_carry_the_caveat() -> None:
    """That replicas are emulated, and time and tokens scaled, is said every time."""
    caveat = words(_report())[-1]

    assert "emulated" in caveat
    assert f"{FULL.speed:g} times" in caveat
    assert "session id" in caveat


def test_words_name_every_limit() -> None:
    """Failures, other prompts, a busy machine and caches not known exactly are all said."""
    doubtful = msgspec.structs.replace(
        made_run("kv_aware", failed=True, view="degraded"), driver_lag_p99_s=0.2
    )
    odd = made_run("session_sticky")
    odd.results[0] = turn("s0", 0, prompt=2000)

    said = "\n".join(words(_report([odd, doubtful])))

    assert "1 turns FAILED (http_503)" in said
    assert "1 turns had another prompt" in said
    assert "machine was busy" in said
    assert "kv_aware: r2 degraded" in said


def test_times_of_a_busy_machine_get_no_verdict() -> None:
    """Where the driver was late, times are shown without a claim; tokens keep theirs."""
    late = msgspec.structs.replace(RUNS[2], driver_lag_p99_s=0.2)

    report = _report([RUNS[1], late])

    assert [c.verdict for c in report.comparisons] == ["blurred", "blurred", "less"]
    assert " ".join(words(report)).count("no verdict") == 2


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


def test_json_says_its_version_and_holds_every_turn(tmp_path: Path) -> None:
    """results.json reads back as the report; every run has its turns beside it."""
    report = _report()

    write_json(report, RUNS, tmp_path)

    plain = json.loads((tmp_path / "results.json").read_text())
    assert plain["schema_version"] == SCHEMA_VERSION
    assert msgspec.convert(plain, Report) == report
    lines = (tmp_path / "turns-kv_aware-1.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=TurnResult) for line in lines] == RUNS[2].results


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


def test_run_without_samples_or_predictions_is_reported_too() -> None:
    """What is not known is None or empty, not a crash."""
    bare = msgspec.structs.replace(
        made_run("kv_aware"), samples=[], results=[turn("s0", 0, error="connect")]
    )

    report = _report([bare])

    assert report.runs[0].recomputed_tokens == ()
    assert report.runs[0].imbalance == 1.0
    assert report.runs[0].prediction_exact_ratio is None
    assert report.num_errors == 1
    assert report.comparisons == []


def test_picture_is_drawn_as_png_and_svg(tmp_path: Path) -> None:
    """Both files are there and are what their names say; a failed run is drawn as well."""
    runs = [*RUNS[:2], msgspec.structs.replace(RUNS[2], policy="prefix_hash", results=[])]

    paths = picture.draw(_report(runs), runs, tmp_path)

    assert [path.name for path in paths] == ["demo.png", "demo.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in paths[1].read_bytes()


def test_without_matplotlib_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture is an extra; its absence names the extra."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(MissingExtra, match="plots"):
        picture.draw(_report(), RUNS, tmp_path)


def test_hits_are_those_of_the_last_seconds() -> None:
    """Three of four tokens come from the cache all along; the first sample shows nothing."""
    times, ratios = picture.hit_series(RUNS[0].samples)

    assert times[0] == 1.0
    assert set(ratios) == {0.75}


def test_load_is_read_from_the_engines_own_page() -> None:
    """Labels are summed over, other metrics with the same beginning are not."""
    page = (
        "# HELP vllm:num_requests_running text\n"
        'vllm:num_requests_running{engine="0",model_name="tiny"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="tiny"} 2.0\n'
        'vllm:num_requests_running_other{engine="0"} 9.0\n'
        'vllm:prefix_cache_queries_total{engine="0"} 1.5e+03\n'
        "vllm:prefix_cache_hits_total 500.0\n"
    )

    load = parse_load(page)

    assert load.num_running == 5
    assert load.num_waiting == 0
    assert load.num_recomputed_tokens == 1000
