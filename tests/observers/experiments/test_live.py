"""router.observers.experiments: in a whole router, from the header to the record."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from router.assembly.reload import apply
from router.config.experiments import Experiment
from router.observers.experiments import Experiments
from router.observers.experiments.metrics import ExperimentMetrics
from tests.cli.running import beside, said_at_start, serving
from tests.faults.stage import (
    SECRET,
    Engines,
    Json,
    Reply,
    Stage,
    chat,
    on_stage,
    records_in,
    streamed,
    words,
)
from tests.samples import Clock
from tests.waiting import until_ready

A = {"name": "a", "policy": "least_loaded"}
B = {"name": "b", "policy": "kv_aware:alpha=0.5"}


def settings(**fields: Any) -> Json:
    return {"experiment": {"name": "e", "variants": [A, B]} | fields}


async def turn(stage: Stage, session: int, number: int = 0, **fields: Any) -> Reply:
    headers = {"X-Session-ID": f"{SECRET}-{session}"}
    return await stage.ask(streamed(chat(words(session), **fields)), headers=headers)


# -- split ---------------------------------------------------------------------------------------


async def test_a_session_keeps_its_variant(tmp_path: Path) -> None:
    """Header, record, log and metrics say which; its policy decides."""
    file = tmp_path / "decisions.jsonl"
    async with (
        Engines(2) as engines,
        on_stage(*engines, log__decisions=file, **settings()) as stage,
    ):
        arms: dict[int, set[str]] = {}
        for number in range(60):
            reply = await turn(stage, number % 20)
            arms.setdefault(number % 20, set()).add(reply.headers["x-warmroute-variant"])
        counted = stage.metric("warmroute_variant_requests_total", experiment="e", outcome="ok")
        tokens = stage.metric("warmroute_variant_tokens_total", kind="prompt")
        recomputed = stage.metric("warmroute_variant_tokens_total", kind="recomputed")
        seen = stage.metric("warmroute_variant_ttft_seconds_count", experiment="e")
        shares = stage.metric("warmroute_experiment_share_ratio", experiment="e", variant="a")
        assert '"variant":"e/a"' in stage.log
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
            assert reply.headers["x-warmroute-variant"] in ("e/a", "e/b")
        ttft = "warmroute_variant_ttft_seconds_count"
        await stage.until(lambda: stage.metric(ttft, experiment="e") == 12)
        assert stage.metric("warmroute_variant_tokens_total", kind="prompt") > 0
        path = f"/admin/explain?api={api}"
        explained = (await stage.admin(path, {"model": "tiny", **fields}, headers)).json()
    records = records_in(file)

    assert {record.assignment.arm for record in records if record.assignment} == {"a", "b"}
    assert {record.api for record in records} == {api}
    assert f"e/{explained['assignment']['arm']}" == reply.headers["x-warmroute-variant"]
    assert explained["num_tokens"] == records[-1].num_prompt_tokens


async def test_without_a_session_the_conversation_is_the_unit(tmp_path: Path) -> None:
    """All turns that begin alike, whatever follows; completions have no variant."""
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
            arms.append({reply.headers["x-warmroute-variant"] for reply in replies})
        completion = await stage.ask({"model": "tiny", "prompt": words(1)}, "/v1/completions")
        monologue = await stage.ask(
            chat(words(1)) | {"messages": [{"role": "system", "content": "x"}]}
        )

    assert all(len(each) == 1 for each in arms)
    assert len(set.union(*arms)) == 2
    for reply in (completion, monologue):
        assert "x-warmroute-variant" not in reply.headers
        assert reply.headers["x-warmroute-policy"] == "kv_aware"
    assert len({r.assignment.unit for r in records_in(file) if r.assignment is not None}) == 12


# -- another experiment while it runs ----------------------------------------------------------


def defined(name: str = "e", **fields: Any) -> Experiment:
    return msgspec.convert(settings(name=name, **fields)["experiment"], Experiment)


def test_another_experiment_takes_over_at_its_start() -> None:
    """Until then the one before goes on; a router that reads it late is in step at once."""
    clock = Clock(1_800_000_000.0)
    coming = defined("f", start_at=clock.now_s + 60)
    experiments = Experiments(defined(), ExperimentMetrics(), clock)
    experiments.configure(coming)

    assert [name for name, _ in experiments.running()] == ["e"]
    shown = experiments.described()
    assert shown is not None
    assert shown["next"] | {"id": ""} == {"name": "f", "id": "", "starts_at": clock.now_s + 60}
    clock.now_s += 60
    late = Experiments(coming, ExperimentMetrics(), clock)
    assert [name for name, _ in experiments.running()] == ["f"]
    for other in (experiments.described(), late.described()):
        assert other is not None
        assert (other["standing"], other["started_at"]) == ("running", clock.now_s)


def test_an_experiment_that_is_read_again_goes_on() -> None:
    """The one that was to come is forgotten; without an experiment none runs."""
    clock = Clock(1_800_000_000.0)
    experiments = Experiments(defined(), ExperimentMetrics(), clock)
    began = experiments.described()
    clock.now_s += 5
    experiments.configure(defined("f", start_at=clock.now_s + 60))
    experiments.configure(defined())

    assert experiments.described() == began
    experiments.configure(None)
    assert experiments.described() is None
    assert experiments.running() == []


async def test_an_experiment_changes_without_a_restart() -> None:
    """The names of the one before are labels, and go with it; `status` and the page show it."""
    async with Engines(2) as engines, on_stage(*engines, **settings()) as stage:
        await turn(stage, 1)
        assert stage.metric("warmroute_variant_requests_total", experiment="e") == 1
        config = msgspec.structs.replace(stage.router.config, experiment=defined("f"))

        assert apply(stage.router, config) == ["experiment"]
        reply = await turn(stage, 1)
        page = stage.router.metrics.render().decode()
        shown = (await stage.admin("/admin/state")).json()["experiment"]
        status = await beside(stage, "status")
        apply(stage.router, msgspec.structs.replace(config, experiment=None))
        without = await turn(stage, 1)

    assert reply.headers["x-warmroute-variant"] in ("f/a", "f/b")
    assert 'experiment="e"' not in page
    assert 'experiment="f"' in page
    assert (shown["name"], shown["standing"]) == ("f", "running")
    assert [each["share"] for each in shown["variants"]] == [0.5, 0.5]
    assert "experiment f (split): a least_loaded 50%, b kv_aware:alpha=0.5 50%" in status.stdout
    assert "x-warmroute-variant" not in without.headers


async def test_two_routers_switch_at_the_same_moment(tmp_path: Path) -> None:
    """Two processes read the file at different moments after SIGHUP."""
    file, records = tmp_path / "warmroute.yaml", [tmp_path / f"{n}.jsonl" for n in range(2)]

    async with Engines(1) as (engine,), AsyncExitStack() as stack:

        def write(definition: Json) -> None:
            tree = {"listen": {"port": 0}, "admin": {"port": 0}, "replicas": [engine.url]}
            file.write_text(json.dumps(tree | {"experiment": definition}))

        write(settings()["experiment"])
        client = await stack.enter_async_context(aiohttp.ClientSession())
        processes, urls = [], []
        for log in records:
            flags = ("--config", str(file), "--decision-log", str(log))
            processes.append(await stack.enter_async_context(serving(*flags)))
            found = re.search(r"listens on (http://\S+)", await said_at_start(processes[-1]))
            assert found is not None
            urls.append(found[1])
            await until_ready(client, found[1])

        async def ask(url: str, number: int) -> None:
            headers = {"X-Session-ID": f"s{number}"}
            body = chat(words(number), max_tokens=1)
            async with client.post(f"{url}/v1/chat/completions", json=body, headers=headers) as got:
                assert got.status == 200

        start_s = time.time() + 4
        write(settings(name="f", start_at=start_s)["experiment"])
        late = list(zip((start_s - 4, start_s - 1), processes, strict=True))
        while (now_s := time.time()) < start_s + 1:
            while late and now_s >= late[0][0]:
                late.pop(0)[1].send_signal(signal.SIGHUP)
            await asyncio.gather(*(ask(url, int(now_s * 1e3)) for url in urls))
        for process in processes:
            process.send_signal(signal.SIGINT)
            await process.communicate()

    for log in records:
        seen = {"e": 0, "f": 0}
        for each in records_in(log):
            assert each.assignment is not None
            seen[each.assignment.experiment] += 1
            if each.at < start_s:
                assert each.assignment.experiment == "e"
            if each.at - each.total_ms / 1000 >= start_s:
                assert each.assignment.experiment == "f"
        assert min(seen.values()) > 0
    every = [each for log in records for each in records_in(log)]
    assert len({each.assignment.trial for each in every if each.assignment}) == 2
