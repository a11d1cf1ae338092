"""Host names that do not resolve, or not any more, while requests come."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest

from router.base import host_names as module
from tests.faults.stage import Engines, Json, Stage, chat, on_stage, words
from tests.resolver import AGAIN, NO_NAME, Named, Resolver, resolver


@pytest.fixture(autouse=True)
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every answer of the resolver be old at once."""
    for pace in ("FRESH_S", "DOUBT_S"):
        monkeypatch.setattr(module, pace, 0.0)


@asynccontextmanager
async def on_named_stage() -> AsyncIterator[tuple[Stage, Resolver]]:
    """Run a router in front of two engines that it knows by names; no connection is kept."""
    async with Engines(2) as engines:
        named = [Named(engine, f"engine-{number}.test") for number, engine in enumerate(engines)]
        with resolver() as system:
            system.hosts = {each.name: ["127.0.0.1"] for each in named}
            async with on_stage(
                *named, forward__keepalive_s=0.001, health__interval_s=0.05
            ) as stage:
                yield stage, system


async def is_wrong(stage: Stage, *lines: str) -> None:
    """Wait until `warmroute status` says just this; the state is made once in a while."""
    async with asyncio.timeout(60):
        while sorted(await wrong(stage)) != sorted(lines):  # noqa: ASYNC110 (nothing says when)
            await asyncio.sleep(0.05)


async def wrong(stage: Stage) -> list[str]:
    state: Json = (await stage.admin("/admin/state", method="GET")).json()
    return list(state["degraded"])


@pytest.mark.parametrize("failure", [AGAIN, NO_NAME, None])
async def test_requests_go_on_while_no_name_resolves(failure: socket.gaierror | None) -> None:
    """The resolver fails, knows no name, or says nothing; it is seen, and so is its end."""
    async with on_named_stage() as (stage, system):
        assert (await stage.ask(chat(words(0)))).status == 200
        await is_wrong(stage)
        if failure is None:
            system.hang()
        system.failure = failure
        replies = []
        async with asyncio.timeout(60):
            while len(stage.router.names.failing) < 2:
                replies.append(await stage.ask(chat(words(len(replies)))))
        replies += [await stage.ask(chat(words(100 + number))) for number in range(8)]

        assert {reply.status for reply in replies} == {200}
        assert {reply.replica for reply in replies} == {"r1", "r2"}
        assert stage.metric("warmroute_unresolved_names") == 2
        assert {status.state for status in stage.router.fleet.load.status(0)} == {"up"}
        text = "host name engine-{}.test does not resolve: its last addresses are used"
        await is_wrong(stage, text.format(0), text.format(1))
        # Two names, in both forms; on a busy machine a name may have failed before, for a moment.
        num_again = stage.log.count("host name resolves again")
        assert stage.log.count("its last addresses are used on") - num_again == 4

        system.answer()
        for number in count(200):  # of other prompts, so at both replicas
            if not stage.router.names.failing:
                break
            await stage.ask(chat(words(number)))
        assert stage.metric("warmroute_unresolved_names") == 0
        await is_wrong(stage)


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_replica_whose_name_is_unknown_at_the_start_is_named(is_silent: bool) -> None:
    """In the log, by /readyz and by `warmroute status`; it is found once its name is known."""
    async with Engines(1) as (engine,):
        named = Named(engine, "engine-0.test")
        with resolver() as system:
            if is_silent:
                system.hang()
            async with on_stage(named.url, ready=False) as stage:
                why = "its host name does not resolve"
                await stage.until(lambda: why in stage.log)
                reason = "the resolver does not answer" if is_silent else "not known"
                assert reason in stage.log
                ready = await stage.ask(None, "/readyz", method="GET")
                assert (ready.status, why in ready.body.decode()) == (503, True)
                (line,) = [line for line in await wrong(stage) if "replica r1" in line]
                assert line.startswith("replica r1 is not discovered: ")
                assert why in line

                system.hosts[named.name] = ["127.0.0.1"]
                system.answer()
                await stage.ready()
                assert (await stage.ask(chat(words(1)))).status == 200
