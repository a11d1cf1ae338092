"""`python -m loadtest.gpu run` and `python -m loadtest.gpu kit`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final

COMMANDS: Final = {
    "run": "measure routing on this machine's GPUs, or rehearse it on the CPU",
    "kit": "pack vLLM for a machine without a package index",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that is asked for."""
    lines = "\n".join(f"  {name}    {text}" for name, text in COMMANDS.items())
    asked = argparse.ArgumentParser(
        prog="python -m loadtest.gpu",
        description=f"The study on a real GPU.\n\n{lines}",
        epilog="python -m loadtest.gpu COMMAND --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asked.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    words = list(sys.argv[1:] if argv is None else argv)
    command: str = asked.parse_args(words[:1]).command
    status: int = importlib.import_module(f"loadtest.gpu.{command}").main(words[1:])
    return status


if __name__ == "__main__":
    raise SystemExit(main())
