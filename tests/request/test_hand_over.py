"""Token ids handed to engines, and when that is suspended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import orjson
import pytest
from aiohttp import web

from loadtest.tiny_model import MODEL_DIR
from router.api.openai import parse_chat
from router.request.send import with_ids
from router.tokens import Prompter, load_prompter
from router.tokens.hand_over import kind_of
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import Engines, Json, Stage, chat, on_stage, words

LONG = 700  # words: some 4,000 tokens
PROOF = {"tokens__prove_ratio": 1.0, "health__interval_s": 0.05}


@cache
def prompter() -> Prompter:
    return load_prompter(str(MODEL_DIR))


def ids_of(body: Json) -> list[int]:
    plan = prompter().plan_chat(parse_chat(body))
    return prompter().commit(plan, plan.encode()).ids()


class IdEngine(FakeEngine):
    """An engine that tokenizes, and honours, ignores, refuses or fails on ids (`does`).

    `adds`: To its count of a text.
    """

    def __init__(self, does: str = "honour") -> None:
        super().__init__(self._answer)
        self.tokenizes = True
        self.pages["/version"] = {"version": "0.32.0"}
        self.does = does
        self.adds = 0
        self.handed: list[list[int] | None] = []

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if request.path == "/tokenize":
            is_text = "prompt" in body
            tokens = prompter().reference.text_ids(body["prompt"]) if is_text else ids_of(body)
            return web.json_response({"tokens": tokens})
        ids = (body.pop("kv_transfer_params", None) or {}).get("prompt_token_ids")
        own = ids_of(body)
        self.handed.append(ids)
        if ids is not None and self.does == "refuse":
            error = {"message": "no such field", "param": "kv_transfer_params.prompt_token_ids"}
            return web.json_response({"error": error}, status=400)
        if ids is not None and self.does == "fail":
            return web.json_response({"error": {"message": "broken"}}, status=500)
        used = ids if ids is not None and self.does == "honour" else own
        answer = {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}}],
            "usage": {"prompt_tokens": len(used) + (self.adds if used is own else 0)},
        }
        return web.json_response(answer)


@asynccontextmanager
async def handing(**settings: object) -> AsyncIterator[tuple[IdEngine, Stage]]:
    """Run a router that hands its next long prompt over."""
    async with IdEngine() as engine, on_stage(engine, **(PROOF | settings)) as stage:
        await prove(stage)
        yield engine, stage


async def prove(stage: Stage) -> None:
    """Send what proves a model, and wait until the replica's ids were compared."""
    for number in range(8):
        assert (await stage.ask(chat(words(number)))).status == 200
    await compared(stage)


async def compared(stage: Stage) -> None:
    model = stage.router.prompters.get("tiny")
    assert model is not None
    await stage.until(lambda: model.trust.has_compared("r1"))
    await stage.until(lambda: model.trust.num_proofs)


async def test_a_long_prompt_is_handed_over() -> None:
    """Its ids are all that is added; short ones and those that say nothing new go as they came."""
    body = orjson.dumps(chat(words(1, LONG)))
    async with handing() as (engine, stage):
        reply = await stage.ask(body + b" \n")
        received = engine.received[-1].body
        await stage.ask(chat(words(2)))

        assert reply.status == 200
        assert engine.handed[-2:] == [ids_of(orjson.loads(body)), None]
        assert received.startswith(body[:-1])
        assert orjson.loads(received).keys() - orjson.loads(body).keys() == {"kv_transfer_params"}
        assert stage.metric("warmroute_handed_over_requests_total", model="tiny") == 1


async def test_a_clients_own_ids_are_not_believed() -> None:
    """They are removed; where an operator lets them through, ours are not added."""
    own = chat(words(1, LONG), kv_transfer_params={"prompt_token_ids": [1, 2]})
    async with handing() as (engine, stage):
        await stage.ask(own)
        assert engine.handed[-1] == ids_of(chat(words(1, LONG)))
    async with handing(forward__client_fields=["kv_transfer_params"]) as (engine, stage):
        await stage.ask(own | {"kv_transfer_params": {"x": 1}})
        assert engine.handed[-1] is None
        assert b'"kv_transfer_params":{"x":1}' in engine.received[-1].body


async def test_a_refusal_is_not_the_clients() -> None:
    """The request is sent again without ids, and so are all later ones."""
    async with handing() as (engine, stage):
        engine.does = "refuse"
        replies = [await stage.ask(chat(words(n, LONG))) for n in (1, 2)]

        assert [reply.status for reply in replies] == [200, 200]
        assert [ids is None for ids in engine.handed[-3:]] == [False, True, True]
        ended = stage.metric("warmroute_hand_over_ended_total", model="tiny", reason="refused")
        assert ended == 1


