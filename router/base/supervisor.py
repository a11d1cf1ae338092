"""Keeps a follower running, whatever it reads.

A follower (of an engine's events, of a replica, of the pool's master, of Redis) reads what other
processes wrote. Errors in that should be handled where it is decoded; this is the net below. An
unexpected exception ends one run of one follower, never the router. It is counted, and logged with
its type and place, because its message may quote data. Parts that depend on the follower are
informed, and it starts again after a pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from router.base.backoff import Backoff

logger = logging.getLogger(__name__)

STEADY_S: Final = 60.0
"""A run of so long went well: the next failure is logged again, and the pauses start over."""

_PAUSES_S: Final = (0.5, 30.0)
_ROOT: Final = Path(__file__).parent.parent.parent
_LIBRARY: Final = Path(traceback.__file__).parent  # Python's own
_MOST_CHARS: Final = 300

_Error = TypeVar("_Error", bound=BaseException)


def ignore(_: str) -> None:
    """Do nothing: a default for callbacks."""


async def keep_running(
    run: Callable[[], Awaitable[None]],
    *,
    follower: str,
    count: Callable[[str], None] = ignore,
    on_failure: Callable[[str], None] = ignore,
    subject: Mapping[str, str] | None = None,
    backoff: Backoff | None = None,
) -> None:
    """Run until it returns or is cancelled, and start it again where it fails.

    Args:
        run: Starts over with each call.
        follower: Its kind, a label of `warmroute_follower_failures_total`.
        count: Takes the kind, once a failure.
        on_failure: Takes the reason, before the pause: what depends on it goes on without.
        subject: What it follows, as log fields.
        backoff: The pauses; None: from half a second to half a minute.
    """
    backoff = backoff or Backoff(*_PAUSES_S)
    logged = ""
    while True:
        started_s = time.monotonic()
        num_cancelled = _num_cancelled()
        try:
            await run()
            return
        except Exception as exc:
            reason = described(exc)
        if time.monotonic() - started_s >= STEADY_S:
            backoff.reset()
            logged = ""
        count(follower)
        if reason != logged:
            logged = reason
            logger.error(
                "task failed: it is restarted",
                extra={"follower": follower, **(subject or {}), "reason": reason},
            )
        try:
            on_failure(reason)
        except Exception as exc:
            logger.error(
                "task failed: its dependents could not be informed",
                extra={"follower": follower, "reason": described(exc)},
            )
        if _num_cancelled() > num_cancelled:
            # Before Python 3.13 a task group that is cancelled while one of its tasks fails
            # raises the failure only; a loop that goes on after it would never end.
            raise asyncio.CancelledError
        await asyncio.sleep(backoff.next_s())


def described(error: BaseException) -> str:
    """Name an exception's type and place, never its message; of a group its first one."""
    if isinstance(error, BaseExceptionGroup):
        error = first_of(error)
    place = _place(error)
    return f"{type(error).__name__}{f' in {place}' if place else ''}"


def blamed(error: BaseException) -> str:
    """Describe what code of an operator's own raised, in one line.

    Only where it cannot quote a request: `described` leaves the message out.
    """
    if isinstance(error, BaseExceptionGroup):
        error = first_of(error)
    text, place = " ".join(str(error).split())[:_MOST_CHARS], _place(error)
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{said} ({place})" if place else said


def first_of(group: BaseExceptionGroup[_Error]) -> _Error:
    """Find the first error of a group, which may hold groups."""
    error = group.exceptions[0]
    return first_of(error) if isinstance(error, BaseExceptionGroup) else error


def _place(error: BaseException) -> str:
    """Name the last line of ours, or of an operator's own code, that an exception came through."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if "site-packages" in path.parts or path.is_relative_to(_LIBRARY):
            continue
        if path.is_relative_to(_ROOT):
            place = f"{path.relative_to(_ROOT)}:{frame.lineno}"
        elif path.exists():  # not of frozen modules
            place = f"{path.name}:{frame.lineno}"
    return place


def _num_cancelled() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0
