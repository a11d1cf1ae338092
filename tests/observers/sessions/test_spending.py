"""GPU seconds and money of sessions, tenants and models, through a whole router."""

from __future__ import annotations

import asyncio
import csv
import io
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from loadtest.engine_model.time_model import TimeModel
from policies.view import CandidateId
from router.api.sessions import engine_name, session_hash
from router.observers.sessions.describe import sum_rows
from router.observers.sessions.session_ledger import SessionLedger, Thread
from router.observers.sessions.turns import Turn
from router.scheduling.waiting import QueueRules
from tests.faults.stage import Engines, Stage, chat, on_stage, on_stages, streamed, words
from tests.faults.tenants import A as TENANT_A
from tests.faults.tenants import tenants_file
from tests.redis_servers import Start

Row = dict[str, Any]
R1 = CandidateId("r1")
UNHURRIED = TimeModel(base_ms=5.0, ms_per_prefill_token=0.3)  # slower than the cost model's prior


async def sessions(stage: Stage, query: str = "") -> list[Row]:
    """List the sessions, all of whose turns are booked."""
    stage.router.story.steps.settling.close()  # what waits for events has none to come
    found: list[Row] = (await stage.admin(f"/admin/sessions?{query}")).json()["sessions"]
    return found


async def two_turns(stage: Stage, *engines: Any, headers: Any = None) -> None:
    await stage.ask(streamed(chat(words(1, 400))), headers=headers)
    await stage.settled(*engines)
    await stage.ask(streamed(chat(words(1, 400), "yes", words(2))), headers=headers)
    await stage.settled(*engines)


async def test_without_a_price_there_are_gpu_seconds_only() -> None:
    """Cached tokens cost nearly nothing, and computing them was saved."""
    async with Engines(1, time_model=UNHURRIED) as engines, on_stage(*engines) as stage:
        await two_turns(stage, *engines)
        (row,) = await sessions(stage)
        name = row["session"]
        first, second = (await stage.admin(f"/admin/sessions/{name}")).json()["turns_shown"]

    assert (row["cost"], row["cost_saved"]) == (None, None)
    assert row["gpu_s"] == pytest.approx(row["engine_s"] + row["decode_s"], abs=2e-3)
    assert (first["saved_ms"], second["cost"]) == (0.0, None)
    assert 0 < second["engine_ms"] < 0.2 * first["engine_ms"]
    assert second["saved_ms"] == pytest.approx(first["engine_ms"], rel=0.1)


