"""`warmroute status`: what it says, and its exit status."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

from loadtest.emulator.emulator import Emulator
from policies.load import LeastLoaded
from policies.policy import Policy
from policies.view import Decision, Snapshot
from router.cli import main
from router.cli.admin import Admin
from router.cli.status import report
from router.tokens.trust import Difference
from tests.cli.states import COLUMNS, REPLICA, state
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import SECRET, Engines, Stage, arm, chat, on_stage, streamed, words

QUICK = {"health__interval_s": 0.02, "health__load_interval_s": 0.02}


async def status(stage: Stage, *args: str) -> Result:
    """Run the command beside the router."""
    command = ("status", "--admin", stage.admin_url, *args)
    return await asyncio.to_thread(lambda: CliRunner().invoke(main, command))


async def test_a_router_in_order_is_status_0() -> None:
    """It shows replicas, queue, sessions and tokens. A replica without requests is in order."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        await stage.ask(streamed(chat(words(1))))
        await stage.settled(*engines)
        await stage.ask(streamed(chat(words(1), "yes", words(2))))
        await stage.settled(*engines)
        result = await status(stage)
        raw = await status(stage, "--json")

    assert result.exit_code == raw.exit_code == 0
    lines = result.stdout.splitlines()
    assert re.fullmatch(
        r"\d+\.\d requests/s, 0% failed, TTFT .* \(P99\), longest wait 0 s", lines[0]
    )
    assert "2 of 2 replicas up, 1 cache known, 0 in flight, 0 waiting" in lines[1]
    rows = sorted(line.split() for line in lines if line.startswith(("r1 ", "r2 ")))
    assert [row[:2] for row in rows] == [["r1", "up"], ["r2", "up"]]
    assert sorted(row[2] for row in rows) == ["exact", "no-events"]
    assert "queue: nothing waits" in lines
    assert "sessions: 1 known" in result.stdout
    assert "tokens of the last 1 minute: " in result.stdout
    assert lines[-1] == "all is well"
    assert json.loads(raw.stdout)["degraded"] == []
    assert SECRET not in result.stdout


async def test_a_replica_that_is_missing_is_status_1() -> None:
    """What is degraded is the last line; a replica that drains is not."""
    async with Engines(2) as engines, on_stage(*engines, "http://127.0.0.1:9") as stage:
        await stage.admin("/admin/replicas/r1/drain", {"draining": True})
        result = await status(stage)
        raw = await status(stage, "--json")

    assert result.exit_code == raw.exit_code == 1
    (said,) = json.loads(raw.stdout)["degraded"]
    assert said.startswith("replica r3 is not discovered: http://127.0.0.1:9/v1/models")
    assert result.stdout.splitlines()[-1] == f"✗ {said}"
    (row,) = [line.split() for line in result.stdout.splitlines() if line.startswith("r1 ")]
    assert row[1] == "draining"


async def stop(stage: Stage, how: str, engine: Emulator, name: str) -> None:
    """Have a replica take no requests any more, and wait until the router knows."""
    fleet = stage.router.fleet
    if how == "drained":
        await stage.admin(f"/admin/replicas/{name}/drain", {"draining": True})
    elif how == "dead":
        await engine.__aexit__(None, None, None)
        await stage.until(lambda: fleet.members.is_down(name))
    else:
        await stage.admin("/admin/control", {"route": how, "replicas": [name]})
    await stage.until(
        lambda: fleet.members.is_down(name) or not fleet.members.replica(name).is_offered
    )


@pytest.mark.parametrize(
    "how", [("drained", "drained"), ("sleep", "sleep"), ("pause", "drained"), ("dead", "sleep")]
)
async def test_a_fleet_that_takes_no_requests_is_degraded(how: tuple[str, str]) -> None:
    """Whatever the reason: status, state, metric and the clients' 503 say the same."""
    async with Engines(2) as engines, on_stage(*engines, **QUICK) as stage:
        await stop(stage, how[0], engines[0], "r1")
        left = stage.metric("warmroute_available_replicas", model="tiny")
        await stop(stage, how[1], engines[1], "r2")
        result = await status(stage)
        state = (await stage.admin("/admin/state")).json()
        reply = await stage.ask(chat(words(1)))

        assert stage.metric("warmroute_available_replicas", model="tiny") == 0
        assert left == 1
    assert (result.exit_code, reply.status) == (1, 503)
    said = next(each for each in state["degraded"] if "takes requests" in each)
    assert said.startswith("no replica takes requests for tiny: r1: ")
    assert f"✗ {said}" in " ".join(result.stdout.split())


