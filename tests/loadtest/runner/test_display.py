"""What people see while a replay runs."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from loadtest.results import TurnResult
from loadtest.runner.display import (
    LiveDisplay,
    PlainDisplay,
    make_display,
    progress_line,
)
from loadtest.runner.tally import Tally


def add(tally: Tally, at_s: float, **fields: Any) -> None:
    tally.elapsed_s = at_s
    tally.send()
    defaults: dict[str, Any] = {"session_id": "s", "number": 0, "start_s": 0.0, "total_s": 1.0}
    tally.add(TurnResult(**defaults | fields))


def filled() -> Tally:
    tally = Tally(10, None)
    add(tally, 1.0, ttft_s=9.0, is_warm_up=True)
    add(tally, 2.0, ttft_s=2.0, num_prompt_tokens=100, num_cached_tokens=80)
    add(tally, 14.0, ttft_s=0.5, num_prompt_tokens=100, num_cached_tokens=40, late_s=0.002)
    add(tally, 15.0, ttft_s=0.7, num_prompt_tokens=100)
    add(tally, 16.0, error="timeout")
    tally.send()
    return tally


def test_running_figures() -> None:
    """Percentiles over all and of the last ten seconds; warm-up and failures are not timed."""
    tally = filled()

    assert (tally.num_done, tally.num_in_flight, tally.errors) == (5, 1, {"timeout": 1})
    assert (tally.ttft_s(0.5), tally.ttft_s(0.99)) == (0.7, 2.0)
    assert tally.recent_ttfts() == [0.5, 0.7]
    assert tally.hit_ratio == 0.6
    assert tally.late_s(0.99) == 0.002
    assert tally.left_s() == 16.0


def test_before_anything_is_done() -> None:
    """Nothing is known yet, which is not zero."""
    tally = Tally(10, None)

    assert (tally.ttft_s(0.5), tally.hit_ratio, tally.left_s()) == (None, None, None)
    assert "TTFT p50 -" in progress_line(tally)


def test_an_open_loop_lasts_until_its_last_turn() -> None:
    """How long it still takes is known from the arrivals, whatever the target does."""
    tally = Tally(10, 60.0)
    tally.elapsed_s = 45.0

    assert tally.left_s() == 15.0


def test_plain_lines() -> None:
    """Without a terminal a line every few seconds, and one at the end, with all of it."""
    console = Console(file=io.StringIO(), width=200)
    display = make_display(console)
    assert isinstance(display, PlainDisplay)
    with display:
        tally = filled()
        for _ in range(3):
            display.update(tally)
        tally.elapsed_s = 17.0
        display.update(tally)

    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 2
    for words in ("5/10 turns", "1 in flight", "p99 2 s", "cached 60.0%", "ERRORS timeout 1"):
        assert words in lines[0]


def test_a_terminal_gets_a_live_block() -> None:
    """On a terminal the same figures are drawn in place."""
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    display = make_display(console)
    assert isinstance(display, LiveDisplay)
    with display:
        display.update(filled())

    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("5/10 turns", "last 10 s", "overall", "errors: timeout 1", "about 0:16 left"):
        assert words in text
