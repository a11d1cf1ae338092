"""A follower that fails is counted, logged without contents, and begun again."""

from __future__ import annotations

import asyncio
import logging

import pytest

from router.base.backoff import Backoff
from router.base.supervisor import described, keep_running

NO_PAUSE = Backoff(0.0, 0.0)


class Follower:
    """Fails as often as it is asked to, then waits for ever."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)
        self.is_steady = asyncio.Event()

    async def run(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.is_steady.set()
        await asyncio.Event().wait()


async def test_an_unexpected_error_ends_no_group(caplog: pytest.LogCaptureFixture) -> None:
    """RecursionError, a group of errors, no memory: each is one more run."""
    follower = Follower(
        RecursionError("secret"), ExceptionGroup("g", [KeyError("secret")]), MemoryError()
    )
    counted: list[str] = []
    reasons: list[str] = []

    async with asyncio.TaskGroup() as tg:
        task = tg.create_task(
            keep_running(
                follower.run,
                follower="events",
                count=counted.append,
                on_failure=reasons.append,
                subject={"candidate": "r1"},
                backoff=NO_PAUSE,
            )
        )
        await follower.is_steady.wait()
        task.cancel()

    assert counted == ["events"] * 3
    assert [r.partition(" ")[0] for r in reasons] == ["RecursionError", "KeyError", "MemoryError"]
    assert "secret" not in caplog.text


async def test_the_same_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Ten of a kind are one line, with the subject."""
    follower = Follower(*(OSError(n) for n in range(10)))

    with caplog.at_level(logging.ERROR):
        async with asyncio.TaskGroup() as tg:
            task = tg.create_task(
                keep_running(
                    follower.run,
                    follower="pool",
                    subject={"candidate": "r1"},
                    backoff=NO_PAUSE,
                )
            )
            await follower.is_steady.wait()
            task.cancel()

    assert len(caplog.records) == 1
    assert caplog.records[0].__dict__["candidate"] == "r1"


async def test_one_that_cannot_be_informed_does_no_harm() -> None:
    """The callback fails, too: the follower is begun again all the same."""
    follower = Follower(ValueError())

    def fail(_: str) -> None:
        raise RuntimeError

    async with asyncio.TaskGroup() as tg:
        task = tg.create_task(
            keep_running(follower.run, follower="pool", on_failure=fail, backoff=NO_PAUSE)
        )
        await follower.is_steady.wait()
        task.cancel()

    assert task.cancelled()


async def test_cancellation_and_returning_end_it() -> None:
    """Neither is a failure."""
    counted: list[str] = []

    async def run() -> None:
        return

    await keep_running(run, follower="pool", count=counted.append)
    steady = Follower()
    async with asyncio.TaskGroup() as tg:
        task = tg.create_task(keep_running(steady.run, follower="pool", count=counted.append))
        await steady.is_steady.wait()
        task.cancel()

    assert task.cancelled()
    assert counted == []


def test_a_failure_is_described_by_its_place() -> None:
    """The type, and the last line of this repository that it went through."""
    try:
        Backoff("x", 1.0).next_s()  # type: ignore[arg-type]
    except TypeError as exc:
        error = exc

    assert described(error).startswith("TypeError in router/base/backoff.py:")
    assert described(ValueError("secret")) == "ValueError"


def test_pauses_grow_are_capped_and_begin_anew() -> None:
    """Doubled up to the longest; jitter takes at most a half."""
    backoff = Backoff(1.0, 5.0)

    pauses = [backoff.next_s() for _ in range(6)]
    backoff.reset()

    for pause, whole in zip(pauses, [1.0, 2.0, 4.0, 5.0, 5.0, 5.0], strict=True):
        assert whole / 2 <= pause <= whole
    assert backoff.next_s() <= 1.0
