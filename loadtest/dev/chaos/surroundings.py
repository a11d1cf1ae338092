"""Run a module with a clock that can be set and a resolver that can fail.

`surroundings.py FILE MODULE ARGS…`; FILE is shared with the process that disturbs it:

    offset    of `time.time`, in seconds. The monotonic clock is not changed, as on a machine whose
              time is set.
    failure   what a question for a name under `DOMAIN` gets: 0 for this machine's address, else
              the number of an error of getaddrinfo

Both are read at every call.
"""

from __future__ import annotations

import mmap
import runpy
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import uvloop

DOMAIN: Final = ".chaos.test"
"""Names that only these processes know."""

_ADDRESS: Final = "127.0.0.1"
_SHARED: Final = struct.Struct("dd")
_OFFSET_AT: Final = 0
_FAILURE_AT: Final = 8


def create(file: Path) -> None:
    """Make the file of a process with a right clock and a resolver that answers."""
    file.write_bytes(_SHARED.pack(0.0, 0.0))


def step(file: Path, offset_s: float) -> None:
    """Set a clock to be off by `offset_s` seconds."""
    _write(file, _OFFSET_AT, offset_s)


def fail_names(file: Path, error: int) -> None:
    """Make every name fail with an error of getaddrinfo; 0: names resolve again."""
    _write(file, _FAILURE_AT, float(error))


def _write(file: Path, position: int, value: float) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        opened.write(struct.pack("d", value))


def main(argv: list[str]) -> None:
    """Replace clock and resolver, then become the module."""
    file, module, *args = argv
    with open(file, "rb") as opened:
        shared = mmap.mmap(opened.fileno(), _SHARED.size, access=mmap.ACCESS_READ)
    _set_clock(lambda: float(_SHARED.unpack_from(shared)[0]))
    _set_resolver(lambda: int(_SHARED.unpack_from(shared)[1]))
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _set_clock(offset_s: Callable[[], float]) -> None:
    right = time.time

    def stepped() -> float:
        return right() + offset_s()

    time.time = stepped


def _set_resolver(failure: Callable[[], int]) -> None:
    """Answer for `DOMAIN`, where threads ask and where uvloop does, which asks libuv."""
    system, loops = socket.getaddrinfo, uvloop.Loop.getaddrinfo

    def address_of(host: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if not isinstance(name, str) or not name.rstrip(".").endswith(DOMAIN):
            return host
        if error := failure():
            raise socket.gaierror(error, "as the fault has it")
        return _ADDRESS

    def in_a_thread(host: Any, *args: Any, **named: Any) -> Any:
        return system(address_of(host), *args, **named)

    async def in_a_loop(self: uvloop.Loop, host: Any, *args: Any, **named: Any) -> Any:
        return await loops(self, address_of(host), *args, **named)

    socket.getaddrinfo = in_a_thread
    uvloop.Loop.getaddrinfo = in_a_loop  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    main(sys.argv[1:])
