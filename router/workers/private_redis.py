"""The Redis of a parent's own, for its workers: on a socket, nothing is saved."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_MEMORY: Final = "2gb"
_CONNECT_S: Final = 0.1
_ENDS_WITH_PARENT: Final = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class PrivateRedis:
    """Where it is, and how it is started.

    Args:
        folder: For its socket and its log; only this user can read it.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._socket = folder / "redis"
        self.log = folder / "redis.log"
        self.url = f"unix://{self._socket}?db=0"

    def command(self, _: bool) -> Sequence[str]:
        """Return what to start: the kernel ends it when this process is gone."""
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "save": "",
            "appendonly": "no",
            "maxmemory": _MEMORY,
            "maxmemory-policy": "noeviction",
            "databases": "1",
            "loglevel": "warning",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        wrapper = [sys.executable, "-I", "-S", "-c", _ENDS_WITH_PARENT, str(os.getpid())]
        return [*wrapper, self._program, *arguments]

    def is_up(self) -> bool:
        """Return whether it accepts connections."""
        with socket.socket(socket.AF_UNIX) as wire:
            wire.settimeout(_CONNECT_S)
            try:
                wire.connect(str(self._socket))
            except OSError:
                return False
        return True

    def last_words(self) -> str:
        """Return the last line of its log."""
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")
