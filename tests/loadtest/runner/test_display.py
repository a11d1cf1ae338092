"""What people see while runs go on."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from loadtest.results import TurnResult
from loadtest.runner.display import LiveDisplay, PlainDisplay, make_display, progress_line
from loadtest.runner.tally import Tally

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


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def text_of(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(renderable)
    return written(console)


def test_running_figures() -> None:
    """Percentiles over all and of the last ten seconds; warm-up and failures are not timed."""
    tally = filled()

    assert (tally.num_done, tally.num_in_flight, tally.errors) == (5, 1, {"timeout": 1})
    assert (tally.ttft_s(0.0), tally.ttft_s(0.5), tally.ttft_s(0.99)) == (0.5, 0.7, 2.0)
    assert tally.recent_ttfts() == [0.5, 0.7]
    assert (tally.hit_ratio, tally.num_recomputed_tokens) == (0.6, 80)
    assert tally.late_s(0.99) == 0.002
    assert tally.left_s() == 16.0


def test_before_anything_is_done() -> None:
    """Nothing is known yet, which is not zero."""
    tally = Tally("kv_aware", 10)

    assert (tally.ttft_s(0.5), tally.hit_ratio, tally.left_s()) == (None, None, None)
    assert progress_line(tally).count(" -") == 5


def test_an_open_loop_lasts_until_its_last_turn() -> None:
    """How long it still takes is known from the arrivals, whatever the target does."""
    tally = Tally("kv_aware", 10, 60.0)
    tally.elapsed_s = 45.0

    assert tally.left_s() == 15.0


def test_turns_may_be_counted_before_their_results_come() -> None:
    """As in a simulation, which gives its results at the end."""
    tally = Tally("kv_aware", 2)
    tally.advance(2)

    tally.add(TurnResult(session_id="s", number=0, start_s=0.0, total_s=1.0), advances=False)

    assert tally.num_done == 2


def test_log_gets_a_line_every_few_seconds_and_one_at_the_end() -> None:
    """Turns between two lines say nothing; the line has all figures."""
    console = log()
    tally = filled()

    with make_display(console, ["kv_aware"]) as display:
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


def test_runs_of_several_labels_are_named_and_counted() -> None:
    """The last line of a run says which of how many it was, and what else there is to say."""
    console = log()

    with make_display(console, POLICIES, 2) as display:
        display.finished(filled("session_sticky"), "round 1")
        display.finished(filled(), "round 1  NOT COMPLETE: the target is gone")

    first, second = written(console).splitlines()
    assert first.startswith("session_sticky  1/6  ")
    assert first.endswith("round 1")
    assert second.startswith("kv_aware        2/6  ")
    assert "the target is gone" in second


def test_lines_fit_a_hundred_columns() -> None:
    """A line of a log with many turns."""
    tally = filled(total_turns=700)
    tally.num_done, tally.errors = 690, {}

    assert len(f"session_sticky  {progress_line(tally)}") <= 100


def test_terminal_gets_a_table_and_a_log_lines() -> None:
    """What is shown depends on where it goes."""
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={})

    assert isinstance(make_display(terminal, POLICIES), LiveDisplay)
    assert isinstance(make_display(log(), POLICIES), PlainDisplay)


def test_table_shows_what_ran_what_runs_and_what_comes() -> None:
    """One row per label in its state; the run that goes on below; never wider than 100 columns."""
    display = LiveDisplay(log(), POLICIES)
    ran, runs = filled("round_robin"), filled("session_sticky")

    display.starting("round_robin")
    assert "starting" in text_of(display.render())
    display.update(ran)
    display.finished(ran)
    assert "running" not in text_of(display.render())
    display.starting("session_sticky")
    display.update(runs)
    shown = text_of(display.render())

    for words in ("5/10 1 failed", "to come", "last 10 s: TTFT 700 ms",
                  "about 0:16 left", "errors: timeout 1"):  # fmt: skip
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_table_counts_rounds() -> None:
    """Where there are several."""
    display = LiveDisplay(log(), POLICIES, 2)

    display.finished(filled())

    assert "1/2" in text_of(display.render())


def test_table_leaves_the_terminal_as_it_was() -> None:
    """The cursor is shown again when the display ends, an exception or not."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)

    def fail() -> None:
        with LiveDisplay(console, POLICIES) as display:
            display.update(filled())
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    shown = written(console)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
