"""What no output may hold: prompts, keys, session ids. (Every stage looks for them at its end.)"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from policies.registry import create
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import (
    KEY,
    SECRET,
    SESSION,
    SLOW,
    Engines,
    arm,
    chat,
    on_stage,
    streamed,
    words,
)


async def test_no_output_holds_what_clients_sent(tmp_path: Path) -> None:
    """Log, metrics, records, admin pages: after requests of every kind and outcome."""
    records = tmp_path / "decisions.jsonl"
    sent = {
        "Authorization": KEY,
        "X-Api-Key": SECRET,
        "X-Session-ID": SESSION,
        "Cookie": f"session={SECRET}",
        "traceparent": SECRET,
    }
    fields = {
        "cache_salt": SECRET,
        "prompt_cache_key": SECRET,
        "user": SECRET,
        "metadata": {"user_id": SECRET},
        "tools": [{"type": "function", "function": {"name": "f", "description": SECRET}}],
    }
    query = f"/v1/chat/completions?key={SECRET}"
    async with (
        Engines(2) as engines,
        on_stage(*engines, log__decisions=records, forward__routes=["/v1/embeddings/*"]) as stage,
    ):
        bodies = [
            chat(words(1), **fields),
            streamed(chat(words(2), **fields)),
            chat(words(3), temperature=-1),
            chat(words(3), messages=[{"role": SECRET, "content": SECRET}]),
            chat(words(3), messages=[{"role": "user", "content": [{"type": SECRET}]}]),
            chat(words(3), tools=[{"function": {"name": 3, SECRET: SECRET}}]),
            chat(words(3), chat_template=f"{{{{ {SECRET}() }}}}"),
            chat(words(3), continue_final_message=True),
        ]
        for body in bodies:
            await stage.ask(body, query, headers=sent)
        await stage.ask({"model": "tiny", "prompt": words(4)}, "/v1/completions", headers=sent)
        await stage.ask({"input": SECRET}, f"/v1/embeddings/{SECRET}", headers=sent)
        await stage.ask({"input": SECRET}, f"/not/served/{SECRET}", headers=sent)
        for engine in engines:
            arm(engine, "status", status=500, count=1)
        await stage.ask(chat(words(5)), headers=sent)
        async with stage.hanging_up(streamed(chat(words(6), max_tokens=2000, ignore_eos=True))):
            await asyncio.sleep(0.01)
        pages = [
            await stage.admin("/admin/replicas"),
            await stage.admin("/admin/config"),
            await stage.admin("/admin/explain", chat(words(1), **fields), sent),
        ]
        await stage.until(lambda: records.exists())

        assert all(SECRET.encode() not in page.body for page in pages)
        assert '"message":"routed"' in stage.log
        assert '"message":"refused"' in stage.log
        assert '"method":"POST","path":"/not/served/*"' in stage.log
    assert len(records.read_bytes().splitlines()) >= 8


async def test_what_goes_wrong_inside_is_logged_without_its_contents() -> None:
    """A bug of our own: 500 with a request id, a traceback without its message, nothing left."""

    def breaks(*_: object) -> None:
        raise ValueError(SECRET)

    async with Engines(1) as engines, on_stage(*engines) as stage:
        broken = type("Broken", (), {"name": "broken", "decide": breaks})()
        stage.router.story.steps.place.use(broken)
        reply = await stage.ask(chat(words(1)), headers={"X-Request-Id": "mine"})
        stage.router.story.steps.place.use(create("kv_aware", {}))

        assert reply.status == 500
        assert reply.error["type"] == "InternalServerError"
        assert "mine" in reply.error["message"]
        assert SECRET not in reply.body.decode()
        assert "Traceback" in stage.log
        assert "InternalError: ValueError" in stage.log
        assert (await stage.ask(chat(words(1)))).status == 200


async def test_a_tokenizer_that_breaks_is_logged_without_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the request is served without its tokens."""

    def breaks(*_: object, **__: object) -> None:
        raise ValueError(SECRET)

    async with FakeEngine() as engine, on_stage(engine) as stage:
        await stage.ready()
        prompter = stage.router.prompters.get("tiny")
        assert prompter is not None
        monkeypatch.setattr(type(prompter), "plan_rendered", breaks)
        reply = await stage.ask(chat("a"))

        assert reply.status == 200
        assert "prompt was not tokenized" in stage.log
        assert "error=ValueError" in stage.log


async def test_an_engines_own_words_are_not_logged() -> None:
    """What it says about a prompt is the client's."""
    async with FakeEngine() as engine:
        engine.pages["/tokenize"] = (400, f'{{"error":{{"message":"{SECRET}"}}}}')
        engine.pages["/v1/chat/completions"] = (500, SECRET)
        async with on_stage(engine, tokens__models={"tiny": "/nowhere"}) as stage:
            reply = await stage.ask(chat("a"))

            assert (reply.status, reply.body) == (500, SECRET.encode())


async def test_log_lines_say_where_a_request_went_and_why() -> None:
    """One per request, whatever became of it."""
    async with Engines(1, time_model=SLOW) as engines, on_stage(*engines) as stage:
        await stage.ask(chat(words(1)), headers={"X-Request-Id": "one"})
        async with stage.asking(
            streamed(chat(words(2), max_tokens=500, ignore_eos=True))
        ) as answer:
            await answer.content.readany()
        await stage.until(lambda: stage.metric("warmroute_requests_total") == 2)

        lines = [line for line in stage.log.splitlines() if "info    routed" in line]
        assert len(lines) == 2
        assert "request=one" in lines[0]
        assert "replica=r1" in lines[0]
        assert "why=" in lines[0]
        assert "outcome=client_gone" in lines[1]
