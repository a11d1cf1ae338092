"""What is lost of routing when the shared pool evicts, restarts, hangs, lies, or is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import pytest

from router.replicas import deaths
from router.request import retry
from tests.faults.pooled import pool_tokens, pooled
from tests.faults.stage import Engines, arm, chat, holder, on_stage, streamed, words

Trouble = Literal["hang", "garbage", "error", "half"]


async def test_without_a_pool_the_admin_port_says_so() -> None:
    """Nothing is made up."""
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        assert (await stage.admin("/admin/pool")).json() == {"pool": None, "pools": []}


@pytest.mark.parametrize("trouble", ["hang", "garbage", "error", "half"])
async def test_a_master_in_trouble_fails_no_request(trouble: Trouble) -> None:
    """It is named, counted and not counted on; when it is well again it is used again."""
    async with pooled() as it:
        await it.ask(0)
        await it.known()
        it.master.fault = trouble
        await it.is_up(False)
        alone = await it.move(1, await it.ask(1))
        it.master.fault = "none"
        await it.is_up(True)
        again = await it.move(2, await it.ask(2))

        assert pool_tokens(alone) == 0
        assert pool_tokens(again) == again.reported > 0
        failures = it.stage.router.metrics.render().decode()
        assert "warmroute_pool_failures_total{" in failures
        assert "pool lost: its contents are not used" in it.stage.log


async def test_a_master_that_was_never_there_is_said_once() -> None:
    """Requests are served from the start, and the log names it once."""
    async with (
        Engines(2) as engines,
        on_stage(*engines, mooncake__master="http://127.0.0.1:9") as stage,
    ):
        replies = [await stage.ask(chat(words(number))) for number in range(5)]
        await stage.until(
            lambda: stage.metric("warmroute_pool_failures_total", code="pool_gone") > 3
        )

        assert all(reply.status == 200 for reply in replies)
        assert all(pool_tokens(reply) == 0 for reply in replies)
        assert stage.log.count("pool lost") == 2  # the stage logs in two forms


@pytest.mark.parametrize("stream", [False, True])
async def test_a_read_from_the_pool_that_fails_is_computed_instead(stream: bool) -> None:
    """Every replica fails to read what a dead one held; under another name nothing is read."""
    async with pooled() as it:
        first = await it.ask(0)
        await it.known()
        for engine in it.engines:
            arm(engine, "first_event_error", pooled=True)
        await it.drain(first.replica, True)
        body = chat(words(0))
        reply = await it.stage.ask(streamed(body) if stream else body)
        await it.drain(first.replica, False)

        assert reply.status == 200
        assert reply.usage["completion_tokens"] == 4
        assert reply.replica != first.replica
        assert reply.predicted == reply.reported == 0
        assert it.stage.metric("warmroute_pool_skipped_total") == 1
        assert it.stage.metric("warmroute_replica_healthy") == 2


@pytest.mark.parametrize("is_known", [False, True], ids=["as it is asked", "meanwhile"])
async def test_a_failed_read_and_a_dead_replica_are_no_clients_error(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read fails; the other replica dies as the budget's only retry comes to it, or before.

    What the dead one held is computed by the one that is left.
    """
    monkeypatch.setattr(deaths, "NUM_ALWAYS", 1)
    settings = {"forward__retry_ratio": 0.0, "policy__name": "least_loaded"}
    async with pooled(health__interval_s=3600.0, **settings) as it:
        first = await it.ask(0)
        await it.known()
        dead = holder(it.stage, first, it.engines)
        (alive,) = (engine for engine in it.engines if engine is not dead)
        arm(alive, "first_event_error", pooled=True)
        arm(dead, "hang", text="stays")
        fleet = it.stage.router.fleet

        def dies(*_: float) -> float:
            """Draw the pause before the second try."""
            arm(dead, "kill")
            fleet.members.drain(first.replica, draining=is_known)
            return 0.0

        (other,) = {"r1", "r2"} - {first.replica}
        fleet.members.drain(other)
        async with it.stage.hanging_up(chat("stays")):  # so the next one goes to the other
            await it.stage.until(lambda: not fleet.load.is_idle(first.replica))
            fleet.members.drain(other, draining=False)
            monkeypatch.setattr(retry, "random", SimpleNamespace(uniform=dies))
            reply = await it.stage.ask(chat(words(0)))

        assert reply.status == 200
        assert reply.replica == other
        assert it.stage.metric("warmroute_pool_skipped_total") == 1
