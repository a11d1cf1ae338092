"""Runs at the start of every engine process of the suite (the harness puts it on its path).

Forks. The CPU build starts its other processes as new interpreters, each of which imports all of
vLLM: 12 s of processor time a process. Its reason is OpenMP's threads, which do not outlive a fork;
here there is one thread. With a GPU nothing changes.

Polling. vLLM's worker polls for its next step in a loop around `os.sched_yield`, for a second after
each step. Since Linux 6.18 a thread that yields gives up the rest of its slice, as virtual time:
one that yields a million times a second runs far ahead, takes the queue's mean with it, and whoever
wakes is placed there, behind all that is busy. Seen with 6.18.44 on two cores and other load: a
process that slept 20 ms at a time woke up to 7 s late, a router's deadlines of 25 ms with it, and
transfers outlived their leases in the pool. With this: 0.3 s at worst. Only the polling changes.

AMX. Where the CPU has it, vLLM 0.32.0 (CPU build) computes attention with it, but leaves it to
oneDNN to ask the kernel for its registers. oneDNN does so for larger products only: an engine whose
first request is a few tokens long dies of SIGILL (`Worker proc VllmWorker-0 died unexpectedly (exit
code: -4)`). Here every process asks at once; where there is no AMX the kernel says no, and all is
as it was.
"""

import ctypes
import multiprocessing
import os
import platform
import sys
import time
from multiprocessing.context import BaseContext

_PAUSE_S = 0.0001

# Source: Linux, Documentation/arch/x86/xstate.rst
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def _pause() -> None:
    time.sleep(_PAUSE_S)


_context = multiprocessing.get_context


def _get_context(method: str | None = None) -> BaseContext:
    platforms = sys.modules.get("vllm.platforms")
    is_cpu = platforms is not None and platforms.current_platform.is_cpu()
    return _context("fork" if method == "spawn" and is_cpu else method)


os.sched_yield = _pause
multiprocessing.get_context = _get_context  # type: ignore[assignment]
if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
    ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
