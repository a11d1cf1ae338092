"""What people see while runs go on."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from loadtest.results import TurnResult
from loadtest.runner.display import Display, Tally

POLICIES = ["round_robin", "session_sticky", "kv_aware"]


def add(tally: Tally, at_s: float, **fields: Any) -> None:
    tally.elapsed_s = at_s
    tally.send()
    defaults: dict[str, Any] = {"session_id": "s", "number": 0, "start_s": 0.0, "total_s": 1.0}
    tally.add(TurnResult(**defaults | fields))


def filled(label: str = "kv_aware", total_turns: int = 10) -> Tally:
    tally = Tally(label, total_turns)
    add(tally, 1.0, ttft_s=9.0, is_warm_up=True)
    add(tally, 2.0, ttft_s=2.0, num_prompt_tokens=100, num_cached_tokens=80)
    add(tally, 14.0, ttft_s=0.5, num_prompt_tokens=100, num_cached_tokens=40, late_s=0.002)
    add(tally, 15.0, ttft_s=0.7, num_prompt_tokens=100)
    add(tally, 16.0, error="timeout")
    tally.send()
    return tally


def log() -> Console:
    return Console(file=io.StringIO(), width=200)


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_figures_leave_out_warm_up_and_failures() -> None:
    """Percentiles, hits, lateness, requests in flight and failures are in one line."""
    assert filled().figures() == (
        "TTFT p50 700 ms p90 2 s p99 2 s  hit 60.0%  late p99 2 ms  1 in flight  FAILED timeout 1"
    )
    assert Tally("kv_aware", 10).figures().count(" -") == 4


def test_log_gets_a_line_every_few_seconds_and_one_at_the_end() -> None:
    """Turns between two lines say nothing; the line has all figures."""
    console = log()
    tally = filled()

    with Display(console, ["kv_aware"]) as display:
        display.starting("kv_aware")
        for at_s in range(13):
            tally.elapsed_s = float(at_s)
            display.update(tally)
        display.finished(tally)

    lines = written(console).splitlines()
    assert lines[0] == "kv_aware: starting replicas and router, caches cold"
    assert [line.split()[0] for line in lines[1:]] == ["5", "10", "12"]
    for words in ("5/10", "1 in flight", "p99 2 s", "hit 60.0%", "FAILED timeout 1"):
        assert words in lines[1]
    assert lines[-1].endswith("done")


def test_terminal_is_left_as_it_was() -> None:
    """The cursor is shown again when the display ends, even by an exception."""
    console = terminal()

    def fail() -> None:
        with Display(console, POLICIES) as display:
            display.update(filled())
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    shown = written(console)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
