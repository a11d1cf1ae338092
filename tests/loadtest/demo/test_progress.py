"""What is to be seen while policies are played."""

from __future__ import annotations

import io

from rich.console import Console

from loadtest.demo.progress import Board
from tests.loadtest.demo.samples import turn


def _played(console: Console) -> str:
    with Board(console) as board:
        row = board.add("kv_aware", 2)
        row.add(turn("s0", 0, prompt=1000, cached=600))
        row.add(turn("s0", 1, prompt=3000, cached=3000))
        row.finish()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_log_has_a_line_at_the_start_and_one_at_the_end() -> None:
    """No bar is drawn if the output is no terminal."""
    said = _played(Console(file=io.StringIO(), width=100))

    assert said.splitlines() == [
        "kv_aware: starting replicas and router",
        "kv_aware: 2 turns, 400 recomputed, 90.0% hits",
    ]


def test_terminal_has_a_bar_that_leaves_nothing_behind() -> None:
    """It shows turns and figures; afterwards its line is erased."""
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={})

    said = _played(terminal)

    assert "kv_aware" in said
    assert "2/2" in said
    assert "400 recomputed, 90.0% hits" in said
    assert said.endswith("\x1b[1A\x1b[2K")
