"""`warmroute why`, against a whole router."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from click.testing import Result

from loadtest.engine_model.time_model import TimeModel
from tests.cli.running import beside
from tests.faults.stage import (
    ONE_AT_A_TIME,
    SECRET,
    SESSION,
    Engines,
    Stage,
    chat,
    on_stage,
    streamed,
    words,
)


async def run(stage: Stage, *args: str) -> Result:
    """Run a command beside the router."""
    stage.router.story.steps.settling.close()  # what waits for events has none to come
    return await beside(stage, *args)


async def with_a_clock(stage: Stage, num_turns: int) -> list[str]:
    """Have a conversation whose system prompt has the time in it; return its requests."""
    history, requests = [words(1)], []
    for minute in range(num_turns):
        body = streamed(chat(*history))
        system = {"role": "system", "content": f"It is 12:0{minute}. {words(7)}"}
        body["messages"] = [system, *body["messages"]]
        reply = await stage.ask(body)
        requests.append(reply.headers["x-request-id"])
        history += ["yes", words(10 + minute)]
    return requests


async def test_why_lists_the_sessions_that_cost_most() -> None:
    """With what to change about them."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        nothing = await run(stage, "why")
        await with_a_clock(stage, 4)
        await stage.ask(streamed(chat(words(3))), headers={"X-Session-ID": f"small-{SECRET}"})
        listed = await run(stage, "why")
        one = await run(stage, "why", "--limit", "1")
        raw = json.loads((await run(stage, "why", "--json")).stdout)

    assert nothing.stdout == "no sessions yet: they are listed after their first answer\n"
    lines = listed.stdout.splitlines()
    assert lines[0] == "Sessions that cost most: 2 of 2"
    assert lines[2].split()[1:4] == ["r1", "4", f"{raw['sessions'][0]['prompt_tokens']:,}"]
    assert lines[2].split()[-1] == "changed"
    found = f"! session {raw['findings'][0]['session']}: the system prompt contains a time of day"
    assert found in listed.stdout
    assert one.stdout.splitlines()[0] == "Sessions that cost most: 1 of 2"
    assert [each["hint"] for each in raw["findings"]] == ["time"]
    assert SECRET not in listed.stdout


