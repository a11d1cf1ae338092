"""A cause for each computed token, through a whole router in front of engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.faults.fake_engine import FakeEngine
from tests.faults.models import model_dir
from tests.faults.stage import SECRET, Engines, Stage, chat, holder, on_stage, streamed, words

BLOCK = 16
JOINS_SYSTEM = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


async def turns(stage: Stage, session: str = f"session-{SECRET}") -> list[dict[str, Any]]:
    """The turns of a session, as the admin port tells them."""
    stage.router.story.steps.settling.close()  # what waits for events has none to come
    reply = await stage.admin(f"/admin/sessions/{session}")
    assert reply.status == 200, reply.json()
    found: list[dict[str, Any]] = reply.json()["turns_shown"]
    return found


def causes(turn: dict[str, Any]) -> dict[str, int]:
    """The causes of a turn; their sum is the engine's own count."""
    found: dict[str, int] = turn["computed"]["tokens"]
    assert sum(found.values()) == turn["num_tokens"] - turn["num_cached"]
    return found


def answered(*texts: str) -> dict[str, Any]:
    return streamed(chat(*texts))


async def test_a_turn_that_goes_on_is_new() -> None:
    """Only what was added, and the rest of the last block."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        await stage.ask(answered(words(1)))
        await stage.settled(*engines)
        await stage.ask(answered(words(1), "sure", words(2)))
        first, second = await turns(stage)

    assert set(causes(first)) == {"new"}
    assert set(causes(second)) <= {"new", "last_block"}
    assert causes(second).get("last_block", 0) < BLOCK
    assert second["text"] == [] or "rest of a block" in second["text"][0]


@pytest.mark.parametrize(
    "options",
    [{"eagle": True}, {"sliding_window": 100, "num_window_groups": 2}],
    ids=["eagle", "windows"],
)
async def test_what_engines_compute_of_each_hit_is_the_last_block(options: dict[str, Any]) -> None:
    """One that drafts drops a block of each hit, and is known to do so after some answers."""
    async with Engines(1, **options) as engines, on_stage(*engines) as stage:
        texts = [words(1)]
        for number in range(10):
            await stage.ask(answered(*texts))
            await stage.settled(*engines)
            texts += ["yes", words(10 + number, 20)]
        _, *after = await turns(stage)

    assert len(after) == 9
    for turn in after:
        assert set(causes(turn)) <= {"new", "last_block"}
        assert causes(turn).get("last_block", 0) <= 2 * BLOCK


async def test_the_same_prompt_again_computes_its_last_block() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        for _ in range(2):
            await stage.ask(answered(words(1)))
            await stage.settled(*engines)
        _, second = await turns(stage)

    assert set(causes(second)) == {"last_block"}
    assert causes(second)["last_block"] <= BLOCK


@pytest.mark.parametrize("salts", [(None, None, None), ("one", "two", "one")])
async def test_a_prompt_below_one_block_is_no_loss(salts: tuple[str | None, ...]) -> None:
    """No cache can have it: neither at another replica, nor of another salt."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        for salt in salts:
            await stage.ask(answered("hello") | ({"cache_salt": salt} if salt else {}))
        await stage.ask(answered("hello", "yes", words(1)))
        first, *same, last = await turns(stage)

    assert [set(causes(turn)) for turn in (first, *same)] == [
        {"new"}, {"last_block"}, {"last_block"}
    ]  # fmt: skip
    assert causes(last)["last_block"] == first["num_tokens"] < BLOCK
    assert set(causes(last)) == {"last_block", "new"}


