"""`python -m loadtest.demo JOB`: one policy in virtual time, for the demo's own use."""

from __future__ import annotations

import sys

from loadtest.demo.memory_wires import Wires
from loadtest.demo.virtual_time import install


def main() -> None:
    """Put the clock in place first; then import what takes it along."""
    clock, wires = install(), Wires.install()
    from loadtest.demo.stage import play

    play(sys.argv[1], clock, wires)


if __name__ == "__main__":
    main()
