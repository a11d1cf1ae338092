"""router.observers.experiments: in a whole router, from the header to the record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.engine_model.time_model import TimeModel
from policies.view import CandidateId
from router.api.sessions import session_hash
from router.observers.experiments import Experiments
from router.observers.experiments.runner import ExperimentRunner
from router.records.outcome import Outcome
from router.replicas import Booking
from tests.faults.stage import (
    SECRET,
    Engines,
    Json,
    Reply,
    Stage,
    arm,
    chat,
    on_stage,
    on_stages,
    records_in,
    streamed,
    words,
)
from tests.redis_servers import Start

A = {"name": "a", "policy": "least_loaded"}
B = {"name": "b", "policy": "kv_aware", "params": {"alpha": 0.5}}


def settings(**fields: Any) -> Json:
    definition = {"name": "e", "arms": [A, B]} | fields
    return {"experiment__definitions": [definition]}


async def turn(stage: Stage, session: int, number: int = 0, **fields: Any) -> Reply:
    headers = {"X-Session-ID": f"{SECRET}-{session}"}
    return await stage.ask(streamed(chat(words(session), **fields)), headers=headers)


async def described(stage: Stage, name: str = "e") -> Json:
    found: Json = (await stage.admin(f"/admin/experiments/{name}")).json()
    return found


# -- split ---------------------------------------------------------------------------------------


async def test_a_session_stays_in_its_arm(tmp_path: Path) -> None:
    """Header, record, log and metrics say which; its policy decides."""
    file = tmp_path / "decisions.jsonl"
    async with (
        Engines(2) as engines,
        on_stage(*engines, log__decisions=file, **settings()) as stage,
    ):
        arms: dict[int, set[str]] = {}
        for number in range(60):
            reply = await turn(stage, number % 20)
            arms.setdefault(number % 20, set()).add(reply.headers["x-warmroute-arm"])
        counted = stage.metric("warmroute_arm_requests_total", experiment="e", outcome="ok")
        tokens = stage.metric("warmroute_arm_tokens_total", kind="prompt")
        recomputed = stage.metric("warmroute_arm_tokens_total", kind="recomputed")
        seen = stage.metric("warmroute_arm_ttft_seconds_count", experiment="e")
        shares = stage.metric("warmroute_experiment_share_ratio", experiment="e", arm="a")
        assert '"arm":"e/a"' in stage.log
    records = records_in(file)

    assert all(len(each) == 1 for each in arms.values())
    assert {each for own in arms.values() for each in own} == {"e/a", "e/b"}
    assert (counted, seen, shares) == (60, 60, 0.5)
    assert 0 < recomputed < tokens
    for record in records:
        assigned = record.assignment
        assert assigned is not None
        assert (assigned.experiment, assigned.design, assigned.share) == ("e", "split", 0.5)
        assert assigned.unit == f"{record.snapshot.request.session_hash:016x}"
        expected = {"a": "least_loaded", "b": "kv_aware"}[assigned.arm]
        assert record.policy == expected
        assert record.policy_params.get("alpha") == (0.5 if assigned.arm == "b" else None)


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("messages", {"max_tokens": 4, "messages": [{"role": "user", "content": words(7)}]}),
        ("responses", {"max_output_tokens": 4, "input": words(7)}),
    ],
)
async def test_every_api_is_in_experiments(tmp_path: Path, api: str, fields: Json) -> None:
    """Its sessions have variants; first tokens and prompt tokens are counted."""
    file = tmp_path / "decisions.jsonl"
    logged = settings() | {"log__decisions": file}
    async with Engines(2) as engines, on_stage(*engines, **logged) as stage:
        body = {"model": "tiny", "stream": True, **fields}
        for session in range(12):
            headers = {"X-Session-ID": f"s{session}"}
            reply = await stage.ask(body, f"/v1/{api}", headers=headers)
            assert reply.headers["x-warmroute-arm"] in ("e/a", "e/b")
        ttft = "warmroute_arm_ttft_seconds_count"
        await stage.until(lambda: stage.metric(ttft, experiment="e") == 12)
        assert stage.metric("warmroute_arm_tokens_total", kind="prompt") > 0
        path = f"/admin/explain?api={api}"
        explained = (await stage.admin(path, {"model": "tiny", **fields}, headers)).json()
    records = records_in(file)

    assert {record.assignment.arm for record in records if record.assignment} == {"a", "b"}
    assert {record.api for record in records} == {api}
    assert f"e/{explained['assignment']['arm']}" == reply.headers["x-warmroute-arm"]
    assert explained["num_tokens"] == records[-1].num_prompt_tokens


async def test_without_a_session_the_conversation_is_the_unit(tmp_path: Path) -> None:
    """All turns that begin alike, whatever follows; completions are in no arm."""
    file = tmp_path / "decisions.jsonl"
    async with (
        Engines(2) as engines,
        on_stage(
            *engines, log__decisions=file, session__known_headers=False, **settings()
        ) as stage,
    ):
        arms = []
        for number in range(12):
            texts = [words(number), "ok", words(50 + number), "ok", words(99)]
            replies = [await stage.ask(chat(*texts[:length])) for length in (1, 3, 5)]
            arms.append({reply.headers["x-warmroute-arm"] for reply in replies})
        completion = await stage.ask({"model": "tiny", "prompt": words(1)}, "/v1/completions")
        monologue = await stage.ask(
            chat(words(1)) | {"messages": [{"role": "system", "content": "x"}]}
        )

    assert all(len(each) == 1 for each in arms)
    assert len(set.union(*arms)) == 2
    for reply in (completion, monologue):
        assert "x-warmroute-arm" not in reply.headers
        assert reply.headers["x-warmroute-policy"] == "kv_aware"
    assert len({r.assignment.unit for r in records_in(file) if r.assignment is not None}) == 12


async def test_what_is_held_out_or_passed_through_is_as_without() -> None:
    """The default policy decides; no header, no count."""
    held = settings(arms=[A | {"share": 0.005}, B | {"share": 0.005}], holdout=0.99)
    async with Engines(2) as engines, on_stage(*engines, **held) as stage:
        for number in range(8):
            reply = await turn(stage, number)
            assert reply.headers.get("x-warmroute-arm") in (None, "e/a", "e/b")
        passed = await stage.ask(None, "/v1/responses/r1", method="GET")

        assert "x-warmroute-arm" not in passed.headers
        assert stage.metric("warmroute_arm_requests_total") <= 2


# -- guardrails ----------------------------------------------------------------------------------


async def test_an_arm_that_fails_is_stopped() -> None:
    """Its requests are the default policy's from then on; log, metric and admin port say why."""
    fields = settings(guardrails={"max_error_rate": 0.3, "min_samples": 3})
    async with (
        Engines(2) as engines,
        on_stage(*engines, forward__max_tries=1, **fields) as stage,
    ):
        for engine in engines:
            arm(engine, "status", status=500)
        for number in range(200):
            await turn(stage, number)
            if (await described(stage))["standing"] == "ended":
                break
        shown = await described(stage)
        after = await turn(stage, 1)

        assert shown["standing"] == "ended"
        assert shown["ended"]["guardrail"] == "errors"
        (stopped,) = [each for each in shown["arms"] if each["stopped"] is not None]
        assert stopped["stopped"]["reason"].endswith("max_error_rate is 0.3")
        assert "x-warmroute-arm" not in after.headers
        assert stage.metric("warmroute_experiment_stops_total", guardrail="errors") == 1
        assert stage.metric("warmroute_experiment_running") == 0
        assert "variant stopped" in stage.log
        assert "experiment ended" in stage.log


