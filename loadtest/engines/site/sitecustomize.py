"""Runs at the start of every engine process of the suite (the harness puts it on its path).

Forks. The CPU build starts its other processes as new interpreters, each of which imports all of
vLLM: 12 s of processor time a process. Its reason is OpenMP's threads, which do not outlive a fork;
here there is one thread. With a GPU nothing changes.

AMX. Where the CPU has it, vLLM 0.32.0 (CPU build) computes attention with it, but leaves it to
oneDNN to ask the kernel for its registers. oneDNN does so for larger products only: an engine whose
first request is a few tokens long dies of SIGILL (`Worker proc VllmWorker-0 died unexpectedly (exit
code: -4)`). Here every process asks at once; where there is no AMX the kernel says no, and all is
as it was.
"""

import ctypes
import multiprocessing
import platform
import sys
from multiprocessing.context import BaseContext

# Source: Linux, Documentation/arch/x86/xstate.rst
_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18

_context = multiprocessing.get_context


def _get_context(method: str | None = None) -> BaseContext:
    platforms = sys.modules.get("vllm.platforms")
    is_cpu = platforms is not None and platforms.current_platform.is_cpu()
    return _context("fork" if method == "spawn" and is_cpu else method)


multiprocessing.get_context = _get_context  # type: ignore[assignment]
if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
    ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
