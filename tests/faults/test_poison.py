"""Bytes that no decoder expects, from an engine, in its replay, in Redis: requests go on."""

from __future__ import annotations

import pytest

from loadtest.emulator.emulator import Emulator
from router.kv_events import stream as patience
from router.kv_events import stream as rank_stream
from tests.faults.stage import Engines, Stage, chat, converse, on_stage, on_stages, truth, words
from tests.fuzz.samples import DEEP_ARRAY_EVENT, DEEP_MAP_EVENT
from tests.redis_servers import Start

BY_TURNS = {"policy__name": "round_robin"}


def say(engine: Emulator, payload: bytes) -> None:
    """Publish bytes as an engine's next batch."""
    publisher = engine.replica.ranks[0].publisher
    assert publisher is not None
    publisher.publish_payload(payload)


def undecodable(stage: Stage) -> float:
    return stage.metric("warmroute_kv_events_total", kind="undecodable")


async def test_a_nested_event_degrades_one_replica_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live: 5,000 deep, in either shape. Degraded and counted; the other replica stays exact.

    When its buffer has the event no more, history is read again, and what is known is right.
    """
    monkeypatch.setattr(patience, "REREAD_S", (0.05, 0.1))
    async with Engines(2) as engines, on_stage(*engines, **BY_TURNS) as stage:
        await converse(stage, engines)
        say(engines[0], DEEP_MAP_EVENT)
        say(engines[0], DEEP_ARRAY_EVENT)
        await stage.until(lambda: undecodable(stage) >= 2)
        assert (stage.state("r1"), stage.state("r2")) == ("degraded", "exact")
        assert (await stage.ask(chat(words(50)))).status == 200

        publisher = engines[0].replica.ranks[0].publisher
        assert publisher is not None
        publisher.truncate(0)
        for number in range(60, 64):
            await stage.ask(chat(words(number)))
        await stage.until(lambda: "not understood" not in reason(stage))
        await stage.settled(*engines)
        reply = await stage.ask(chat(words(63)))
        again = await stage.ask(chat(words(63)))

        assert reply.predicted == reply.reported
        assert again.predicted == again.reported > 0
        assert stage.metric("warmroute_follower_failures_total") == 0


def reason(stage: Stage) -> str:
    stream = stage.router.caches.stream("r1")  # type: ignore[arg-type]
    return stream.reason if stream is not None else ""


async def test_a_nested_event_in_the_replay_ends_no_start() -> None:
    """What an engine has in its buffer is read at every start: the router starts, and serves."""
    async with Engines(2) as engines:
        say(engines[0], DEEP_ARRAY_EVENT)
        async with on_stage(*engines, **BY_TURNS) as stage:
            await stage.until(lambda: undecodable(stage) >= 1)
            assert stage.state("r1") == "blind"
            await converse(stage, engines, 8)
            replies = [await stage.ask(chat(words(number))) for number in range(8)]

            assert all(reply.status == 200 for reply in replies)
            assert all(reply.predicted == reply.reported for reply in replies)
            assert stage.state("r1") == "degraded"
            assert stage.state("r2") == "exact"


async def test_the_next_router_survives_it_too(start_redis: Start) -> None:
    """The router that leads receives it, and then the other one takes its place and reads it."""
    async with Engines(2) as engines:
        say(engines[0], DEEP_MAP_EVENT)
        async with on_stages(*engines, redis=start_redis(), **BY_TURNS) as (first, second):
            for number in range(4):
                await first.ask(chat(words(number)))
            say(engines[0], DEEP_ARRAY_EVENT)
            for stage in (first, second):
                for candidate, role in stage.roles().items():
                    if role == "leading":
                        await stage.until(
                            lambda stage=stage, candidate=candidate: (  # type: ignore[misc]
                                stage.state(candidate) != "blind"
                            )
                        )
            assert first.router.cluster.sharing is not None
            # Its leases run out; at its next beat it finds out that the other router has gone.
            first.router.cluster.sharing.keeper._beat_s = 10.0
            await second.until(lambda: set(second.roles().values()) == {"leading"})
            replies = [await second.ask(chat(words(number))) for number in range(4)]

            assert all(reply.status == 200 for reply in replies)
            assert all(truth(engine) for engine in engines)


async def test_a_follower_that_fails_knows_nothing_and_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bug of ours in applying one replica's batch: counted, BLIND, and then exact again."""
    apply = rank_stream.RankBlocks.apply
    broken = {"r1"}

    def fail(self: rank_stream.RankBlocks, *args: object) -> None:
        if self._candidate in broken:
            broken.clear()
            raise ZeroDivisionError("wr-s3cret")  # contents must not be logged
        apply(self, *args)  # type: ignore[arg-type]

    async with Engines(2) as engines, on_stage(*engines, **BY_TURNS) as stage:
        monkeypatch.setattr(rank_stream.RankBlocks, "apply", fail)
        await converse(stage, engines[1:], 2)
        await stage.until(
            lambda: stage.metric("warmroute_follower_failures_total", follower="events") == 1
        )
        assert stage.state("r1") == "blind"
        await stage.until(lambda: stage.state("r1") == "exact")
        replies = [await stage.ask(chat(words(number))) for number in range(2)]

        assert "ZeroDivisionError in router/" not in stage.log or "wr-s3cret" not in stage.log
        assert "task failed" in stage.log
        assert all(reply.status == 200 for reply in replies)