async def test_another_count_ends_it() -> None:
    """The engine did not compute what it was handed: its release may have changed."""
    async with handing() as (engine, stage):
        engine.does, engine.adds = "ignore", 1
        for number in (1, 2):
            await stage.ask(chat(words(number, LONG)))

        assert [ids is None for ids in engine.handed[-2:]] == [False, True]
        assert stage.metric("warmroute_hand_over_ended_total", reason="count") == 1


async def test_another_count_of_a_text_ends_it() -> None:
    """A wrong count of any prompt shows that our tokens are not the engine's."""
    async with handing() as (engine, stage):
        await stage.ask(chat(words(0, LONG)))
        assert engine.handed[-1] is not None
        engine.adds = 1
        for text in (words(1), words(2, LONG)):
            await stage.ask(chat(text))

        assert engine.handed[-2:] == [None, None]
        assert stage.metric("warmroute_hand_over_ended_total", reason="tokens") == 1


async def test_failures_end_it() -> None:
    """It ends after three in a row; the client sees the engine's own answer."""
    async with handing(forward__retry_ratio=0.0) as (engine, stage):
        engine.does = "fail"
        statuses = [(await stage.ask(chat(words(n, LONG)))).status for n in range(4)]

        assert statuses == [500, 500, 500, 200]
        assert stage.metric("warmroute_hand_over_ended_total", reason="failed") == 1


@pytest.mark.parametrize("version", ["0.31.0", "unknown"])
async def test_an_older_release_gets_no_ids(version: str) -> None:
    async with IdEngine() as engine:
        engine.pages["/version"] = {"version": version}
        async with on_stage(engine, **PROOF) as stage:  # type: ignore[arg-type]
            await prove(stage)
            await stage.ask(chat(words(1, LONG)))

    assert engine.handed[-1] is None


PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/responses"]


@pytest.mark.parametrize("path", PATHS)
async def test_answers_and_caches_are_the_same(path: str) -> None:
    """The engine computes the blocks that it would compute from the text."""
    settings = PROOF | {"tokens__hand_over": "on"}

    def body(*texts: str) -> Json:
        asked = chat(*texts)
        if path == "/v1/responses":
            asked["input"], asked["max_output_tokens"] = asked.pop("messages"), 4
            del asked["max_tokens"]
        return asked

    async with Engines(1) as engines, on_stage(*engines, **settings) as stage:  # type: ignore[arg-type]
        await stage.ask(body(words(3)), path)
        await compared(stage)
        await stage.ask(body(words(1, LONG)), path)
        await stage.settled(*engines)
        second = await stage.ask(body(words(1, LONG), "ok", words(2)), path)

        assert stage.metric("warmroute_handed_over_requests_total") == 2
        assert second.predicted > 2000
        assert stage.metric("warmroute_audited_total", result="exact") == 3


@pytest.mark.parametrize(
    ("body", "added"),
    [
        (b'{"a":1}', b'{"a":1,"kv_transfer_params":{"prompt_token_ids":[1,2]}}'),
        (b'{ "a" : "}" } \r\n', b'{ "a" : "}" ,"kv_transfer_params":{"prompt_token_ids":[1,2]}}'),
        (b"[1]", None),
        (b"", None),
    ],
)
def test_ids_are_added_behind_everything(body: bytes, added: bytes | None) -> None:
    """Nothing else changes."""
    assert with_ids(body, b"1,2") == added


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"kv_transfer_params": None},
        {"mm_processor_kwargs": {"a": 1}},
        {"chat_template_kwargs": {"a": "\ud800"}},
    ],
)
def test_some_requests_have_no_kind(fields: Json) -> None:
    """Those whose ids the engine would ignore, that bring their own, or cannot be serialized."""
    body = chat("a", **fields)

    assert kind_of("/v1/chat/completions", parse_chat(body), body) is None


def test_kinds_tell_apart_how_prompts_are_made() -> None:
    """All that decides a prompt but the messages makes another kind; sampling does not."""

    def kind(path: str = "/v1/chat/completions", *texts: str, **fields: object) -> object:
        body = chat(*(texts or ("a",)), **fields)
        return kind_of(path, parse_chat(body), body)

    tool = {"type": "function", "function": {"name": "f"}}
    kinds = [
        kind(),
        kind("/v1/messages"),
        kind(tools=[tool]),
        kind(tools=[tool], tool_choice="none"),
        kind(reasoning_effort="high"),
        kind(chat_template_kwargs={"enable_thinking": False}),
        kind(add_generation_prompt=False, continue_final_message=True),
    ]

    assert None not in kinds
    assert len(set(kinds)) == len(kinds)
    assert kind() == kind("/v1/chat/completions", "b", "c", temperature=0.5)
