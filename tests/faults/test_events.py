"""What is lost of routing when event streams lie, stop, or cannot be followed."""

from __future__ import annotations

import math
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import pytest

from router.kv_events import stream as patience
from router.kv_events import stream as rank_stream
from tests.faults.fake_engine import MODELS, FakeEngine
from tests.faults.stage import Engines, arm, chat, converse, holder, on_stage, truth, words


async def test_a_gap_is_replayed() -> None:
    """Batches that were lost on the way are asked for; no prediction is ever wrong for it."""
    by_turns = {"policy__name": "round_robin"}
    async with Engines(2) as engines, on_stage(*engines, **by_turns) as stage:
        await converse(stage, engines)
        for engine in engines:
            arm(engine, "drop_events", count=2)
        for number in range(4, 12):
            await stage.ask(chat(words(number)))
        await stage.settled(*engines)
        replies = [await stage.ask(chat(words(number))) for number in range(12)]

        assert all(reply.predicted == reply.reported > 0 for reply in replies)
        assert stage.metric("warmroute_kv_events_total", kind="gaps") >= 2
        assert stage.metric("warmroute_replica_state", state="exact") == 2


async def test_a_truncated_replay_is_accepted() -> None:
    """What the buffer lost stays unknown: DEGRADED, visible, and never a wrong credit."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        await converse(stage, [engine])
        arm(engine, "drop_events", count=2)
        await stage.ask(chat(words(10)))
        await stage.ask(chat(words(11)))
        arm(engine, "truncate_replay", num_kept=0)
        await stage.ask(chat(words(12)))
        await stage.settled(engine)
        lost = await stage.ask(chat(words(0)))
        known = await stage.ask(chat(words(12)))

        assert stage.state("r1") == "degraded"
        assert stage.metric("warmroute_kv_events_total", kind="truncated") >= 1
        assert (lost.predicted, lost.reported > 0) == (0, True)
        assert known.predicted == known.reported > 0
        described = (await stage.admin("/admin/replicas")).json()["replicas"][0]
        assert described["ranks"][0]["cache_reason"] == "history before the router joined is lost"


async def test_a_late_router_regains_lost_history_by_the_turns_it_sends() -> None:
    """The buffer is too short for it; one turn proves the blocks that the engine had before."""
    async with Engines(1) as (engine,):
        async with on_stage(engine) as early:
            for number in range(3):
                await early.ask(chat(words(number), "a", words(50)))
        arm(engine, "truncate_replay", num_kept=1)
        async with on_stage(engine) as stage:
            await stage.settled(engine)
            texts = [words(0), "a", words(50)]
            firsts = await stage.ask(chat(*texts, "b", words(60)))
            await stage.settled(engine)
            nexts = await stage.ask(chat(*texts, "b", words(60), "c", words(61)))
            again = await stage.ask(chat(words(1), "a", words(50)))

            assert (firsts.predicted, firsts.reported > 0) == (0, True)
            assert nexts.predicted == nexts.reported > firsts.reported
            assert stage.held(engine)[0] < truth(engine)[0]
            assert again.predicted < again.reported  # no turn of it was sent here yet
            assert stage.metric("warmroute_kv_events_total", kind="recovered") >= 1
            assert stage.state("r1") == "degraded"


async def test_lost_history_ends_when_the_cache_has_turned_over() -> None:
    """The engine evicts what is oldest first: after a cache full of known blocks it is EXACT."""
    async with Engines(1, num_gpu_blocks=64) as (engine,):
        async with on_stage(engine) as early:
            for number in range(3):
                await early.ask(chat(words(number)))
        arm(engine, "truncate_replay", num_kept=1)
        async with on_stage(engine) as stage:
            await stage.settled(engine)
            before = stage.state("r1")
            for number in range(10, 60):
                await stage.ask(chat(words(number)))
                if stage.state("r1") == "exact":
                    break

            await stage.knows(engine)
            assert (before, stage.state("r1")) == ("degraded", "exact")


async def test_an_engine_that_falls_silent_is_blind_and_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It never published anything: what is routed there counts as held, as far as it fits."""
    async with Engines(2) as engines:
        for engine in engines:
            arm(engine, "silence_events")
            arm(engine, "truncate_replay")
        async with on_stage(*engines) as stage:
            await stage.until(lambda: stage.metric("warmroute_replica_state", state="blind") == 2)
            with monkeypatch.context() as patch:
                # A second after connecting the router would ask for history, which is still there.
                patch.setattr(rank_stream.RankStream, "verify", lambda stream: None)
                # Places are drawn: all 16 are alike once in 30,000 times.
                firsts = [await stage.ask(chat(words(number))) for number in range(16)]
                seconds = [await stage.ask(chat(words(number))) for number in range(16)]

            assert stage.metric("warmroute_decisions_total", state="blind") == 32
            assert {reply.replica for reply in firsts} == {"r1", "r2"}
            assert [reply.replica for reply in seconds] == [reply.replica for reply in firsts]
            assert all(reply.predicted == reply.reported > 0 for reply in seconds)
            for engine in engines:
                engine.app.clear_faults()
            again = await converse(stage, engines, 6)
            assert all(reply.status == 200 for reply in again)