async def test_a_model_that_no_replica_takes_requests_for_is_named() -> None:
    """Although another model is served."""
    async with (
        Engines(1) as (one,),
        Engines(1, served_model_names=("other",)) as (other,),
        on_stage(one, other) as stage,
    ):
        await stage.admin("/admin/replicas/r2/drain", {"draining": True})
        raw = await status(stage, "--json")

        assert stage.metric("warmroute_available_replicas", model="tiny") == 1
        assert stage.metric("warmroute_available_replicas", model="other") == 0
    assert raw.exit_code == 1
    assert json.loads(raw.stdout)["degraded"] == [
        "no replica takes requests for other: r2: draining"
    ]


async def test_replicas_that_only_compute_prompts_answer_nobody() -> None:
    """They are up, but of role prefill; the one that answers drains, or is removed."""
    roles = ("prefill", "decode")
    async with Engines(2) as engines:
        replicas = [
            {"url": engine.url, "name": role, "role": role, "transfer": "nixl"}
            for engine, role in zip(engines, roles, strict=True)
        ]
        async with on_stage(*engines, replicas=replicas) as stage:
            await stage.admin("/admin/replicas/decode/drain", {"draining": True})
            drained = await status(stage, "--json")
            await stage.admin("/admin/replicas/decode?now=1", method="DELETE")
            await stage.until(lambda: len(stage.router.fleet.members.replicas) == 1)

            ((model, why),) = stage.router.fleet.offers.unserved(monotonic())
            assert stage.metric("warmroute_available_replicas", model="tiny") == 0
    assert drained.exit_code == 1
    assert any(
        each.startswith("no replica takes requests for tiny: ")
        for each in json.loads(drained.stdout)["degraded"]
    )
    assert (model, "role prefill" in why) == ("tiny", True)


async def test_a_tokenizer_that_is_not_used_is_degraded() -> None:
    """It could not be loaded; nor is one that is being loaded all well."""
    models = {"object": "list", "data": [{"id": "tiny", "object": "model", "root": "/nowhere"}]}
    async with FakeEngine(**{"v1/models": models}) as engine, on_stage(engine) as stage:
        raw = await status(stage, "--json")
    async with Engines(1) as engines, on_stage(*engines, ready=False) as stage:
        stage.router.prompters.start_loading("tiny")  # and never finishes
        await stage.until(lambda: stage.router.fleet.members.replicas)
        loading = await status(stage, "--json")

    assert raw.exit_code == loading.exit_code == 1
    said = json.loads(raw.stdout)["degraded"]
    assert any(each.startswith("the tokenizer of tiny: it cannot be used, so") for each in said)
    said = json.loads(loading.stdout)["degraded"]
    assert any(each.startswith("the tokenizer of tiny: it is being loaded") for each in said)


async def test_token_ids_that_differ_at_one_replica_are_degraded() -> None:
    async with Engines(2) as engines, on_stage(*engines, **QUICK) as stage:
        prompter = stage.router.prompters.get("tiny")
        assert prompter is not None
        await stage.until(lambda: all(prompter.trust.has_compared(name) for name in ("r1", "r2")))
        other = Difference(of="text", what="the engine makes 21 tokens, this router 20", hint="")
        prompter.trust.observe_ids("r2", other, num_serving=2)
        raw = await status(stage, "--json")

    assert raw.exit_code == 1
    assert json.loads(raw.stdout)["degraded"] == [
        "the tokenizer of tiny: its token ids differ from those of r2: "
        "the engine makes 21 tokens, this router 20"
    ]


@pytest.mark.parametrize(
    ("options", "is_asked", "said"),
    [
        ({"events": False}, False, "the cache of r1 is blind: its engine publishes no KV events"),
        ({"enable_prefix_caching": False}, True, "prefix caching is off at r1"),
        ({"enable_prefix_caching": False}, False, "prefix caching is off at r1"),
        ({}, False, None),
    ],
)
async def test_a_blind_replica_is_degraded_unless_it_was_not_asked(
    options: dict[str, Any], is_asked: bool, said: str | None
) -> None:
    async with Engines(1, **options) as engines, on_stage(*engines) as stage:
        if is_asked:
            await stage.ask(chat(words(1)))
        raw = await status(stage, "--json")

    found = json.loads(raw.stdout)["degraded"]
    assert raw.exit_code == (0 if said is None else 1)
    assert [str(said) in each for each in found] == [True] * bool(said)


