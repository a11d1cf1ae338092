"""Running numbers, and how the display shows them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from loadtest.demo.display import (
    LiveDisplay,
    PlainDisplay,
    make_display,
    progress_line,
)
from loadtest.demo.tally import ReplicaLoad, Tally
from tests.loadtest.demo.samples import turn


def _tally(num_turns: int = 4) -> Tally:
    tally = Tally("kv_aware", 700, 3)
    for number in range(num_turns):
        tally.add(turn("s0", number, ttft_s=0.1 * (number + 1), prompt=1000, cached=750))
    return tally


def _text(display_width: int, renderable: object) -> str:
    console = Console(file=io.StringIO(), width=display_width, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_nothing_is_known_before_the_first_turn() -> None:
    """An empty tally has no percentile and no hit ratio, not a zero."""
    tally = Tally("kv_aware", 10, 3)

    assert tally.ttft_s(0.5) is None
    assert tally.hit_ratio is None
    assert progress_line(tally).count(" -") == 3


def test_turns_add_up() -> None:
    """Tokens sum, first-token times rank, whatever order they come in."""
    tally = _tally()
    tally.add(turn("s1", 0, ttft_s=0.05, prompt=1000, cached=0))

    assert tally.num_turns == 5
    assert tally.num_recomputed_tokens == 2000
    assert tally.hit_ratio == 0.6
    assert tally.ttft_s(0.0) == 0.05
    assert tally.ttft_s(0.5) == 0.2
    assert tally.ttft_s(1.0) == 0.4


def test_failed_turn_counts_as_failed_only() -> None:
    """A failure moves the bar, not the percentiles, and the line says so."""
    tally = _tally()
    tally.add(turn("s1", 0, error="http_503"))
    tally.add(turn("s1", 1, ttft_s=None))

    assert tally.num_turns == 6
    assert tally.num_errors == 1
    assert tally.ttft_s(1.0) == 0.4
    assert "FAILED 1" in progress_line(tally)


def test_lines_fit_a_hundred_columns() -> None:
    """The longest line of a log is at most 100 columns wide."""
    tally = _tally()
    tally.loads = (ReplicaLoad(num_running=18, num_waiting=9),) * 3
    tally.num_prompt_tokens = 9_000_000
    tally.add(turn("s1", 0, error="timeout"))

    assert len(f"{120:5.0f} s  {progress_line(tally)}") <= 100


def test_log_gets_a_line_every_few_seconds_and_one_at_the_end() -> None:
    """Turns between two lines say nothing."""
    console = Console(file=io.StringIO(), width=100)
    tally = _tally()

    with PlainDisplay(console) as display:
        display.starting("kv_aware")
        for at_s in range(13):
            tally.elapsed_s = float(at_s)
            display.update(tally)
        display.finished(tally)

    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("kv_aware: starting")
    assert [line.split()[0] for line in lines[1:]] == ["5", "10", "12"]
    assert lines[-1].endswith("done")


def test_terminal_gets_bars_and_a_log_lines() -> None:
    """What is shown depends on where it goes."""
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={})

    assert isinstance(make_display(terminal, ["kv_aware"]), LiveDisplay)
    assert isinstance(make_display(Console(file=io.StringIO()), ["kv_aware"]), PlainDisplay)


def test_bars_show_what_ran_what_runs_and_what_comes() -> None:
    """One row per policy in its state; replicas below; never wider than 100 columns."""
    display = LiveDisplay(
        Console(file=io.StringIO()), ["round_robin", "session_sticky", "kv_aware"]
    )
    ran, runs = _tally(), _tally()
    ran.policy = "round_robin"
    runs.policy = "session_sticky"
    runs.add(turn("s1", 0, error="timeout"))
    runs.loads = (ReplicaLoad(num_running=30, num_waiting=4), ReplicaLoad(), ReplicaLoad())

    display.starting("round_robin")
    assert "starting" in _text(100, display.render())
    display.update(ran)
    display.finished(ran)
    assert "running" not in _text(100, display.render())
    display.starting("session_sticky")
    display.update(runs)
    shown = _text(100, display.render())

    assert "1 failed" in shown
    assert "30 running   4 waiting" in shown
    assert "to come" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_bars_leave_the_terminal_as_it_was() -> None:
    """The cursor is shown again when the display ends, an exception or not."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)

    def fail() -> None:
        with LiveDisplay(console, ["kv_aware"]) as display:
            display.update(_tally())
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().rindex("\x1b[?25h") > console.file.getvalue().rindex("\x1b[?25l")
