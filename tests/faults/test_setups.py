"""What a router and its clients say where something is set up wrongly."""

from __future__ import annotations

import pytest

from tests.check.running import endpoints
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import SECRET, Engines, Stage, chat, on_stage, words
from tests.ports import free_port

QUICK = {"health__interval_s": 0.05, "health__timeout_s": 0.2}


# -- no replica ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_grace")
async def test_a_request_is_told_which_replicas_have_not_answered_and_why() -> None:
    """Not that there are none; and no address of theirs."""
    async with FakeEngine() as other:
        other.pages["/v1/models"] = (200, "<html>")
        urls = [f"http://127.0.0.1:{free_port()}", other.url, "http://engine.invalid:8000"]
        async with on_stage(*urls, ready=False) as stage:
            await stage.until(lambda: stage.log.count("replica not usable yet") >= 6)  # twice each
            refused = await stage.ask(chat("a"))
            models = await stage.ask(None, "/v1/models", method="GET")

    for reply in (refused, models):
        assert reply.status == 503
        said = reply.error["message"]
        assert said.startswith("No replica has answered yet: r1 (refused the connection), r2 (")
        assert "r2 (answered 200 without a model list: not an OpenAI-compatible server?" in said
        assert "r3 (its host name does not resolve" in said
        assert "http://" not in said


@pytest.mark.usefixtures("no_grace")
async def test_a_router_without_replicas_says_so() -> None:
    async with on_stage(ready=False, admin__allow_empty=True) as stage:
        reply = await stage.ask(chat("a"))

    assert (reply.status, reply.error["message"]) == (503, "No replica is configured.")


async def test_a_model_that_is_not_there_may_be_one_that_has_not_answered() -> None:
    async with Engines(1) as (engine,):
        async with on_stage(engine, f"http://127.0.0.1:{free_port()}") as stage:
            await stage.until(lambda: "replica not usable yet" in stage.log)
            reply = await stage.ask(chat("a", model="other"))

    assert reply.status == 503
    assert "(served: tiny; not answered yet: r2 (refused the connection))" in str(reply.error)


async def test_a_request_is_told_how_all_replicas_are() -> None:
    async with Engines(2) as (first, second), on_stage(first, second, **QUICK) as stage:
        await stage.admin("/admin/replicas/r1/drain", {"draining": True})
        await second.close()
        await stage.until(lambda: "replica down" in stage.log)
        reply = await stage.ask(chat("a"))

        assert reply.status == 503
        assert reply.error["message"] == (
            "No replica of `tiny` can take a request now (r1: draining, r2: down (probe refused))."
        )


@pytest.mark.parametrize("suffix", ["/v1", "/v1/", "/"])
async def test_a_base_url_may_end_as_clients_write_it(suffix: str) -> None:
    async with Engines(1) as (engine,), on_stage(engine.url + suffix) as stage:
        listed = (await stage.admin("/admin/replicas")).json()["replicas"]

        assert (await stage.ask(chat("a"))).status == 200
        assert listed[0]["url"] == engine.url


# -- unknown routes ------------------------------------------------------------------------------


async def test_an_unknown_route_is_logged_with_method_and_path() -> None:
    """Without its query; what may be a key or a name in it is not shown."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        await stage.ask(None, f"/api/tags?key={SECRET}", method="GET")
        await stage.ask({}, f"/{SECRET}/v1/chat/complete")
        await stage.ask(None, "/v1/chat/completions", method="GET")

        for method, path, why in (
            ("GET", "/api/tags", "unknown_route"),
            ("POST", "/*/v1/chat/complete", "unknown_route"),
            ("GET", "/v1/chat/completions", "method_not_allowed"),
        ):
            (line,) = [x for x in stage.log.splitlines() if f'"path":"{path}"' in x]
            assert f'"method":"{method}"' in line
            assert f'"why":"{why}"' in line


# -- event endpoints of another replica ----------------------------------------------------------


async def reasons(stage: Stage) -> dict[str, str]:
    """Read what the admin port says of each replica's cache."""
    listed = (await stage.admin("/admin/replicas")).json()["replicas"]
    return {
        replica["name"]: f"{rank['cache']}: {rank['cache_reason']}"
        for replica in listed
        for rank in replica["ranks"]
    }


@pytest.mark.usefixtures("no_grace")
async def test_events_of_another_replica_are_not_followed() -> None:
    """Only engines can say whose they are: their owner's count, the other is blind."""
    async with Engines(2) as (first, second):
        slip = {"url": second.url} | endpoints(first)
        async with on_stage(ready=False, replicas=[first.url, slip]) as stage:
            await stage.until(lambda: "is an event endpoint of r1, too" in stage.log)
            for number in range(40):  # each goes to either
                await stage.ask(chat(words(number)))
                if stage.state("r1") == "exact":
                    break
            await stage.until(lambda: stage.state("r1") == "exact")

            said = await reasons(stage)
            assert said["r1"] == "exact: "
            assert said["r2"].startswith("blind: events[0]: localhost:")
            assert said["r2"].endswith(" is an event endpoint of r1, too")
            assert "event endpoint differs from the one the engine reports" in stage.log


async def test_exchanged_event_endpoints_are_not_followed() -> None:
    async with Engines(2) as (first, second):
        one, other = {"url": first.url}, {"url": second.url}
        replicas = [one | endpoints(second), other | endpoints(first)]
        async with on_stage(ready=False, replicas=replicas) as stage:
            await stage.until(lambda: stage.log.count("event stream not usable") >= 4)
            said = await reasons(stage)

    assert said["r1"].endswith(" is an event endpoint of r2")
    assert said["r2"].endswith(" is an event endpoint of r1")


async def test_a_replica_whose_endpoint_was_anothers_is_followed_when_that_one_goes() -> None:
    """As on a machine where a new engine has the ports of an old one."""
    async with Engines(1) as (engine,), FakeEngine() as old:
        sources = {"endpoint": endpoints(engine)["events"][0], "replay_endpoint": None}
        old.pages["/kv_event_sources"] = {"0": {"enable_kv_cache_events": True} | sources}
        async with on_stage(engine, ready=False, admin__replica_hosts=["loopback"]) as stage:
            await stage.admin("/admin/replicas", {"url": old.url, "name": "old"})
            await stage.until(lambda: stage.log.count("event stream not usable") >= 2)
            await stage.admin("/admin/replicas/old?now=1", method="DELETE")
            await stage.ask(chat(words(1)))

            await stage.until(lambda: stage.state("r1") == "exact")


async def test_a_port_that_the_engine_does_not_report_is_a_warning() -> None:
    """It may be mapped, so it is followed."""
    async with Engines(2) as (first, second):
        replica = {"url": first.url} | endpoints(second)
        async with on_stage(replicas=[replica]) as stage:
            listed = (await stage.admin("/admin/replicas")).json()["replicas"]

        assert "and its engine reports port" in listed[0]["warning"]
        assert "event endpoint differs from the one the engine reports" in stage.log


# -- an engine that caches nothing ---------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"X-Session-ID": "one"}])
async def test_nothing_is_predicted_of_an_engine_without_prefix_caching(
    headers: dict[str, str],
) -> None:
    """A conversation that grows is computed from its first token in each turn."""
    async with Engines(1, enable_prefix_caching=False) as [engine], on_stage(engine) as stage:
        said = [words(0, num_words=300)]
        for number in range(3):
            reply = await stage.ask(chat(*said), headers=headers)
            said += [reply.text, words(number + 1)]
            assert reply.status == 200
            assert (reply.predicted, reply.reported) == (0, 0)