async def test_what_is_gone_beside_the_replicas_is_degraded() -> None:
    """A pool's master, Redis, a source of replicas: each is named."""
    async with Engines(1) as engines:
        async with on_stage(
            *engines,
            discovery__dns=["replicas.x:1"],
            discovery__dns_servers=["127.0.0.1:9"],
            redis__url="redis://127.0.0.1:9/0",
            mooncake__master="http://127.0.0.1:9",
        ) as stage:
            await stage.until(
                lambda: any(each.reason for each in stage.router.discovery.sources.states())
            )
            raw = await status(stage, "--json")

    found = json.loads(raw.stdout)["degraded"]
    assert raw.exit_code == 1
    for said in ("the pool cannot be reached", "nothing is shared with other routers: "):
        assert any(each.startswith(said) for each in found), found
    assert any("is not followed" in each and "replicas.x" in each for each in found), found


async def test_no_router_is_status_2(tmp_path: Path) -> None:
    """Nor one that does not let us in."""
    token = tmp_path / "token"
    token.write_text("t0ken")
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=token) as stage:
        refused = await status(stage)
        nobody = await status(stage, "--admin", "http://127.0.0.1:9")

    assert (refused.exit_code, nobody.exit_code) == (2, 2)
    assert refused.stderr.startswith("Error: the admin token is ")
    assert "is `warmroute serve` running" in nobody.stderr
    assert refused.stdout == nobody.stdout == ""


