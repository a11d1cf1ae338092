"""What this machine is short of: no replica, and no other server, is to blame for it."""

from __future__ import annotations

import errno
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
