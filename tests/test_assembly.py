"""router.assembly, router.run: replicas found and lost, readiness, what is left at the end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from router import config
from router.assembly.router import Router
from router.base.errors import ConfigError
from router.records.record import DecisionRecord
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import SLOW, Engines, arm, chat, num_running, on_stage, streamed, words
from tests.ports import free_port


async def test_a_replica_that_is_not_there_yet_is_waited_for() -> None:
    """The router starts, /readyz says what is missing, and all is well when it comes."""
    port = free_port()
    async with on_stage(f"http://127.0.0.1:{port}", ready=False) as stage:
        await stage.until(lambda: "replica not usable yet" in stage.log)
        ready = await stage.ask(None, "/readyz", method="GET")
        models = await stage.ask(None, "/v1/models", method="GET")
        refused = await stage.ask(chat(words(1)))
        async with Emulator(EmulatorOptions(port=port, num_gpu_blocks=2048)) as engine:
            await stage.ready()
            served = await stage.ask(chat(words(1)))
            await stage.settled(engine)

            assert stage.state("r1") == "exact"

    assert (ready.status, ready.headers["Retry-After"]) == (503, "1")
    assert b"no replica yet: r1: http://127.0.0.1" in ready.body
    assert b"refused the connection" in ready.body
    assert (models.status, refused.status, served.status) == (503, 503, 200)


async def test_one_missing_replica_keeps_no_request_waiting() -> None:
    """The others serve; each reason for its absence is logged once."""
    async with Engines(1) as (engine,), on_stage("http://127.0.0.1:9", engine) as stage:
        reply = await stage.ask(chat(words(1)))

        assert reply.replica == "r2"
        assert stage.log.count("replica not usable yet") == 2  # in each of the two log forms


@pytest.mark.parametrize("is_ready", [True, False])
async def test_readiness_waits_for_the_history_of_events(is_ready: bool) -> None:
    """Readiness waits for it, and so does a client that asks a router just restarted before."""
    async with Engines(1) as (engine,):
        async with on_stage(engine) as stage:
            await stage.ask(chat(words(1)))
        async with on_stage(engine, ready=is_ready) as stage:
            reply = await stage.ask(chat(words(1)))

    assert reply.status == 200
    assert reply.predicted == reply.reported > 0


async def test_readiness_does_not_flicker() -> None:
    """Once it says yes it stays: nothing is begun after that."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        for _ in range(300):
            assert stage.router.readiness.not_ready() is None
            await asyncio.sleep(0)


async def test_a_replica_with_another_model_behind_its_address_is_found_anew() -> None:
    """Restarted as something else: its old model is unknown, its new one served."""
    quick = {"health__interval_s": 0.05, "health__timeout_s": 0.5}
    async with Engines(1) as (engine,), on_stage(engine, **quick) as stage:
        await stage.ask(chat(words(1)))
        engine.replica.options = msgspec.structs.replace(
            engine.replica.options, served_model_names=("other",)
        )
        engine.replica.models = ["other"]
        arm(engine, "restart", down_s=0.2)
        await stage.until(lambda: stage.router.fleet.members.served.get("other") is not None)
        await stage.ready()

        assert (await stage.ask(chat(words(1)))).status == 404
        assert (await stage.ask(chat(words(1), model="other"))).status == 200


async def test_no_client_gets_the_404_of_an_engine_that_came_back_with_another_model() -> None:
    """Its requests move to the replica that has the model, before a probe is due."""

    async def lacks(_: web.Request) -> web.StreamResponse:
        error = {"message": "The model `tiny` does not exist.", "code": 404}
        return web.json_response({"error": error}, status=404)

    async with FakeEngine() as one, FakeEngine() as other:
        async with on_stage(
            one, other, policy__name="round_robin", health__interval_s=60.0
        ) as stage:
            one.on_request = lacks
            one.pages["/v1/models"] = {"object": "list", "data": [{"id": "large"}]}
            replies = await asyncio.gather(*(stage.ask(chat(words(n))) for n in range(6)))

            assert {reply.status for reply in replies} == {200}
            await stage.until(lambda: "large" in stage.router.fleet.members.served)
            assert (await stage.ask(chat(words(7)))).status == 200
            assert (await stage.ask(chat(words(1), model="unheard-of"))).status == 404