async def test_each_replica_has_its_own_price() -> None:
    """Its own, else the default of all; a turn costs what its replica does."""
    async with Engines(2, time_model=UNHURRIED) as engines:
        own = {"url": engines[0].url, "cost_per_hour": 36.0}
        other = {"url": engines[1].url}
        async with on_stage(*engines, replicas=[own, other], engine__cost_per_hour=3.6) as stage:
            for number in range(6):
                headers = {"X-Session-ID": f"s{number}"}
                await stage.ask(streamed(chat(words(number, 300))), headers=headers)
            rows = await sessions(stage)

    prices = {"r1": 36.0, "r2": 3.6}
    assert {row["home"] for row in rows} == set(prices)
    for row in rows:
        assert row["cost"] == pytest.approx(row["gpu_s"] * prices[row["home"]] / 3600, rel=0.05)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_no_turn_is_charged_more_than_the_time_that_passed(is_streamed: bool) -> None:
    """Whatever a model that is still to be learned predicts; and what was saved shrinks with it."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        begun_s = time.monotonic()
        for number in range(3):
            body = chat(words(number, 3_000))
            await stage.ask(streamed(body) if is_streamed else body)
        took_s = time.monotonic() - begun_s
        rows = await sessions(stage)
        await stage.ask(chat(words(0, 3_000), "yes", "go on"))
        await stage.settled(*engines)
        saved_s = max(row["saved_s"] for row in await sessions(stage))

    assert 0.0 < sum(row["gpu_s"] for row in rows) <= took_s + 2e-3
    assert saved_s < 1.0


@pytest.mark.parametrize("num_routers", [1, 2])
async def test_all_requests_together_get_at_most_the_time_that_passed(
    start_redis: Start, num_routers: int
) -> None:
    """Through however many routers; the sum of their own times is several times as long.

    The engine begins once all routers know of all requests: what they learn late may count twice.
    """
    slow = TimeModel(base_ms=10.0)
    async with (
        Engines(1, time_model=slow, reply_tokens=150) as engines,
        on_stages(
            *engines,
            redis=start_redis(),
            number=num_routers,
            queue_rules=QueueRules(window=12),
            health__interval_s=60.0,
        ) as stages,
    ):
        engine = engines[0].replica
        await engine.pause(loses_cache=False)
        begun_s = time.monotonic()
        async with asyncio.TaskGroup() as tg:
            for n in range(12):
                body = streamed(chat(words(n))) | {"max_tokens": 150}
                asked = stages[n % num_routers].ask(body, headers={"X-Session-ID": f"s{n}"})
                tg.create_task(asked)
            for stage in stages:
                sent = stage.router.fleet.load.num_sent
                await stage.until(lambda sent=sent: sent("r1") == 12)  # type: ignore[misc]
            engine.resume()
        took_s = time.monotonic() - begun_s
        for stage in stages:
            stage.router.story.steps.settling.close()
        own_s = [
            sum(
                stage.metric("warmroute_gpu_seconds_total", model="tiny", kind=kind)
                for kind in ("prompt", "answer")
            )
            for stage in stages
        ]

    assert all(each > 0.0 for each in own_s)
    assert 1.0 < sum(own_s) <= took_s


async def test_turns_are_summed_by_tenant_and_model(tmp_path: Path) -> None:
    """As JSON, as CSV, and in the state of the page."""
    settings = {"tenants__file": tenants_file(tmp_path), "engine__cost_per_hour": 3.6}
    async with (
        Engines(1, time_model=UNHURRIED) as engines,
        on_stage(*engines, **settings) as stage,
    ):
        await two_turns(stage, *engines, headers=TENANT_A)
        await stage.settled(*engines)
        (session,) = await sessions(stage)
        (tenant,) = (await stage.admin("/admin/sessions?by=tenant")).json()["rows"]
        (model,) = (await stage.admin("/admin/sessions?by=model")).json()["rows"]
        text = (await stage.admin("/admin/sessions?by=tenant&format=csv")).body.decode()
        listed = (await stage.admin("/admin/sessions?format=csv")).body.decode()
        costs = (await stage.admin("/admin/state")).json()["costs"]
        refused = await stage.admin("/admin/sessions?by=colour")
        seconds = {
            kind: stage.metric("warmroute_gpu_seconds_total", model="tiny", kind=kind)
            for kind in ("prompt", "answer", "saved")
        }
        spent = stage.metric("warmroute_cost_total", model="tiny", kind="spent")

    assert (tenant["name"], model["name"]) == ("a", "tiny")
    shared = ("turns", "prompt_tokens", "gpu_s", "saved_s", "cost", "cost_saved", "causes")
    for name in shared:
        assert tenant[name] == model[name] == session[name]
    assert tenant["cost"] == pytest.approx(tenant["gpu_s"] / 1000, rel=0.05)
    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["tenant"], row["turns"], float(row["cost"])) == ("a", "2", tenant["cost"])
    (row,) = csv.DictReader(io.StringIO(listed))
    assert float(row["cost_saved"]) == session["cost_saved"]
    assert costs == {"tenant": [tenant], "model": [model]}
    assert seconds["prompt"] + seconds["answer"] == pytest.approx(model["gpu_s"], abs=2e-3)
    assert seconds["saved"] == pytest.approx(model["saved_s"], abs=1e-3)
    assert spent == pytest.approx(model["cost"], abs=1e-8)  # as rounded
    assert refused.status == 400
    assert "by must be one of: session, tenant, model" in refused.body.decode()


async def test_ids_of_clients_are_shown_only_if_that_is_allowed() -> None:
    """In headers and in bodies; a sub-agent is found by what is shown of it, too."""
    body = streamed(chat(words(2))) | {"session_id": "in-the-body"}
    by_header = {"X-Session-ID": "in-a-header"}
    agent = {"X-Session-ID": "", "x-claude-code-session-id": "c1", "x-claude-code-agent-id": "a1"}
    for is_shown in (True, False):
        async with Engines(1) as engines:
            async with on_stage(*engines, session__show_ids=is_shown) as stage:
                await stage.ask(streamed(chat(words(1))), headers=by_header)
                await stage.ask(body, headers={"X-Session-ID": ""})
                await stage.ask(streamed(chat(words(3))), headers=agent)
                await stage.ask(streamed(chat(words(4))), headers={"X-Session-ID": ""})
                rows = await sessions(stage)
                titles = (await stage.admin("/admin/state")).json()["sessions"]["titles"]
                found = await stage.admin("/admin/sessions/c1%2Fa1")
                log, metrics = stage.log, (await stage.admin("/metrics")).body.decode()

        shown = {row["title"] for row in rows}
        assert shown == ({"in-a-header", "in-the-body", "c1/a1", None} if is_shown else {None})
        assert len(titles) == (3 if is_shown else 0)
        assert found.json()["session"] == engine_name(session_hash("c1\0a1", ""))
        assert "in-a-header" not in log + metrics


def test_sums_are_of_all_routers_and_metrics_of_this_one() -> None:
    """Prometheus adds up what routers count."""
    ledger = SessionLedger()
    thread = Thread(
        space=0,
        contract=None,
        keys=(),
        num_tokens=10,
        parts=None,
        candidate=R1,
        num_emptied=0,
        at_s=0.0,
    )
    ledger.remember(1, None, thread)
    turn = Turn(
        request_id="q",
        at=1.0,
        candidate=R1,
        model="m",
        outcome="ok",
        num_tokens=10,
        engine_ms=1000.0,
        decode_ms=500.0,
        cost=2.0,
    )
    ledger.add(1, turn)
    ledger.learn_turn(1, turn)
    ledger.learn_turn(1, replace(turn, cost=None))
    (row,) = sum_rows(ledger, "model")
    ((model, own),) = ledger.own_by_model()

    assert (row["turns"], row["gpu_s"], row["cost"], row["cost_saved"]) == (3, 4.5, 4.0, None)
    assert (model, own.num_turns, own.gpu_s, own.cost) == ("m", 1, 1.5, 2.0)
