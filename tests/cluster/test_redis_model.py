"""The shared store against a plain set of blocks: random stores, removals, clears, sweeps."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.base.messages import Delta, SharedTier, StreamId, TierChange
from router.cluster.redis_store import RedisStore, Written
from tests.cluster.redis_stores import POOL_STREAM, blocks, lookup, opened, pack
from tests.effort import examples
from tests.redis_servers import RedisServer

STREAMS = [StreamId("a#0"), StreamId("a#1"), StreamId("b#0")]
CHAIN = range(0, 24 << 14, 1 << 14)  # four keys to a bucket, no more

keys = st.sets(st.sampled_from(CHAIN), max_size=12)
prefixes = st.integers(0, len(CHAIN)).map(lambda n: set(CHAIN[:n]))
tiers = st.sampled_from(["gpu", "cpu", "pool"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sampled_from(STREAMS), tiers, keys | prefixes),
        st.tuples(st.just("remove"), st.sampled_from(STREAMS), tiers, keys),
        st.tuples(st.just("clear"), st.sampled_from(STREAMS), tiers, keys),
        st.tuples(st.just("sweep")),
        st.tuples(st.just("stranger"), st.sampled_from(STREAMS), keys),
    ),
    max_size=20,
)


class Model:
    """What each holder has."""

    def __init__(self) -> None:
        self.held: dict[tuple[StreamId, SharedTier], set[int]] = {}

    def apply(self, delta: Delta) -> None:
        """Apply a delta."""
        if delta.cleared:
            self.held.pop((delta.stream_id, "gpu"), None)
            self.held.pop((delta.stream_id, "cpu"), None)
        for change in delta.changes:
            held = self.held.setdefault((delta.stream_id, change.tier), set())
            held |= set(_unpacked(change.stored))
            held -= set(_unpacked(change.removed))

    @property
    def present(self) -> dict[tuple[StreamId, SharedTier], set[int]]:
        """Holders that have something."""
        return {holder: held for holder, held in self.held.items() if held}


def _unpacked(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[i : i + 8], "little") for i in range(0, len(packed), 8)]


def _delta(step: tuple[Any, ...]) -> Delta:
    kind, stream_id, tier, keys = step
    packed = pack(sorted(keys))
    change = TierChange(tier, removed=packed) if kind == "remove" else TierChange(tier, packed)
    is_pool = tier == "pool"
    return Delta(
        stream_id=POOL_STREAM if is_pool else stream_id,
        cleared=kind == "clear" and not is_pool,
        changes=(change,),
    )


@pytest.mark.timeout(300)
@settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps)
def test_the_store_is_a_set_of_blocks(
    shared_redis: RedisServer, script: list[tuple[Any, ...]]
) -> None:
    """By snapshot, and by look-up as far as prefixes are whole."""
    asyncio.run(_play(shared_redis.url, script))


async def _play(url: str, script: list[tuple[Any, ...]]) -> None:
    namespace = uuid.uuid4().hex
    async with (
        opened(url, namespace=namespace, lease_s=3600) as store,
        opened(url, "stranger", namespace=namespace) as stranger,
    ):
        await store.hold(STREAMS)
        model = Model()
        every = (*STREAMS, POOL_STREAM)
        for step in script:
            if step[0] == "sweep":
                await store.sweep(pause_s=0)
            elif step[0] == "stranger":
                change = TierChange("gpu", pack(sorted(step[2])))
                delta = Delta(stream_id=step[1], cleared=True, changes=(change,))
                assert await stranger.write([delta]) == [Written.FENCED]
            else:
                delta = _delta(step)
                assert await store.write([delta]) == [Written.OK]
                model.apply(delta)
        assert await blocks(store, every) == model.present
        await store.sweep(pause_s=0)
        assert await blocks(store, every) == model.present
        await _compare_lookup(store, model)


async def _compare_lookup(store: RedisStore, model: Model) -> None:
    counts = await lookup(store, CHAIN, *STREAMS)
    for (stream_id, tier), count in counts.items():
        held = set(model.held.get((stream_id, tier), ()))
        if tier == "cpu":
            held |= model.held.get((stream_id, "gpu"), set())
        leading = next((i for i, key in enumerate(CHAIN) if key not in held), len(CHAIN))
        if held == set(CHAIN[:leading]):
            assert count == leading
        else:  # closure is broken: never a block that is not there at the end, or right before it
            assert all(key in held for key in CHAIN[max(0, count - 3) : count])
