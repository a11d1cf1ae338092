"""Calls that may never return, in threads of their own.

An executor's threads are waited for when the process ends; these are not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def in_thread(call: Callable[[], T], *, name: str) -> asyncio.Future[T]:
    """Make a call in a daemon thread.

    Raises:
        RuntimeError: there are too many threads.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def finish(settle: Callable[[], None]) -> None:
        if not result.done():
            settle()

    def run() -> None:
        try:
            settle = partial(result.set_result, call())
        except Exception as exc:
            settle = partial(result.set_exception, exc)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(finish, settle)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
