"""Pictures of commands in a terminal: `python -m loadtest.recording` runs and draws them.

    python -m loadtest.recording check    docs/images/check.svg; two emulated replicas
    python -m loadtest.recording demo     docs/images/demo-terminal.svg; a minute or more

A picture shows the output of a real run. It loads nothing: rich's own template asks a third party
for a font.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from loadtest.runner.stack import start_replicas

ROOT: Final = Path(__file__).resolve().parent.parent
COLUMNS: Final = 100
_WIDEST: Final = 132
_ROWS: Final = 50
_FONT: Final = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)
_TEMPLATE: Final = _FONT.sub("", CONSOLE_SVG_FORMAT).replace("Fira Code, monospace", "monospace")
_CONTROL: Final = re.compile(r"(\r?\n|\r|\x1b\[\d*A|\x1b\[2?K|\x1b\[\?\d+[hl])")


def run(arguments: Sequence[str], columns: int, folder: str) -> str:
    """Run warmroute in a terminal of that many columns, in a folder; draw its standard output.

    Raises:
        RuntimeError: the command failed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "LINES")}
    env = {**kept, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "router.cli", *arguments]
    got = bytearray()
    with subprocess.Popen(
        command, stdout=theirs, stderr=subprocess.DEVNULL, cwd=folder, env=env
    ) as process:
        os.close(theirs)
        try:
            while read := os.read(ours, 65_536):
                got += read
        except OSError:  # EIO: the other side is closed
            pass
        os.close(ours)
    if process.returncode != 0:
        raise RuntimeError(f"{arguments[0]} ended with {process.returncode}:\n{got.decode()}")
    return draw(f"warmroute {' '.join(arguments)}", got.decode())


def settled(raw: str) -> str:
    """Return the lines that stay on the screen: progress that was overwritten is left out."""
    lines, row = [""], 0
    for part in _CONTROL.split(raw):
        if part.endswith("\n"):
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.startswith("\x1b[") and part.endswith("A"):
            row = max(0, row - int(part[2:-1] or 1))
        elif part.startswith("\x1b[") and part.endswith("K"):
            lines[row] = ""
        elif not _CONTROL.fullmatch(part):
            lines[row] += part
    return "\n".join(line.rstrip() for line in lines).rstrip()


def draw(command: str, raw: str) -> str:
    """Draw a command line and its output as SVG, as wide as the widest line."""
    shown = settled(raw).replace(f"{ROOT}/", "")
    text = Text.assemble(("$ ", "bold green"), (f"{command}\n", "bold"), Text.from_ansi(shown))
    width = max(line.cell_len for line in text.split())
    console = Console(record=True, file=io.StringIO(), width=width, force_terminal=True)
    console.print(text, soft_wrap=True)
    return console.export_svg(
        title="",
        theme=MONOKAI,
        code_format=_TEMPLATE,
        unique_id="warmroute",
        font_aspect_ratio=0.61,
    )


async def check() -> str:
    """Draw `check` on two emulated replicas, which have answered a request each."""
    with tempfile.TemporaryDirectory(prefix="recording-") as folder:
        async with start_replicas([], 2, Path(folder)) as replicas:
            flags = [part for one in replicas for part in ("--replica", one.announced[1])]
            flags += ["--port", "0", "--admin-port", "0"]  # another router may run here
            return await asyncio.to_thread(run, ["check", *flags], _WIDEST, folder)


async def demo() -> str:
    """Draw the demo."""
    with tempfile.TemporaryDirectory(prefix="recording-") as folder:
        return await asyncio.to_thread(run, ["demo"], COLUMNS, folder)


COMMANDS: Final = {"check": (check, "check.svg"), "demo": (demo, "demo-terminal.svg")}


def main(argv: Sequence[str] | None = None) -> int:
    """Record the commands that are asked for."""
    asked = argparse.ArgumentParser(prog="python -m loadtest.recording")
    asked.add_argument("command", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)}")
    asked.add_argument("--out", type=Path, default=ROOT / "docs/images", help="the folder")
    args = asked.parse_args(argv)
    for name in args.command or COMMANDS:
        if name not in COMMANDS:
            asked.error(f"COMMAND: {name!r} is none of {', '.join(COMMANDS)}")
        record, file = COMMANDS[name]
        (args.out / file).write_text(asyncio.run(record()) + "\n", encoding="utf-8")
        print(f"wrote {args.out / file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