SLOT_S = 0.5
SLOW = CandidateId("r1")
SLOWLY = TimeModel(base_ms=800.0)  # a first token takes 0.8 s; elsewhere a few ms


def switchback(**fields: Any) -> Json:
    """One arm follows sessions to the slow replica, the other one avoids it: it is busy."""
    arms = [
        {"name": "idle", "policy": "least_loaded"},
        {"name": "home", "policy": "session_sticky"},
    ]
    base = {"design": "switchback", "slot_s": SLOT_S, "wash_out_s": 0.05, "arms": arms}
    return settings(**(base | fields))


@asynccontextmanager
async def slow_homes(
    file: Path, time_model: TimeModel = SLOWLY, **fields: Any
) -> AsyncIterator[Stage]:
    """A fleet whose first replica is slow and never idle, and sessions that live there."""
    async with (
        Engines(1, time_model=time_model) as (slow,),
        Engines(2) as fast,
        on_stage(slow, *fast, log__decisions=file, **switchback(**fields)) as stage,
    ):
        await stage.until(lambda: len(stage.router.fleet.members.replicas) == 3)
        for number in range(8):
            home(stage, number)
        fleet, now_s = stage.router.fleet, asyncio.get_running_loop().time()
        busy = fleet.load.admit(SLOW, Booking(num_uncached_tokens=0, num_cached_tokens=0), now_s)
        try:
            yield stage
        finally:
            fleet.load.end(busy, now_s, Outcome.CLIENT_GONE)


