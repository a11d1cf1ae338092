"""Measure routing on this machine's GPUs, or rehearse it on the CPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    return argparse.ArgumentParser(prog="python -m loadtest.gpu run", description=__doc__)


def main(argv: Sequence[str]) -> int:
    """Measure, and write what is done when it ends."""
    parser().parse_args(argv)
    return 0
