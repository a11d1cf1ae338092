"""The system that a router runs on: its shortages, its service manager, its files and libraries.

shortage         what this machine is short of: no other server is to blame for it
service manager  what systemd is told: sd_notify(3) and sd_watchdog_enabled(3)
watched file     changes are noticed by looking at it again and again
extras           the command that installs an optional library (an extra of pyproject.toml)
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def shortage(exc: BaseException) -> str | None:
    """Name the shortage behind a failed connection (`EMFILE`); None: it is something else.

    Looks through what the error was raised from: libraries wrap the system's.
    """
    seen: BaseException | None = exc
    for _ in range(16):
        if seen is None:
            break
        if isinstance(seen, OSError) and seen.errno in _SHORTAGES:
            return errno.errorcode[seen.errno]
        seen = seen.__cause__ or seen.__context__
    return None


def notify(environment: Mapping[str, str], state: str) -> None:
    """Send a state, such as `READY=1`; do nothing if no service manager listens."""
    address = environment.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(state.encode(), address)


def watchdog_s(environment: Mapping[str, str]) -> float | None:
    """Return how long to wait between two `WATCHDOG=1`; None: nobody waits for them."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    within_us = environment.get("WATCHDOG_USEC", "")
    return int(within_us) / 2e6 if within_us.isdecimal() and int(within_us) else None


_Signature = tuple[int, int, int]


class WatchedFile:
    """A file, as it was last reported: its time, size and inode, through symbolic links.

    Blocking: not for the event loop.
    """

    __slots__ = ("_last", "_path", "_reported")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reported = self._last = _signature(path)

    def has_changed(self, *, at_once: bool = False) -> bool:
        """Return whether the file has changed since the last report, and is not being written.

        A change counts once two looks have seen the same (or `at_once`), and is reported once.
        """
        found = _signature(self._path)
        is_quiet, self._last = at_once or found == self._last, found
        if found == self._reported or not is_quiet:
            return False
        self._reported = found
        return True


def _signature(path: Path) -> _Signature | None:
    """Return what distinguishes versions of a file; None: there is none to read."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def install_hint(extra: str) -> str:
    """Return how to install the libraries of an extra.

    The command names the libraries, not warmroute: it works for a checkout, for a wheel and for
    an image, and needs no package index that has warmroute.

    Raises:
        ValueError: there is no extra of that name with libraries of its own.
    """
    marker = f'extra == "{extra}"'
    libraries = [
        requirement.partition(";")[0].strip()
        for requirement in metadata.requires("warmroute") or ()
        if requirement.partition(";")[2].strip() == marker
    ]
    if not libraries:
        raise ValueError(f"no extra {extra!r}")
    return f"Install the extra `{extra}`: pip install " + " ".join(f"'{lib}'" for lib in libraries)