def home(stage: Stage, session: int) -> None:
    """Let a session's last turn have run on the slow replica."""
    loop = asyncio.get_running_loop()
    digest = session_hash(f"{SECRET}-{session}", "tiny")
    stage.router.conversations.begin(digest, SLOW, 0, 0, loop.time())
    stage.router.conversations.end(digest, loop.time())


async def traffic(
    stage: Stage, is_over: Any, *, num_clients: int = 4, limit_s: float = 120.0
) -> None:
    """Let clients ask one after the other until something is so."""

    async def client(number: int) -> None:
        while not is_over():
            await turn(stage, number, max_tokens=1)
            home(stage, number)
            await asyncio.sleep(0.02)

    async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tg:
        for number in range(num_clients):
            tg.create_task(client(number))


async def test_a_switchback_is_ended_by_its_guardrail(tmp_path: Path) -> None:
    """Some slots of the slow arm are enough; the good arm is never blamed."""
    file = tmp_path / "decisions.jsonl"
    rules = {"max_ttft_s": 0.4, "ttft_quantile": 0.9, "min_samples": 2}
    async with slow_homes(file, guardrails=rules) as stage:
        experiments = runner_of(stage)
        await traffic(stage, lambda: experiments.is_empty)
        shown = await described(stage)
        reply = await turn(stage, 20)

        assert shown["standing"] == "ended"
        assert shown["ended"]["guardrail"] == "ttft"
        assert shown["arms"][1]["stopped"] is not None
        assert "slots' first tokens came after 0.4 s" in shown["arms"][1]["stopped"]["reason"]
        assert shown["arms"][0]["stopped"] is None
        assert stage.metric("warmroute_experiment_stops_total", arm="home") == 1
        assert reply.headers["x-warmroute-policy"] == "kv_aware"


# -- several routers -----------------------------------------------------------------------------


async def test_orders_at_one_router_hold_at_all(start_redis: Start) -> None:
    """Start, ramp, stop of an arm; a router that joins later knows them; all assign alike."""
    redis = start_redis()
    definition = {"name": "e", "arms": [A, B, {"name": "c", "policy": "random"}]}
    async with Engines(2) as engines, on_stages(*engines, redis=redis) as stages:
        first, second = stages
        assert (await first.admin("/admin/experiments", definition)).status == 201
        await second.until(lambda: not runner_of(second).is_empty)
        for number in range(12):
            replies = [await turn(stage, number) for stage in stages]
            assert replies[0].headers["x-warmroute-arm"] == replies[1].headers["x-warmroute-arm"]
        conflict = await second.admin("/admin/experiments", definition | {"name": "f"})
        assert conflict.status == 409
        await second.admin("/admin/experiments/e/stop", {"arm": "b", "reason": "slow"})
        await first.until(lambda: "b" in state_of(first).stopped)
        await first.admin("/admin/experiments/e/ramp", {"shares": {"c": 0.1}})
        await second.until(lambda: state_of(second).changes)
        async with on_stage(*engines, redis=redis) as late:
            await late.until(lambda: not runner_of(late).is_empty)
            assert state_of(late) == state_of(first) == state_of(second)
        await first.admin("/admin/experiments/e", method="DELETE")
        await second.until(lambda: runner_of(second).is_empty)
        assert (await second.admin("/admin/experiments")).json() == {"experiments": []}


