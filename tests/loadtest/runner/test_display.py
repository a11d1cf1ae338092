"""What people see while a run goes on."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from loadtest.results import TurnResult
from loadtest.runner.display import Display


def fill(display: Display) -> None:
    """Add five turns in ten seconds, and send a sixth."""
    turns: list[tuple[float, dict[str, Any]]] = [
        (1.0, {"ttft_s": 9.0, "is_warm_up": True}),
        (2.0, {"ttft_s": 2.0, "num_prompt_tokens": 100, "num_cached_tokens": 80}),
        (6.0, {"ttft_s": 0.5, "num_prompt_tokens": 100, "num_cached_tokens": 40, "late_s": 0.002}),
        (7.0, {"ttft_s": 0.7, "num_prompt_tokens": 100}),
        (12.0, {"error": "timeout"}),
    ]
    for at_s, fields in turns:
        display.send()
        display.add(TurnResult(session_id="s", number=0, start_s=0.0, total_s=1.0, **fields), at_s)
    display.send()


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_gets_a_line_every_few_seconds_and_one_at_the_end() -> None:
    """Percentiles leave out warm-up and failures; a turn between two lines says nothing."""
    console = Console(file=io.StringIO(), width=200)

    with Display(console, "kv_aware", 10) as display:
        assert display.figures().count(" -") == 4
        fill(display)
        display.print(13.0, "done")

    lines = written(console).splitlines()
    assert [line.split()[0] for line in lines] == ["6", "12", "13"]
    assert lines[-1].strip() == (
        "13 s  5/10  TTFT p50 700 ms p90 2 s p99 2 s  hit 60.0%  late p99 2 ms  1 in flight  "
        "FAILED timeout 1  done"
    )


def test_terminal_is_left_as_it_was() -> None:
    """The cursor is shown again when the display ends, even by an exception."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120, _environ={})

    def fail() -> None:
        with Display(console, "kv_aware", 10) as display:
            fill(display)
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    shown = written(console)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
