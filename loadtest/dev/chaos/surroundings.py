"""Run a module with a clock that can be set.

`surroundings.py FILE MODULE ARGS…`; FILE is shared with the process that disturbs it. It has the
offset of `time.time`, in seconds, and is read at every call. The monotonic clock is not changed, as
on a machine whose time is set.
"""

from __future__ import annotations

import mmap
import runpy
import struct
import sys
import time
from pathlib import Path
from typing import Final

_SHARED: Final = struct.Struct("d")


def step(file: Path, offset_s: float) -> None:
    """Set a clock to be off by `offset_s` seconds; 0 makes the file of a right one."""
    with file.open("r+b" if file.exists() else "wb") as opened:
        opened.write(_SHARED.pack(offset_s))


def main(argv: list[str]) -> None:
    """Replace the clock, then become the module."""
    file, module, *args = argv
    with open(file, "rb") as opened:
        shared = mmap.mmap(opened.fileno(), _SHARED.size, access=mmap.ACCESS_READ)
    right = time.time

    def stepped() -> float:
        return right() + float(_SHARED.unpack_from(shared)[0])

    time.time = stepped
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