async def test_a_clock_in_the_system_prompt_is_named() -> None:
    """Each turn is computed again from the clock on; after three turns it is said by itself."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        history = [words(1)]
        for minute in range(5):
            body = answered(*history)
            system = {"role": "system", "content": f"It is 12:0{minute}. {words(7)}"}
            body["messages"] = [system, *body["messages"]]
            await stage.ask(body)
            await stage.settled(*engines)
            history += ["yes", words(10 + minute)]
        last = (await turns(stage))[-1]
        findings = (await stage.admin("/admin/findings")).json()["findings"]
        log = stage.log

    assert last["computed"]["change"]["part"] == "system"
    assert last["computed"]["change"]["num_in_row"] == 4
    assert causes(last)["changed"] > 200
    assert "system prompt changed" in last["text"][0]
    (finding,) = findings
    assert finding["hint"] == "time"
    assert "12:0" not in finding["text"]
    assert "so far." in finding["text"]
    assert "again each time. Move" in log
    assert log.count("a prompt changes near its beginning in every turn") == 2  # text and JSON


async def test_a_system_message_in_each_turn_is_named(tmp_path: Path) -> None:
    """Claude Code's countdown, with a template that joins system messages in front."""
    model = model_dir(tmp_path / "model", template=JOINS_SYSTEM)
    messages: list[dict[str, Any]] = [{"role": "system", "content": words(7)}]
    async with (
        Engines(1, model_dir=Path(model)) as engines,
        on_stage(*engines, tokens__models={"tiny": model}) as stage,
    ):
        for number in range(5):
            messages += [
                {"role": "user", "content": words(number)},
                {"role": "system", "content": f"<total_tokens>{9 - number} left</total_tokens>"},
            ]
            await stage.ask({"model": "tiny", "max_tokens": 8, "messages": messages})
            await stage.settled(*engines)
            messages.append({"role": "assistant", "content": "yes"})
        last = (await turns(stage))[-1]
        (finding,) = (await stage.admin("/admin/findings")).json()["findings"]

    assert last["computed"]["change"]["part"] == "later_system"
    assert causes(last)["changed"] > 200
    assert "adds a system message to each turn" in last["text"][0]
    assert "totalTokensReminder" in finding["text"]


async def test_an_edited_message_is_named() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        await stage.ask(answered(words(1), "yes", words(2), "no", words(3)))
        await stage.settled(*engines)
        await stage.ask(answered(words(1), "yes", words(9), "no", words(3)))
        _, second = await turns(stage)

    change = second["computed"]["change"]
    assert (change["part"], change["index"]) == ("message", 2)
    assert causes(second)["changed"] > 100


async def test_a_compacted_history_is_named() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        system = {"role": "system", "content": words(7)}
        long = answered(words(1), "yes", words(2), "no", words(3))
        short = answered(words(8))
        for body in (long, short):
            body["messages"] = [system, *body["messages"]]
            await stage.ask(body)
            await stage.settled(*engines)
        _, second = await turns(stage)

    assert second["computed"]["change"]["part"] == "compacted"
    assert "changed" in causes(second)


async def test_a_turn_that_had_to_move_is_named() -> None:
    """The replica that has the conversation drains."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        await stage.settled(*engines)
        first = await stage.ask(answered(words(1)))
        await stage.settled(*engines)
        await stage.admin(f"/admin/replicas/{first.replica}/drain", {"draining": True})
        await stage.ask(answered(words(1), "yes", words(2)))
        _, second = await turns(stage)

    assert second["candidate"] != first.replica
    assert causes(second)["moved"] >= 4 * BLOCK
    assert second["computed"]["move"]["origin"] == first.replica


async def test_an_emptied_cache_is_named() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        first = await stage.ask(answered(words(1)))
        await stage.settled(*engines)
        engine = holder(stage, first, engines)
        engine.replica.reset_prefix_cache(preempt=False)
        await stage.ask(answered(words(1), "yes", words(2)))
        await stage.settled(*engines)
        _, second = await turns(stage)

    assert causes(second)["cleared"] >= 4 * BLOCK
    assert "emptied" in second["text"][0]


async def test_an_eviction_is_named() -> None:
    """Another conversation takes the room."""
    async with Engines(1, num_gpu_blocks=48) as engines, on_stage(*engines) as stage:
        await stage.ask(answered(words(1)))
        await stage.settled(*engines)
        await stage.ask(answered(words(2, 120)), headers={"X-Session-ID": f"other-{SECRET}"})
        await stage.settled(*engines)
        await stage.ask(answered(words(1), "yes", words(3, 10)))
        await stage.settled(*engines)
        _, second = await turns(stage)

    assert causes(second)["evicted"] >= BLOCK
    loss = second["computed"]["loss"]
    assert loss["replica"] == "r1"
    assert loss["num_between_tokens"] > 300
    assert loss["ago_s"] <= loss["since_s"]


async def test_another_salt_is_named() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        for salt in ("one", "two"):
            await stage.ask(answered(words(1)) | {"cache_salt": salt})
            await stage.settled(*engines)
        _, second = await turns(stage)

    assert set(causes(second)) == {"salt_or_model"}


async def test_a_sub_agent_has_what_its_parent_had() -> None:
    """What the parent had is not new to its sub-agent, whatever became of it."""
    parent = {"X-Session-ID": f"parent-{SECRET}"}
    child = {"X-Session-ID": f"child-{SECRET}", "x-parent-session-id": f"parent-{SECRET}"}
    async with Engines(1) as engines, on_stage(*engines) as stage:
        await stage.ask(answered(words(1)), headers=parent)
        await stage.settled(*engines)
        engines[0].replica.reset_prefix_cache(preempt=False)
        await stage.ask(answered(words(1), "yes", words(2)), headers=child)
        await stage.settled(*engines)
        (turn,) = await turns(stage, f"child-{SECRET}")
        above = (await stage.admin(f"/admin/sessions/parent-{SECRET}")).json()

    assert causes(turn)["cleared"] >= 4 * BLOCK
    assert [each["session"] for each in above["children"]] != []


async def test_a_fork_has_what_it_was_forked_from() -> None:
    """Its client gives it a name of its own, and names no parent."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        await stage.ask(answered(words(1), "yes", words(2)))
        await stage.settled(*engines)
        engines[0].replica.reset_prefix_cache(preempt=False)
        fork = {"X-Session-ID": f"fork-{SECRET}"}
        await stage.ask(answered(words(1), "yes", words(2), "no", words(3)), headers=fork)
        await stage.settled(*engines)
        (turn,) = await turns(stage, f"fork-{SECRET}")

    assert causes(turn)["cleared"] >= 8 * BLOCK
    assert "unknown" not in causes(turn)


