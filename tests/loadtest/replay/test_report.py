"""Figures of a run, and what is said about them."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from loadtest.replay.report import Asked, make_report, show
from loadtest.results import Run, RunInfo, TurnResult


def result(number: int, **fields: Any) -> TurnResult:
    defaults: dict[str, Any] = {
        "session_id": "s",
        "number": number,
        "start_s": float(number),
        "total_s": 1.0,
        "ttft_s": 0.1 * (number + 1),
        "num_prompt_tokens": 100,
        "num_cached_tokens": 50,
        "num_output_tokens": 10,
        "status": 200,
    }
    return TurnResult(**defaults | fields)


def failed(number: int, error: str, **fields: Any) -> TurnResult:
    return TurnResult(
        session_id="s", number=number, start_s=float(number), total_s=0.5, error=error, **fields
    )


def run(*turns: TurnResult, **info: Any) -> Run:
    base = {"label": "kv_aware", "target": "http://HOST", "workload": "w", "loop": "open"}
    return Run(info=RunInfo(**base | info), turns=turns)


def shown(run: Run, asked: dict[tuple[str, int], Asked] | None = None) -> str:
    console = Console(file=io.StringIO(), width=120)
    show(run, make_report(run, asked or {}), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_figures_leave_warm_up_and_failures_out() -> None:
    """Times and tokens are of counted turns that succeeded; errors of all of them are counted."""
    made = run(
        result(0, is_warm_up=True, ttft_s=9.0),
        failed(1, "connect", is_warm_up=True),
        result(2),
        result(3, num_cached_tokens=None),
        failed(4, "broken"),
    )

    report = make_report(made, {})

    assert report.num_errors == 2
    assert report.tables[0].rows == (
        ("turns", "3 (and 2 to warm up)"),
        ("failed", "2"),
        ("duration", "2.5 s, 0.8 a second"),
        ("prompt tokens", "200"),
        ("of them cached", "50.0%"),
        ("output tokens", "20"),
        ("driver late, p99", "0 µs"),
    )
    assert report.tables[1].rows[0] == ("TTFT", "350 ms", "400 ms", "400 ms", "400 ms", "2")


def test_errors_say_how_many_and_when() -> None:
    """Each kind of error has a row: how many, the first and the last, and a message."""
    text = shown(
        run(
            result(0),
            failed(1, "broken", error_message="cut [off]"),
            failed(3, "connect"),
            failed(9, "connect"),
            is_complete=False,
            note="the target is gone at 9.5 s: 1 of 20 turns done",
        )
    )

    rows = [line.split()[:6] for line in text.splitlines()]
    assert ["broken", "1", "1.5", "s", "1.5", "s"] in rows
    assert ["connect", "2", "3.5", "s", "9.5", "s"] in rows
    assert "cut [off]" in text
    assert "PARTIAL: the target is gone at 9.5 s" in text


def test_replicas_have_a_row_each() -> None:
    """With several replicas there is a row for each; with one there is no table."""
    two = shown(run(result(0, replica="r1"), result(1, replica="r2", num_cached_tokens=0)))
    one = shown(run(result(0, replica="r1")))

    assert "r2" in two
    assert "50.0%" in two
    assert "began while it waited" not in two
    assert "replica" not in one


def test_a_turn_without_a_replicas_name_has_a_row_too() -> None:
    """Its stream began before it was placed, so the rows add up to all turns."""
    turns = (result(0, replica="r1"), result(1, replica="r2"), result(2))

    assert "(began while it waited)" in shown(run(*turns))


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([result(0, late_s=0.06)], "the driver itself was late (p99 60 ms, over 50 ms)"),
        ([result(0, num_prompt_tokens=None)], "reports no usage"),
        ([result(0, num_cached_tokens=None)], "--enable-prompt-tokens-details"),
        ([result(0, num_output_tokens=7)], "1 of 1 replies are not as long as asked for (7 of 10"),
        ([result(0, num_prompt_tokens=130)], "counted 130 prompt tokens, the workload has 100"),
        ([], "no turn was measured"),
    ],
)
def test_what_limits_the_figures(turns: list[TurnResult], words: str) -> None:
    """A late driver, missing usage and wrong lengths are said."""
    text = " ".join(shown(run(*turns), {("s", 0): Asked(100, 10)}).split())

    assert words in text


def test_nothing_to_say_about_a_good_run() -> None:
    """A run as it should be has no notes; lengths that the model chose are not compared."""
    assert make_report(run(result(0)), {("s", 0): Asked(100, 10)}).warnings == ()
    asked = {("s", 0): Asked(100, None)}
    assert make_report(run(result(0, num_output_tokens=3)), asked).warnings == ()
