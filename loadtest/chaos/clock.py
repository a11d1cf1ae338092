"""Run a module with a wall clock that can be set: `clock.py FILE MODULE ARGS…`.

FILE has one double: the offset of `time.time` in seconds. It is read at every call, so another
process can step the clock by writing it. The monotonic clock is not changed, as on a machine whose
time is set.
"""

from __future__ import annotations

import mmap
import runpy
import struct
import sys
import time
from pathlib import Path

_SECONDS = struct.Struct("d")


def step(file: Path, offset_s: float) -> None:
    """Set a clock to be off by `offset_s` seconds."""
    with file.open("r+b") as opened:
        opened.write(_SECONDS.pack(offset_s))


def create(file: Path) -> None:
    """Make the file of a clock that is right."""
    file.write_bytes(_SECONDS.pack(0.0))


def main(argv: list[str]) -> None:
    """Put the clock in place, then become the module."""
    file, module, *args = argv
    with open(file, "rb") as opened:
        shared = mmap.mmap(opened.fileno(), _SECONDS.size, access=mmap.ACCESS_READ)
    right = time.time

    def stepped() -> float:
        return right() + float(_SECONDS.unpack_from(shared)[0])

    time.time = stepped
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