async def test_a_conversation_that_began_elsewhere_is_unknown() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        await stage.ask(answered(words(1), "yes", words(2)))
        (turn,) = await turns(stage)

    assert set(causes(turn)) == {"unknown"}


async def test_what_an_engine_stored_is_unknown() -> None:
    """A response that goes on from a stored one; only its engine has the whole prompt."""
    answers = iter((("resp_1", 300, 0), ("resp_2", 600, 100)))

    async def answer(request: web.Request) -> web.StreamResponse:
        name, num_tokens, num_cached = next(answers)
        details = {"cached_tokens": num_cached}
        usage = {"input_tokens": num_tokens, "output_tokens": 4, "input_tokens_details": details}
        return web.json_response({"id": name, "status": "completed", "usage": usage})

    async with FakeEngine(answer) as engine, on_stage(engine) as stage:
        body = {"model": "tiny", "input": words(1)}
        await stage.ask(body, "/v1/responses")
        await stage.ask(body | {"previous_response_id": "resp_1"}, "/v1/responses")
        _, turn = await turns(stage)

    assert causes(turn) == {"unknown": 500}


async def test_a_client_without_session_ids_is_followed() -> None:
    """By its first message, although its system prompt is another one in each turn."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        for number in range(2):
            body = answered(words(1), *["yes", words(2)][: 2 * number])
            body["messages"].insert(0, {"role": "system", "content": f"It is 9:0{number}."})
            await stage.ask(body, headers={"X-Session-ID": ""})
            await stage.settled(*engines)
        sessions = (await stage.admin("/admin/sessions")).json()["sessions"]

    assert [each["turns"] for each in sessions] == [2]


@pytest.mark.parametrize("number", [-5, 10**30])
async def test_an_engine_that_reports_nonsense_is_not_booked_with_it(number: int) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        usage = {"prompt_tokens": number, "prompt_tokens_details": {"cached_tokens": number}}
        reply = {"object": "chat.completion", "choices": [], "usage": usage}
        return web.Response(body=json.dumps(reply), content_type="application/json")

    async with FakeEngine(answer) as engine, on_stage(engine) as stage:
        reply = await stage.ask(chat(words(1)))
        assert reply.status == 200
        await stage.until(lambda: len(stage.ledger))
        (turn,) = await turns(stage)

        assert turn["num_tokens"] > 50
        assert turn["num_cached"] is None
        assert stage.metric("warmroute_prompt_tokens_total") == 0


async def test_sessions_as_a_table() -> None:
    """JSON, CSV, orders, bounds and names that are wrong."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        await stage.ask(answered(words(1)))
        listed = (await stage.admin("/admin/sessions?order=cost&limit=1")).json()
        table = await stage.admin("/admin/sessions?format=csv")
        request = listed["sessions"] and (await turns(stage))[0]["request_id"]
        asked = (await stage.admin(f"/admin/requests/{request}")).json()
        wrong = await stage.admin("/admin/sessions?order=size")
        unknown = await stage.admin("/admin/sessions/nobody")

        assert listed["total"] == 1
        assert listed["sessions"][0]["causes"]["new"] > 0
        header, row = table.body.decode().splitlines()
        assert header.startswith("session,parent,tenant,model,home")
        assert row.startswith(listed["sessions"][0]["session"])
        assert asked["turn"]["request_id"] == request
        assert (wrong.status, wrong.error["param"]) == (400, "order")
        assert "recent, cost, computed, turns" in wrong.error["message"]
        assert unknown.status == 404
        assert "GET /admin/sessions lists" in unknown.error["message"]
        assert stage.metric("warmroute_prompt_tokens_total", cause="new") > 0