async def test_why_says_what_a_session_computed_again() -> None:
    """By the client's id and by ours: a line a turn, then the causes and what to do."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        await with_a_clock(stage, 4)
        by_client = await run(stage, "why", SESSION)
        name = json.loads((await run(stage, "why", SESSION, "--json")).stdout)["session"]
        by_name = await run(stage, "why", name)

    assert by_client.exit_code == 0
    assert by_client.stdout == by_name.stdout
    assert by_name.stdout.startswith(f"session {name}: 4 turns since ")
    rows = [line.split() for line in by_name.stdout.splitlines() if " r1 " in line]
    assert [row[7:9] for row in rows] == [[], *[["changed", "(system)"]] * 3]
    assert "tokens in 3 turns: the system prompt contains a time of day" in by_name.stdout
    assert "→ Move what changes" in by_name.stdout
    assert SECRET not in by_client.stdout


async def test_why_says_what_sessions_tenants_and_models_cost() -> None:
    """Money only where replicas have a price."""
    async with Engines(1) as engines, on_stage(*engines, engine__cost_per_hour=36_000.0) as stage:
        await with_a_clock(stage, 2)
        listed = (await run(stage, "why")).stdout.splitlines()
        one = await run(stage, "why", SESSION)
        models = (await run(stage, "why", "--by", "model")).stdout.splitlines()
        tenants = await run(stage, "why", "--by", "tenant")
        raw = json.loads((await run(stage, "why", "--by", "model", "--json")).stdout)
        refused = await run(stage, "why", "--by", "model", SESSION)
    async with Engines(1) as engines, on_stage(*engines) as stage:
        nothing = await run(stage, "why", "--by", "model")
        await with_a_clock(stage, 1)
        free = await run(stage, "why", SESSION)

    costs = ["prompt-s", "answer-s", "saved-s", "cost", "saved", "mostly"]
    assert listed[1].split()[-6:] == costs
    assert "; cost " in one.stdout
    assert models[0].split()[0] == "model"
    assert models[1].split()[:2] == ["tiny", "2"]
    assert tenants.stdout.splitlines()[1].startswith("- ")
    assert raw["rows"][0]["cost"] > 0
    assert "--by model takes neither a session nor --tenant" in refused.stderr
    assert nothing.stdout.startswith("no turns yet")
    assert "GPU seconds: " in free.stdout
    assert "cost" not in free.stdout


async def test_why_of_a_request_says_it_of_that_turn() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        _, second, _ = await with_a_clock(stage, 3)
        asked = await run(stage, "why", second)

    assert len([line for line in asked.stdout.splitlines() if " r1 " in line]) == 1
    assert "tokens: the system prompt changed at token" in asked.stdout


async def test_why_of_a_session_that_waits_says_for_what() -> None:
    """Also of its first request, and by the id of a request; later, what a turn waited for."""
    on: Any = {"queue__mode": "on", "queue_rules": ONE_AT_A_TIME, "health__interval_s": 60.0}
    named = {"X-Session-ID": f"late-{SECRET}", "X-Request-Id": "late-1"}
    async with Engines(1, time_model=TimeModel(base_ms=600_000.0)) as engines:
        async with on_stage(*engines, **on) as stage:
            async with stage.hanging_up(streamed(chat(words(1)))), asyncio.TaskGroup() as tg:
                task = tg.create_task(stage.ask(streamed(chat(words(2))), headers=named))
                await stage.until(lambda: stage.metric("warmroute_waiting_requests") == 1)
                by_session = await run(stage, "why", f"late-{SECRET}")
                by_request = await run(stage, "why", "late-1")
                task.cancel()

    said = r"request late-1 waits for window: \d+ s so far, 0 requests before it, first in \d+ s at"
    for asked in (by_session, by_request):
        assert asked.exit_code == 0
        assert re.match(said, " ".join(asked.stdout.split()))


async def test_a_session_in_order_says_so() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        await stage.ask(streamed(chat(words(1))))
        await stage.settled(*engines)
        await stage.ask(streamed(chat(words(1), "yes", words(2))))
        asked = await run(stage, "why", SESSION)

    assert "Nothing was computed again but the rest of a block." in asked.stdout


async def test_an_unknown_session_is_one_line() -> None:
    """That says how to list those that are known."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        asked = await run(stage, "why", "no/body\x1b[31m")

    assert asked.exit_code == 1
    assert asked.stderr.startswith("Error: no session or request 'no")
    assert asked.stderr.endswith(" is known; `warmroute why` lists sessions\n")
    assert "\x1b" not in asked.stderr


async def test_a_tenant_tells_sessions_of_one_name_apart(tmp_path: Path) -> None:
    """Two tenants' clients may use the same id."""
    keys = {name: f"sk-{SECRET}-{name}" for name in ("acme", "globex")}
    file = tmp_path / "tenants.yaml"
    file.write_text(
        f"secret: {SECRET * 4}\ntenants:\n"
        + "".join(
            f"- {{name: {name}, keys: ['sha256:{hashlib.sha256(key.encode()).hexdigest()}']}}\n"
            for name, key in keys.items()
        )
    )
    async with Engines(1) as engines, on_stage(*engines, tenants__file=file) as stage:
        for number, key in enumerate(keys.values()):
            for _ in range(number + 1):
                headers = {"Authorization": f"Bearer {key}"}
                await stage.ask(streamed(chat(words(1))), headers=headers)
        mine = await run(stage, "why", SESSION, "--tenant", "acme")
        yours = await run(stage, "why", SESSION, "--tenant", "globex")
        listed = await run(stage, "why", "--tenant", "globex")
        nobody = await run(stage, "why", SESSION, "--tenant", "initech")

    assert "tenant acme: 1 turn since" in mine.stdout
    assert "tenant globex: 2 turns since" in yours.stdout
    assert "of 1\n" in listed.stdout
    assert "acme" not in listed.stdout
    assert nobody.exit_code == 1