async def test_an_engine_that_says_it_is_another_process_is_found_anew() -> None:
    """Although it was never seen down: its start time is another."""
    text = "\nprocess_start_time_seconds {}\n"
    quick = {"health__interval_s": 0.02, "health__load_interval_s": 0.02}
    async with FakeEngine(metrics=(200, text.format(1))) as engine:
        async with on_stage(engine, **quick) as stage:
            engine.pages["/metrics"] = (200, text.format(2))
            await stage.until(lambda: "replica restarted" in stage.log)
            engine.pages["/metrics"] = (500, "")  # for a moment: says nothing, means nothing
            num_asked = engine.pages_read["/metrics"]
            await stage.until(lambda: engine.pages_read["/metrics"] >= num_asked + 3)

            assert stage.log.count("replica restarted") == 2
            assert (await stage.ask(chat("a"))).status == 200


async def test_events_may_be_switched_off_or_their_endpoints_given() -> None:
    """Configured endpoints go before what an engine says; none at all leaves it BLIND."""
    async with Engines(1) as (engine,):
        publisher = engine.replica.ranks[0].publisher
        assert publisher is not None
        port, replay_port = publisher.ports
        given = {
            "url": engine.url,
            "events": [f"tcp://127.0.0.1:{port}"],
            "replay": [f"tcp://127.0.0.1:{replay_port}"],
        }
        async with on_stage(engine, replicas=[given]) as stage:
            await stage.ask(chat(words(1)))
            await stage.settled(engine)
            assert stage.state("r1") == "exact"
        async with on_stage(engine, replicas=[given], events__enabled=False) as stage:
            await stage.ask(chat(words(1)))
            assert stage.state("r1") == "blind"


async def test_a_cache_that_is_switched_off_is_logged() -> None:
    """Routing by caches is of no use there."""
    async with Engines(1, enable_prefix_caching=False) as engines, on_stage(*engines) as stage:
        first = await stage.ask(chat(words(1)))
        second = await stage.ask(chat(words(1)))

        assert "prefix caching is off" in stage.log
        assert (first.status, second.reported) == (200, 0)


async def test_streams_in_flight_are_finished_at_the_end(tmp_path: Path) -> None:
    """And are recorded, although the writer has been stopped before."""
    file = tmp_path / "decisions.jsonl"
    async with Engines(1, time_model=SLOW) as (engine,):
        async with on_stage(engine, log__decisions=file, is_idle=False) as stage:
            body = streamed(chat(words(1), max_tokens=20, ignore_eos=True))
            async with asyncio.TaskGroup() as tg:
                asked = tg.create_task(stage.ask(body))
                await stage.until(lambda: num_running(engine))
                stage.stop.set()

    assert asked.result().events[-1] == "[DONE]"
    record = msgspec.json.decode(file.read_bytes(), type=DecisionRecord)
    assert (record.outcome, record.num_predicted_cached_tokens) == ("ok", 0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
async def test_a_disk_that_takes_no_records_fails_no_request() -> None:
    """They are dropped, counted, and said once."""
    async with Engines(1) as engines:
        async with on_stage(*engines, log__decisions=Path("/dev/full")) as stage:
            for number in range(3):
                assert (await stage.ask(chat(words(number)))).status == 200
                await stage.until(
                    lambda: stage.metric("warmroute_decision_records_dropped_total") == number + 1  # noqa: B023
                )

            assert stage.log.count("decision records lost") == 2  # in each of the two log forms


@pytest.mark.parametrize("path", ["/nowhere/decisions.jsonl", "/proc/decisions"])
def test_a_file_of_records_that_cannot_be_written_is_refused(path: str) -> None:
    """At the start, with the key and the file."""
    with pytest.raises(ConfigError, match=rf"log.decisions: '{path}' cannot be written: No such"):
        Router(config.load(flags={("log", "decisions"): path}))


async def test_two_routers_fit_in_one_process() -> None:
    """Each with its own metrics, caches and sessions."""
    async with Engines(2) as engines, on_stage(*engines) as a, on_stage(*engines) as b:
        first = await a.ask(chat(words(1)))
        await a.settled(*engines)
        await b.settled(*engines)
        second = await b.ask(chat(words(1)))

        assert second.replica == first.replica
        assert second.predicted == second.reported > 0
        assert (a.metric("warmroute_audited_total"), b.metric("warmroute_audited_total")) == (1, 1)


def test_an_unknown_policy_is_refused_before_anything_runs() -> None:
    """The error names the nearest known one."""
    with pytest.raises(ConfigError, match="did you mean 'kv_aware'"):
        config.load(flags={("policy", "name"): "kv_awar"})
