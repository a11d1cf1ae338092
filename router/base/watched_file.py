"""A file whose changes are noticed by looking at it again and again."""

from __future__ import annotations

import os
from pathlib import Path

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