async def test_events_that_stop_are_noticed_by_their_predictions() -> None:
    """The audit finds them: trust falls, history is read again, and predictions are right."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        await converse(stage, [engine], 2)
        arm(engine, "silence_events")
        for number in range(10, 10 + 40):
            await stage.ask(chat(words(number)))
            stage.router.caches.expire_claims(math.inf)  # before the next turn
            await stage.ask(chat(words(number)))

        assert stage.metric("warmroute_audited_total", result="under") >= 20
        await stage.until(lambda: stage.metric("warmroute_kv_events_total", kind="replays") >= 2)
        engine.app.clear_faults()
        await stage.ask(chat(words(99)))
        await stage.settled(engine)
        reply = await stage.ask(chat(words(49)))
        assert reply.predicted == reply.reported > 0
        assert stage.state("r1") == "exact"


async def test_a_publisher_that_is_gone_for_long_leaves_blind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it held is believed for a minute (here: at once), then no more."""
    monkeypatch.setattr(patience, "BLIND_AFTER_S", 0.0)
    async with Engines(2) as engines, on_stage(*engines) as stage:
        first = (await converse(stage, engines, 1))[0]
        owner = holder(stage, first, engines)
        publisher = owner.replica.ranks[0].publisher
        assert publisher is not None
        publisher.close()
        await stage.until(lambda: stage.state(first.replica) == "blind")
        assert stage.metric("warmroute_index_blocks", replica=first.replica) == 0
        reply = await stage.ask(chat(words(0)))

        assert reply.status == 200
        assert reply.predicted == 0


SILENT = [
    ("tcp://0.0.0.0:1", "tcp://*:PORT", "vLLM connects to an endpoint"),
    ("tcp://127.0.0.1:1", "tcp://*:PORT", "vLLM connects to an endpoint"),
    ("tcp://*:1", "tcp://*:PORT", "nothing answers there"),
    ("tcp://*:{http}", "--kv-events-config", "not an event publisher"),
]


@pytest.mark.parametrize(("endpoint", "flag", "why"), SILENT)
async def test_an_event_endpoint_without_a_publisher_is_said_once(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, flag: str, why: str
) -> None:
    """After a minute (here: at once): one line, and the reason for operators, name the flag."""
    monkeypatch.setattr(patience, "BLIND_AFTER_S", 1.0)
    async with FakeEngine() as engine:
        source = {"endpoint": endpoint.format(http=urlsplit(engine.url).port)}
        engine.pages["/kv_event_sources"] = {"0": source}
        async with on_stage(engine) as stage:
            await stage.until(lambda: "nothing publishes" in stage.log)
            for _ in range(5):
                assert (await stage.ask(chat("a"))).status == 200
            rank = (await stage.admin("/admin/replicas")).json()["replicas"][0]["ranks"][0]

            assert rank["cache"] == "blind"
            assert flag in rank["cache_reason"]
            assert why in rank["cache_reason"]
            assert stage.log.count("nothing publishes") == 2  # in both forms


