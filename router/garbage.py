"""Short garbage collections, at times of our choosing.

CPython's full collection looks at every container there is: 100,000 objects of the libraries and
more of remembered prompts take 25 ms and up, on the event loop, in the middle of a request. Here
what survived a second is frozen (`gc.freeze`): no collection looks at it again, it is still freed
when its last reference goes. What dies in a cycle after that is found while no request waits.

Measured with 16 requests of 20 KB in flight: p99 54 -> 20 ms, CPU 688 -> 603 us a request; the
collections of a second take 0.2 to 1.7 ms.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Final

_PERIOD_S: Final = 1.0
_FULL_AFTER_S: Final = (600.0, 3600.0)
"""When frozen objects are looked at again, too: cycles among them are a leak until then. From the
first on if no request is in flight, at the second in any case: one pause an hour."""

_YOUNG: Final = (20_000, 10, 10)
"""Thresholds: most of a request's objects go with it, looking for cycles in them is in vain."""


async def collect_garbage(is_idle: Callable[[], bool]) -> None:
    """Collect until cancelled; changes the collector of this process and sets it back.

    Args:
        is_idle: Whether a pause of 50 ms would hold up no request now.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_YOUNG)
    loop = asyncio.get_running_loop()
    full_s = loop.time()
    try:
        while True:
            waited_s = loop.time() - full_s
            if waited_s >= _FULL_AFTER_S[1] or (waited_s >= _FULL_AFTER_S[0] and is_idle()):
                gc.unfreeze()
                full_s = loop.time()
            collect_and_freeze()
            await asyncio.sleep(_PERIOD_S)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def collect_and_freeze() -> None:
    """Collect what is not frozen, and freeze what is left."""
    gc.collect()
    gc.freeze()