async def test_a_redis_that_lost_experiments_gets_them_again(start_redis: Start) -> None:
    """A router that knows them stores them again; nonsense beside them is logged once."""
    redis = start_redis()
    async with Engines(1) as engines, on_stage(*engines, redis=redis) as stage:
        await stage.until(lambda: stage.metric("warmroute_redis_up") == 1)
        await stage.admin("/admin/experiments", {"name": "e", "arms": [A, B]})
        key = "{wr:default}:experiments"
        await stage.until(lambda: redis.client.hexists(key, "e"))
        state = redis.client.hget(key, "e")
        redis.client.flushall()
        await stage.until(lambda: redis.client.hexists(key, "e"))
        await stage.until(lambda: stage.log.count("redis is connected") == 4)  # in two forms
        redis.client.hset(key, "other", state)  # type: ignore[arg-type]
        redis.client.hset(key, "garbage", b"\xc1")
        redis.cut_connections()
        await stage.until(lambda: "experiment not followed" in stage.log)

        assert stage.metric("warmroute_sharing_total", kind="garbage") >= 1
        assert state_of(stage).is_running


def runner_of(stage: Stage) -> ExperimentRunner:
    experiments = stage.router.observer(Experiments)
    assert experiments is not None
    return experiments.runner


def state_of(stage: Stage) -> Any:
    return runner_of(stage).find("e").state


# -- orders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("", {"name": "e"}, 400, "variants: is missing"),
        ("", {"name": "e", "arms": [A, B], "desing": 1}, 400, "did you mean 'design'?"),
        ("", {"name": "f", "arms": [A, A]}, 400, "variants[1].name: 'a' is used twice"),
        ("", {"name": "f", "arms": [A, B]}, 409, "'e' claims all requests already"),
        ("", {"name": "e", "arms": [A, B]}, 409, "stop it first"),
        (
            "",
            {"name": "f", "design": "partition", "arms": [A, B]},
            400,
            "must be split or",
        ),
        ("", b"[]", 400, "send {"),
        ("/e/ramp", {"shares": {"a": 0.9}}, 400, "shares sum to 1.4"),
        ("/e/ramp", {"shares": {}}, 400, "length >= 1"),
        ("/e/stop", {"variant": "x"}, 400, "variant.x: no such variant"),
        ("/e/stop", {"arm": "x"}, 400, "no such variant"),
        ("/e/stop", {"why": "x"}, 400, "unknown field `why`"),
        ("/x/stop", {}, 404, "no experiment 'x'; known: e"),
        ("/x/ramp", {"shares": {"a": 0.1}}, 404, "no experiment 'x'"),
    ],
)
async def test_wrong_orders_are_refused(
    path: str, body: Json | bytes, status: int, said: str
) -> None:
    """In the usual error shape; the experiment stays as it is."""
    async with Engines(1) as engines, on_stage(*engines, **settings()) as stage:
        reply = await stage.admin(f"/admin/experiments{path}", body)

        assert (reply.status, reply.error["code"]) == (status, status)
        assert said in reply.error["message"]
        assert (await described(stage))["standing"] == "running"


async def test_a_removed_experiment_leaves_no_series() -> None:
    """Its names are labels; those of others stay."""
    async with Engines(1) as engines, on_stage(*engines, **settings(models=["tiny"])) as stage:
        await stage.admin("/admin/experiments", {"name": "f", "models": ["x"], "arms": [A, B]})
        await turn(stage, 1)
        assert stage.metric("warmroute_arm_requests_total", experiment="e") == 1
        unknown = await stage.admin("/admin/experiments/x", method="DELETE")
        removed = await stage.admin("/admin/experiments/e", method="DELETE")
        page = stage.router.metrics.render().decode()

        assert (unknown.status, removed.status) == (404, 200)
        assert 'experiment="e"' not in page
        assert 'experiment="f"' in page