async def test_a_publisher_that_comes_late_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said of its absence is over."""
    monkeypatch.setattr(patience, "BLIND_AFTER_S", 0.0)
    async with Engines(1) as (engine,):
        publisher = engine.replica.ranks[0].publisher
        assert publisher is not None
        port = publisher.ports[0]
        publisher.pub.unbind(f"tcp://127.0.0.1:{port}")
        async with on_stage(engine, ready=False) as stage:
            await stage.until(lambda: "nothing publishes" in stage.log)
            publisher.pub.bind(f"tcp://127.0.0.1:{port}")
            await stage.until(lambda: "nobody" not in stage.router.caches.state_and_reason("r1")[1])
            await converse(stage, [engine])

            assert stage.state("r1") == "exact"


async def test_an_engine_without_events_is_served_by_guesses() -> None:
    """BLIND and said so: in the log, in /metrics, in every decision."""
    async with Engines(2, events=False) as engines, on_stage(*engines) as stage:
        first = await stage.ask(chat(words(1)))
        second = await stage.ask(chat(words(1)))

        assert second.replica == first.replica
        assert second.predicted == second.reported > 0
        assert "no: routing to it is approximate" in stage.log
        assert stage.metric("warmroute_decisions_total", state="blind") == 2


async def test_a_server_with_nothing_but_models_is_served() -> None:
    """No version, no metrics, no events: an OpenAI-compatible server of any kind."""
    foreign = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
    async with FakeEngine(**{"v1/models": foreign}) as engine:
        engine.pages["/health"] = (404, "")
        async with on_stage(engine, tokens__models={"tiny": "/nowhere/at/all"}) as stage:
            reply = await stage.ask(chat("a"))

            assert reply.status == 200
            assert stage.state("r1") == "blind"
            assert stage.metric("warmroute_replica_healthy") == 1


NONSENSE = [
    {"kv_event_sources": {"0": {"endpoint": "nonsense"}}},
    {"kv_event_sources": {"0": {"endpoint": "tcp://*:99999"}}},
    {"kv_event_sources": {"0": {"endpoint": "inproc://x"}}},
    {"kv_event_sources": {"x": {"endpoint": "tcp://*:1"}}},
    {"kv_event_sources": {"0": {"endpoint": "tcp://*:1", "publisher": "null"}}},
    {"kv_event_sources": {"0": {"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "y"}}},
    {"kv_event_sources": [1]},
    {"kv_event_sources": (200, "[" * 100_000)},
    {"version": (200, "[" * 100_000)},
    {"version": [1]},
    {"metrics": (200, '\nvllm:num_requests_running{engine="0"} NaN\n')},
    {"metrics": (200, "\nvllm:num_requests_running{\n\nprocess_start_time_seconds x\n")},
    {"metrics": (200, '\nvllm:cache_config_info{block_size="x",num_gpu_blocks="None"} 1.0\n')},
    {"metrics": (200, '\nvllm:cache_config_info{block_size="²"} 1.0\n')},
    {"metrics": (200, '\nvllm:cache_config_info{num_gpu_blocks="' + "9" * 5_000 + '"} 1.0\n')},
    {"metrics": (500, "")},
]


@pytest.mark.usefixtures("no_grace")
async def test_nonsense_from_an_engine_does_no_harm() -> None:
    """Whatever engines say about themselves: the router runs on, and each of them is served."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeEngine(**pages)) for pages in NONSENSE]
        stage = await stack.enter_async_context(
            on_stage(*engines, ready=False, policy__name="round_robin")
        )
        await stage.until(lambda: len(stage.router.fleet.members.replicas) == len(NONSENSE))
        for _ in range(5 * len(NONSENSE)):
            assert (await stage.ask(chat("a"))).status == 200
            unserved = [number for number, engine in enumerate(engines) if not engine.received]
            if not unserved:
                break

        assert [NONSENSE[number] for number in unserved] == []


async def test_what_is_no_engine_is_named_until_it_is_one() -> None:
    """/readyz says why; the router serves as soon as there is something to serve."""
    answers = [(200, "<html>"), (404, ""), {"data": []}, (200, "[" * 100_000), (200, '{"data":1}')]
    async with FakeEngine() as engine:
        engine.pages["/v1/models"] = answers[0]
        async with on_stage(engine, ready=False) as stage:
            for page in answers:
                engine.pages["/v1/models"] = page
                reply = await stage.ask(None, "/readyz", method="GET")
                assert reply.status == 503
                refused = await stage.ask(chat("a"))
                assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
            await stage.until(
                lambda: "without a model list" in (stage.router.readiness.not_ready() or "")
            )
            engine.pages["/v1/models"] = MODELS
            await stage.ready()

            assert (await stage.ask(chat("a"))).status == 200
