"""The shared pool as several routers know it, against the plain set of what it holds.

Engines store, the master evicts in silence and restarts, routers list, verify and publish changes
in a log, each at its own pace. Once all is published and read, all routers know the log's last word
about each block; and after a listing in which nothing else happens, what the pool holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from router.base.contracts import BlockKey, block_key
from router.base.messages import Delta, PoolChanged, StreamId, pool_stream, unpack_keys
from router.cluster.shares import PoolShare
from router.config import MooncakeConfig
from router.metrics import Metrics
from router.pool.catalog import PoolCatalog
from router.pool.follower import PoolFollower
from router.pool.master import MasterApi
from tests.effort import examples

MODEL = "tiny"
NUM_BLOCKS = 12
NUM_RANKS = 2
ANCHOR = NUM_BLOCKS  # a block that is always whole, so that everybody can learn of both ranks
ROUTERS = 3
END = object()


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


BLOCKS: list[BlockKey] = [block_key(digest(number)) for number in range(1, NUM_BLOCKS + 2)]


def name(number: int, rank: int) -> str:
    """Name one of the objects of a block."""
    return f"{MODEL}@tp_rank:{rank}@group:0@{digest(number + 1).hex()}"


class Log:
    """What Redis is to the pool's directories: blocks, and every word about them in order."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.blocks: set[BlockKey] = set()

    def write(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            for change in delta.changes:
                self.blocks |= set(unpack_keys(change.stored))
                self.blocks -= set(unpack_keys(change.removed))
        self.deltas += deltas

    async def pool_snapshot(self, stream_ids: list[StreamId]) -> Any:
        assert stream_ids == [pool_stream(MODEL)]

        async def slices() -> AsyncIterator[dict[Any, Any]]:
            held = sorted(self.blocks)
            for start in range(0, len(held), 5):
                part = np.array(held[start : start + 5], dtype=np.uint64)
                yield {(pool_stream(MODEL), "pool"): part}

        return SimpleNamespace(slices=slices)


class Router:
    """One router's knowledge of the pool."""

    def __init__(self) -> None:
        self.pool = PoolCatalog()
        self.pool.add_replica("r1", MODEL, (MODEL,))
        self.pool.found()
        api = MasterApi("http://127.0.0.1:1", timeout_s=1.0)  # it is not asked
        self.follower = PoolFollower(self.pool, api, MooncakeConfig(), Metrics())
        self.share = PoolShare(self.pool, self.follower)
        self.num_received = 0
        self.listing: list[str] | None = None  # lines still to be read
        self.reconciling: Iterator[None] | None = None

    @property
    def blocks(self) -> set[BlockKey]:
        return set(self.pool.directory(MODEL).keys())

    def join(self, log: Log) -> None:
        """Begin to share: as `Sharing` does, the log is read from before the snapshot on."""
        self.num_received = len(log.deltas)
        self.share.came_up()
        asyncio.run(self.share.join(log))  # type: ignore[arg-type]

    def end_listing(self) -> None:
        self.listing = self.reconciling = None

    def publish(self, log: Log) -> None:
        log.write(self.share.take())

    def receive(self, log: Log, num_deltas: int) -> None:
        for delta in log.deltas[self.num_received : self.num_received + num_deltas]:
            for change in delta.changes:
                self.share.apply(PoolChanged(delta.stream_id, change))
            self.num_received += 1


class PoolsOfRouters(RuleBasedStateMachine):
    """Routers learn of a pool, each something else."""

    routers = st.integers(0, ROUTERS - 1)
    blocks = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=4, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.objects = {(ANCHOR, rank) for rank in range(NUM_RANKS)}  # block, rank
        self.log = Log()
        self.routers_now = [Router() for _ in range(ROUTERS)]
        for router in self.routers_now:
            router.join(self.log)
        self._list_whole(self.routers_now[0])

    # -- the pool ----------------------------------------------------------------------------

    @rule(numbers=blocks, who=st.sets(routers))
    def store(self, numbers: list[int], who: set[int]) -> None:
        """An engine stores; its follower receives the batch, or no router does."""
        self.objects |= {(number, rank) for number in numbers for rank in range(NUM_RANKS)}
        for i in who:
            stored = [BLOCKS[number] for number in numbers]
            self.routers_now[i].pool.stored(MODEL, stored, replica="r1")

    @rule(numbers=blocks, rank=st.none() | st.integers(0, NUM_RANKS - 1))
    def evict(self, numbers: list[int], rank: int | None) -> None:
        """The master evicts objects, in silence."""
        ranks = range(NUM_RANKS) if rank is None else (rank,)
        self.objects -= {(number, each) for number in numbers for each in ranks}

    @rule()
    def restart(self) -> None:
        """The master begins anew; every router notices (here: at once)."""
        self.objects = {each for each in self.objects if each[0] == ANCHOR}
        for router in self.routers_now:
            if router.listing is not None:
                router.pool.abandon_listing()
                router.end_listing()
            router.pool.restarted()

    @rule(i=routers, numbers=blocks)
    def verify(self, i: int, numbers: list[int]) -> None:
        """A router asks about a few blocks."""
        whole = self._whole()
        asked = [BLOCKS[number] for number in numbers]
        self.routers_now[i].pool.verified(
            MODEL, [k for k in asked if k in whole], [k for k in asked if k not in whole]
        )

    # -- listings: of the moment they begin, read line by line -----------------------------------

    @rule(i=routers)
    def begin_listing(self, i: int) -> None:
        router = self.routers_now[i]
        router.end_listing()
        router.pool.begin_listing()
        router.listing = [name(*each) for each in sorted(self.objects)]

    @rule(i=routers, num_lines=st.integers(1, 8))
    def list_on(self, i: int, num_lines: int) -> None:
        router = self.routers_now[i]
        if router.listing is None:
            return
        lines, router.listing = (
            router.listing[:num_lines],
            router.listing[num_lines:],
        )
        router.pool.listed(lines)
        if not lines:
            router.reconciling = router.reconciling or router.pool.reconcile(3)
            if next(router.reconciling, END) is END:
                router.end_listing()

    @rule(i=routers)
    def abandon(self, i: int) -> None:
        if self.routers_now[i].listing is not None:
            self.routers_now[i].pool.abandon_listing()
            self.routers_now[i].end_listing()

    # -- among routers -----------------------------------------------------------------------

    @rule(i=routers)
    def publish(self, i: int) -> None:
        self.routers_now[i].publish(self.log)

    @rule(i=routers, num_deltas=st.integers(1, 3))
    def receive(self, i: int, num_deltas: int) -> None:
        self.routers_now[i].receive(self.log, num_deltas)

    @rule(i=routers)
    def replace(self, i: int) -> None:
        """A router dies with all it has not published, and another comes that knows nothing."""
        self.routers_now[i] = Router()
        self.routers_now[i].join(self.log)

    @rule(i=routers)
    def lose_redis(self, i: int) -> None:
        """A router is alone for a while, and joins with what it knows."""
        self.routers_now[i].share.went_down()
        self.routers_now[i].join(self.log)

    @rule(i=routers)
    @precondition(lambda self: bool(self.log.deltas))
    def flush(self, i: int) -> None:
        """Redis is emptied: everybody notices, and joins."""
        self.log = Log()
        for router in self.routers_now:
            router.share.went_down()
            router.join(self.log)

    # -- what must hold ----------------------------------------------------------------------

    @rule()
    def all_know_the_last_word(self) -> None:
        self._reconcile()
        for router in self.routers_now:
            assert router.blocks == self.log.blocks

    @rule(i=routers)
    def a_quiet_listing_tells_the_truth(self, i: int) -> None:
        self._reconcile()
        for number, router in enumerate(self.routers_now):
            router.share.held(frozenset({router.share.lister} if number == i else ()))
            if router.listing is not None:
                router.pool.abandon_listing()
                router.end_listing()
        assert [r.follower.is_lister for r in self.routers_now].count(True) == 1
        self._list_whole(self.routers_now[i])
        self._reconcile()
        for router in self.routers_now:
            assert router.blocks == self._whole()
        for length in range(NUM_BLOCKS + 1):
            leading = next((n for n in range(length) if BLOCKS[n] not in self._whole()), length)
            assert self.routers_now[i].pool.match(MODEL, BLOCKS[:length]) == leading

    def _whole(self) -> set[BlockKey]:
        return {
            BLOCKS[number]
            for number in range(NUM_BLOCKS + 1)
            if all((number, rank) in self.objects for rank in range(NUM_RANKS))
        }

    def _list_whole(self, router: Router) -> None:
        router.pool.begin_listing()
        router.pool.listed([name(*each) for each in sorted(self.objects)])
        for _ in router.pool.reconcile(3):
            pass

    def _reconcile(self) -> None:
        for router in self.routers_now:
            router.publish(self.log)
        for router in self.routers_now:
            router.receive(self.log, len(self.log.deltas))


@pytest.mark.hypothesis
def test_routers_agree_on_the_pool_and_a_listing_on_the_truth() -> None:
    """In any order of publishing, reading, listing and losing."""
    run_state_machine_as_test(
        PoolsOfRouters,
        settings=settings(
            max_examples=examples(150),
            stateful_step_count=60,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
