"""The side path over real sockets: what the publisher says ends up in the index."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from policies.view import CandidateId
from router.base.errors import UpstreamUnreachable
from router.index.block_index import BlockIndex
from router.kv_events.follower import Pace, follow
from router.kv_events.stream import RankStream
from router.kv_events.subscriber import EngineEvents, Received, Replies
from tests.engine import BLOCK_SIZE, batch, hashes, prompt, removed, stored
from tests.kv_events.publisher import Publisher

R1 = CandidateId("r1")
QUICK = Pace(tick_s=0.02, quiet_s=0.1, subscribe_s=0.05, min_pause_s=0.02)


class WatchedEvents(EngineEvents):
    """Signals when a turn of the loop is over: it receives again."""

    replay_timeout_s = 2.0

    def __init__(self, endpoint: str, replay_endpoint: str | None) -> None:
        super().__init__(endpoint, replay_endpoint, "kv", replay_timeout_s=self.replay_timeout_s)
        self.turned = asyncio.Event()

    async def receive(self, timeout_s: float) -> Received:
        self.turned.set()
        return await super().receive(timeout_s)


class Followed:
    """A stream that is being followed, and a way to wait for what it becomes."""

    def __init__(
        self, publisher: Publisher, *, has_replay: bool, events: type[WatchedEvents]
    ) -> None:
        self.index = BlockIndex()
        self.stream = RankStream(R1, self.index, block_size=BLOCK_SIZE, capacity_blocks=100)
        replay_endpoint = publisher.replay_endpoint if has_replay else None
        self.source = events(publisher.endpoint, replay_endpoint)

    def num_matched(self, tokens: list[int]) -> int:
        chain, _ = self.stream.contract.extend(None, tokens)
        return self.index.match(chain, [R1])[R1].num_gpu_blocks

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not is_so():
                self.source.turned.clear()
                await self.source.turned.wait()


@asynccontextmanager
async def following(
    publisher: Publisher,
    *,
    has_replay: bool = True,
    events: type[WatchedEvents] = WatchedEvents,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Followed]:
    """Follow a publisher that has published, or kept, everything it was asked to."""
    await asyncio.to_thread(publisher.wait)
    followed = Followed(publisher, has_replay=has_replay, events=events)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(follow(followed.stream, followed.source, clock=clock, pace=QUICK))
        try:
            yield followed
        finally:
            task.cancel()


@pytest.mark.parametrize("has_topic", [True, False], ids=["0.32", "before-45174"])
async def test_history_before_joining_is_replayed(has_topic: bool) -> None:
    """A router that starts late knows what the engine stored before, in both reply shapes."""
    with Publisher(has_topic_in_replies=has_topic) as publisher:
        publisher.lose(batch(stored(prompt(1))))
        publisher.lose(batch(stored(prompt(2)), removed(hashes(prompt(1))[2:])))
        async with following(publisher) as followed:
            await followed.until(lambda: followed.num_matched(prompt(2)) == 3)

            assert followed.num_matched(prompt(1)) == 2
            assert followed.stream.state == "exact"
            assert followed.stream.counters.history.num_truncated == 0


async def test_a_batch_lost_at_the_end_is_found_in_the_quiet() -> None:
    """No later batch shows the gap; asking on a quiet stream does."""
    with Publisher() as publisher:
        async with following(publisher) as followed:
            await asyncio.to_thread(publisher.subscribed.wait)
            publisher.publish(batch(stored(prompt(1))))
            await followed.until(lambda: followed.num_matched(prompt(1)) == 3)
            publisher.lose(batch(stored(prompt(2))))
            await followed.until(lambda: followed.num_matched(prompt(2)) == 3)

            assert followed.stream.counters.history.num_gaps == 0


async def test_a_dead_replay_endpoint_does_not_stop_the_stream() -> None:
    """After some tries the history is given up, and what comes from now on is used."""
    with Publisher() as publisher, Publisher() as other:
        other.close()

        class Elsewhere(WatchedEvents):
            replay_timeout_s = 0.3

            def __init__(self, endpoint: str, _: str | None) -> None:
                super().__init__(endpoint, other.replay_endpoint)

        async with following(publisher, events=Elsewhere) as followed:
            await followed.until(lambda: followed.stream.counters.history.num_failed_replays >= 3)
            number = iter(range(10_000))

            def received() -> bool:
                publisher.publish(batch(stored(prompt(next(number)))))
                return followed.stream.counters.num_batches > 0

            await followed.until(received)


async def test_without_replay_the_stream_begins_where_it_joined() -> None:
    """An engine without replay endpoint is followed from its next batch on."""
    with Publisher() as publisher:
        publisher.lose(batch(stored(prompt(1))))
        async with following(publisher, has_replay=False) as followed:
            await asyncio.to_thread(publisher.subscribed.wait)
            publisher.publish(batch(stored(prompt(2))))
            await followed.until(lambda: followed.num_matched(prompt(2)) == 3)

            assert followed.num_matched(prompt(1)) == 0
            assert followed.stream.state == "degraded"


@pytest.mark.parametrize("most_replies", [None, 2_500])
async def test_a_long_history_arrives_whole(most_replies: int | None) -> None:
    """Ten thousand buffered batches come through, and a replay that is cut is no failure."""
    with Publisher(most_replies=most_replies) as publisher:
        for number in range(10_000):
            publisher.lose(batch(stored(prompt(number, 1))))
        async with following(publisher) as followed:
            await followed.until(lambda: followed.index.num_blocks(R1) == 10_000)

            assert followed.stream.state == "exact"
            assert followed.stream.counters.history.num_failed_replays == 0


class FailingEvents(WatchedEvents):
    """Fails in each way once, then works."""

    def __init__(self, endpoint: str, replay_endpoint: str | None) -> None:
        super().__init__(endpoint, replay_endpoint)
        self.failures: list[Exception] = [UpstreamUnreachable("r1", "socket gone")]
        self.replay_failures: list[Exception] = [
            UpstreamUnreachable("r1", "replay failed"),
            ValueError("replay reply of unknown shape"),
        ]

    async def receive(self, timeout_s: float) -> Received:
        if self.failures:
            raise self.failures.pop()
        return await super().receive(timeout_s)

    @asynccontextmanager
    async def replay(self, start: int) -> AsyncIterator[Replies]:
        if self.replay_failures:
            raise self.replay_failures.pop()
        async with super().replay(start) as replies:
            yield replies


async def test_failures_are_survived() -> None:
    """A broken socket and broken replays cost time, never the loop."""
    with Publisher() as publisher:
        publisher.lose(batch(stored(prompt(1))))
        async with following(publisher, events=FailingEvents) as followed:
            await followed.until(lambda: followed.num_matched(prompt(1)) == 3)

            assert followed.stream.counters.history.num_failed_replays == 2
            assert followed.stream.state == "exact"


async def test_an_engine_without_events_yet_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Each engine that has just started is in that state."""
    caplog.set_level("INFO")
    with Publisher() as publisher:
        async with following(publisher) as followed:
            await followed.until(lambda: "event stream changed" in caplog.text)

    assert [record.levelname for record in caplog.records] == ["INFO"]


async def test_long_work_gives_the_loop_its_turns() -> None:
    """Between slices others run."""
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.01  # every look at the clock is later than a slice is long
        return now_s

    with Publisher() as publisher:
        for number in range(50):
            publisher.lose(batch(stored(prompt(number, 1))))
        async with following(publisher, clock=clock) as followed:
            await followed.until(lambda: followed.index.num_blocks(R1) == 50)

            assert followed.stream.state == "exact"
