"""Many clients, many faults at once: no client is left waiting, and nothing is left of any."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from loadtest.emulator.emulator import Emulator
from loadtest.engine_model.time_model import TimeModel
from router.base.messages import Notes
from router.index.cache_view import LINGER_S
from tests.faults.stage import Engines, Stage, arm, chat, num_running, on_stage, streamed, words
from tests.nodes import Node

BRISK = TimeModel(base_ms=2.0, ms_per_prefill_token=0.01)


async def one_client(stage: Stage, number: int) -> str:
    """Ask for something, and perhaps leave; return what came of it."""
    dice = random.Random(number)
    body = chat(words(number % 5), "ok", words(number, 5), max_tokens=dice.randrange(1, 30))
    if dice.random() < 0.1:
        body["messages"] = "wrong"
    patience_s = dice.choice([0.01, 0.05, 10.0, 10.0, 10.0])
    try:
        async with asyncio.timeout(patience_s):
            reply = await stage.ask(streamed(body) if dice.random() < 0.6 else body)
    except TimeoutError:
        return "left"
    except (aiohttp.ClientError, ConnectionError):
        return "cut"
    if reply.status != 200:
        return f"status {reply.status}"
    if b"[DONE]" in reply.body or b'"usage":{' in reply.body:
        return "whole"
    return "error event"


async def test_nothing_is_left_of_a_storm() -> None:
    """Faults by chance, clients that leave, a restart in between; then all is as before."""
    seed = 1
    dice = random.Random(seed)
    settings = {
        "forward__first_byte_timeout_s": 1.0,
        "health__interval_s": 0.05,
        "health__timeout_s": 1.0,
    }
    async with (
        Engines(3, time_model=BRISK, num_gpu_blocks=400, seed=seed) as engines,
        on_stage(*engines, peer_name="a", **settings) as stage,
    ):
        for engine in engines:
            for kind in ("die_before", "die_after", "refuse", "hang"):
                arm(engine, kind, probability=0.04)
        async with asyncio.TaskGroup() as tg:
            asked = []
            for number in range(120):
                asked.append(tg.create_task(one_client(stage, 1000 * seed + number)))
                await asyncio.sleep(dice.random() * 0.01)
                if number == 60:
                    arm(engines[0], "restart", down_s=0.2)
        outcomes = [task.result() for task in asked]
        for engine in engines:
            engine.app.clear_faults()
        await stage.until(lambda: not any(map(num_running, engines)))
        await stage.until(lambda: stage.metric("warmroute_replica_healthy") == 3)

        assert outcomes.count("whole") > 50, outcomes
        assert stage.metric("warmroute_refused_total", code="internal_error") == 0
        assert (await stage.ask(chat(words(1)))).status == 200
        await stage.until(lambda: not stage.leftovers())
        _receives_it_all(stage, engines)


def _receives_it_all(stage: Stage, engines: Sequence[Emulator]) -> None:
    """Send another router the notes of every request: nothing is left there, either."""
    other = Node("b", [engine.url.removeprefix("http://") for engine in engines])
    assert stage.router.cluster.outbox is not None
    notes = stage.router.cluster.outbox.take()
    for number, note in enumerate(notes):
        other.peers.apply(Notes("a", (note,)), number / 100)
    other.caches.expire_claims(len(notes) + LINGER_S)

    assert len(notes) > 150
    assert other.count("began") == other.count("ended") > 60
    assert other.leftovers() == []


@pytest.mark.timeout(240)
def test_no_answer_is_lost_whatever_breaks(tmp_path: Path) -> None:
    """Processes this time: two routers, Redis, pool, four replicas (docs/contribute/chaos.md)."""
    command = [sys.executable, "-m", "loadtest.dev.chaos", "--minutes", "0.2", "--seed", "132"]
    command += ["--agents", "5", "--every", "0.75", "--out", str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=220)

    assert run.returncode == 0, run.stdout + run.stderr
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_bytes())
    assert verdict["holds"]
    assert verdict["requests"]["right"] > 20
    assert len(verdict["faults"]) >= 4