def test_a_router_of_another_release_is_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fields have other names: the command names its release and no traceback."""
    older = state(REPLICA)
    older["replicas"]["shown"] = [{"name": "r1"}]
    monkeypatch.setattr(Admin, "ask", lambda *_: older)
    result = CliRunner().invoke(main, ("status",))

    assert (result.exit_code, result.stdout) == (2, "")
    assert "use `warmroute` of its release, 1" in result.stderr


async def becomes(stage: Stage, exit_code: int) -> Result:
    """Wait for an exit status: a state is described once a second."""
    found: list[Result] = []

    async def is_so() -> bool:
        found.append(await status(stage))
        return found[-1].exit_code == exit_code

    await stage.until(is_so)
    return found[-1]


async def asked(stage: Stage, number: int, body: dict[str, Any]) -> None:
    for _ in range(number):
        await stage.ask(body)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("engine", "20 of 40 requests of the last minute failed (50%): 500 from r1 (20)"),
        ("client", "20 of 40 requests of the last minute failed (50%): invalid_request_error (20)"),
    ],
)
async def test_requests_that_fail_are_degraded(fault: str, said: str) -> None:
    """From 5 % of at least 20 requests of the last minute on, with reason and replica."""
    async with Engines(1) as [engine], on_stage(engine, forward__max_tries=1) as stage:
        await asked(stage, 19, chat("a"))
        calm = await status(stage)
        await asked(stage, 1, chat("a"))
        if fault == "engine":
            arm(engine, "status", status=500, count=20)
        await asked(stage, 20, chat("a") if fault == "engine" else {"messages": 5})
        result = await becomes(stage, 1)

    assert calm.exit_code == 0
    assert f"✗ {said}" in result.stdout.splitlines()
    assert "50% failed" in result.stdout.splitlines()[0]


async def test_a_policy_that_raises_is_replaced_and_named() -> None:
    """After five errors in a row; its line and its text are given."""

    class Broken(Policy, frozen=True, kw_only=True):
        name: ClassVar[str] = "broken"

        def decide(self, snapshot: Snapshot) -> Decision:
            raise ValueError("no table of prices")

    async with Engines(1) as engines, on_stage(*engines) as stage:
        stage.router.story.steps.place.use(Broken())
        found = [(await stage.ask(chat("a"))).status for _ in range(7)]
        result = await becomes(stage, 1)
        stage.router.story.steps.place.use(LeastLoaded())
        await becomes(stage, 0)

    assert found == [500] * 5 + [200] * 2
    assert "policy fails: least_loaded decides in its place" in stage.log
    assert "✗ policy broken fails, and least_loaded decides in its place" in result.stdout
    assert "ValueError: no table of prices" in result.stdout.replace("\n", " ")


async def test_lost_decision_records_are_degraded(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "decisions.jsonl"
    file.parent.mkdir()
    async with Engines(1) as engines, on_stage(*engines, log__decisions=file) as stage:
        shutil.rmtree(file.parent)
        await stage.ask(chat("a"))
        await stage.until(lambda: "decision records lost" in stage.log)
        result = await becomes(stage, 1)
        stage.records = None

    assert "✗ decision records are lost" in result.stdout


# -- made-up states ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (state(), "no replica is known"),
        (
            state(REPLICA | {"state": "down", "reason": "probe\nrefused"}),
            "replica r1 is down: probe refused",
        ),
        (
            state(REPLICA | {"cache": "blind", "cache_reason": "no events"}),
            "the cache of r1 is blind: no events",
        ),
        (
            state(REPLICA, sharing={"state": "degraded", "reason": "no answer"}),
            "nothing is shared with other routers: no answer",
        ),
        (state(REPLICA, pools=[{"name": "p", "state": "lost"}]), "the pool p cannot be reached"),
        (state(REPLICA, pools=[{"name": "", "state": "lost"}]), "the pool cannot be reached"),
    ],
)
def test_what_is_degraded_is_said(given: dict[str, Any], said: str) -> None:
    assert given["degraded"] == [said]
    assert report(given).splitlines()[-1] == f"✗ {said}"


def test_what_is_on_purpose_is_not_degraded() -> None:
    for on_purpose in ("draining", "asleep", "paused"):
        assert state(REPLICA | {"state": on_purpose})["degraded"] == []


def test_much_that_is_wrong_is_counted() -> None:
    """A line each for the first ones."""
    many = state(*(REPLICA | {"id": f"r{n}", "state": "down"} for n in range(40)))
    text = report(many)

    assert "… 30 more" in text
    assert text.count("✗") == 10
    assert text.splitlines()[-1] == "and 30 more"


def test_a_full_replica_is_seen() -> None:
    """The sessions that are alive need more than its cache has."""
    (row,) = [line for line in report(state(REPLICA)).splitlines() if line.startswith("r1")]
    unknown = state(REPLICA | {"live_fill": None, "cache_fill": None, "audited": 0})

    assert row.split() == [*("r1", "up", "exact", "██████125%", "2", "50%", "3", "1.5s", "90.0%")]
    (row,) = [line for line in report(unknown).splitlines() if line.startswith("r1")]
    assert row.split()[3:] == ["-", "2", "-", "3", "1.5s", "-"]


def test_the_queue_says_what_is_waited_for() -> None:
    waiting = [{"waited_s": 1.5}, {"waited_s": 3.25}]
    queue = {"on": True, "waiting": 5, "for": {"tbt": 1, "room": 4}, "shown": waiting}
    text = report(state(REPLICA, queue=queue))

    assert "queue: 5 waiting, 4 for room, 1 for tbt; the longest for 3.2 s" in text
    assert "queue: off" in report(state(REPLICA, queue=queue | {"on": False}))


def test_tokens_are_of_the_last_minutes() -> None:
    tokens = {
        "columns": COLUMNS,
        "step_s": 10.0,
        "steps": [[0, 9, 9, 9, 9], *[[at, 50, 30, 10, 10] for at in range(6)]],
    }
    given = state(REPLICA, tokens=tokens)

    assert (
        "tokens of the last 1 minute: 636, 49% cached, 41% new, 11% computed again: moved 69"
        in report(given)
    )


def test_markup_in_a_reason_is_text() -> None:
    given = state(REPLICA | {"state": "down", "reason": "[red]x[/red]"})

    assert report(given).count("[red]x[/red]") == 1


def test_it_says_which_caches_are_too_small() -> None:
    """Nothing is degraded; but sessions evict each other."""
    text = report(state(REPLICA, REPLICA | {"id": "r2", "live_fill": 0.8}))

    said = " ".join(text.split())
    assert "! live sessions need more than the KV cache of r1 (125%): add replicas" in said
    assert said.endswith("nothing is broken; the lines with ! say what to change")
    assert "r2 (" not in said
