"""router.base.garbage: collections see what is new, and everything at times; memory goes back."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import platform
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.base import garbage


class Node:
    """Something that can be part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_new_garbage_goes_and_what_lives_is_frozen() -> None:
    """A cycle without an owner is collected; one with an owner is not looked at again."""
    alive = Node()
    dead = weakref.ref(Node())

    garbage.collect_and_freeze()

    assert dead() is None
    assert gc.get_freeze_count() > 0
    assert not any(thing is alive for thing in gc.get_objects())


@pytest.mark.parametrize("becomes_idle", [True, False])
async def test_cycles_that_died_frozen_are_found_while_idle_or_in_the_end(
    becomes_idle: bool,
) -> None:
    """Not before, and the collector is afterwards as it was."""
    after_s = (0.0, math.inf) if becomes_idle else (math.inf, 0.0)
    thresholds = gc.get_threshold()
    idle = False
    node = Node()
    seen = weakref.ref(node)
    async with asyncio.TaskGroup() as group:
        collecting = group.create_task(
            garbage.collect_garbage(lambda: idle, period_s=0.0, full_after_s=after_s)
        )
        await asyncio.sleep(0)
        del node
        for _ in range(3):
            await asyncio.sleep(0)
        missed = seen() is not None
        idle = becomes_idle
        async with asyncio.timeout(60):
            while seen() is not None:  # noqa: ASYNC110 (a collection has no event)
                await asyncio.sleep(0)
        collecting.cancel()

    assert missed is becomes_idle
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives back what is free")
async def test_memory_between_what_lives_goes_back_to_the_system() -> None:
    """What was freed below something that lives, which glibc keeps by itself."""
    blocks = [bytearray(b"x") * 60_000 for _ in range(2_000)]
    alive = blocks[::100]
    blocks.clear()
    before = resident_bytes()
    async with asyncio.TaskGroup() as group, asyncio.timeout(120.0):
        collecting = group.create_task(
            garbage.collect_garbage(lambda: False, period_s=0.0, trim_s=0.0)
        )
        while resident_bytes() > before - 80_000_000:  # noqa: ASYNC110 (the system has no event)
            await asyncio.sleep(0)
        collecting.cancel()

    assert len(alive) == 20


def resident_bytes() -> int:
    """Read what this process takes of memory."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")
