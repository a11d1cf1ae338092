"""Run a command that dies with its parent: `leash.py PARENT_PID COMMAND…`.

A parent that was killed cannot end its processes; the kernel then ends them. This works on Linux
only (prctl). Elsewhere the command runs without it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # Source: linux/prctl.h


def main(argv: list[str]) -> None:
    """Ask the kernel for SIGTERM at the parent's death, then become the command.

    The setting survives exec. A parent that died before it was made is noticed by the pid.
    """
    parent, command = int(argv[0]), argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(f"the parent (process {parent}) is gone already")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
