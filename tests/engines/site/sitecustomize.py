"""Runs at the start of every engine process of the suite (the harness puts it on its path).

vLLM's worker polls for its next step in a loop around `os.sched_yield`, for a second after each
step. Since Linux 6.18 a thread that yields gives up the rest of its slice, as virtual time: one
that yields a million times a second runs far ahead, takes the queue's mean with it, and whoever
wakes is placed there, behind all that is busy. Seen with 6.18.44 on two cores and other load: a
process that slept 20 ms at a time woke up to 7 s late, a router's deadlines of 25 ms with it, and
transfers outlived their leases in the pool. With this: 0.3 s at worst. Only the polling changes.
"""

import os
import time

_PAUSE_S = 0.0001


def _pause() -> None:
    time.sleep(_PAUSE_S)


os.sched_yield = _pause
