"""The openai client, unchanged: answers, streams, tools, and errors of the classes it knows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.faults.stage import SECRET, SLOW, Engines, Stage, arm, on_stage, words

ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": words(1)}], "max_tokens": 8}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


@asynccontextmanager
async def client(**options: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, Stage, Sequence[Any]]]:
    async with (
        Engines(2, **options) as engines,
        on_stage(*engines) as stage,
        openai.AsyncOpenAI(base_url=stage.url + "/v1", api_key=SECRET, max_retries=0) as api,
    ):
        yield api, stage, engines


async def test_answers_streams_tools_and_models() -> None:
    """What an agent uses."""
    async with client() as (api, stage, _):
        whole = await api.chat.completions.create(**ASK)
        pieces = [
            piece
            async for piece in await api.chat.completions.create(
                **ASK, stream=True, stream_options={"include_usage": True}
            )
        ]
        called = await api.chat.completions.create(
            **ASK | {"max_tokens": 100}, tools=[TOOL], tool_choice="required"
        )
        raw = await api.chat.completions.with_raw_response.create(**ASK)
        text = await api.completions.create(model="tiny", prompt="a", max_tokens=2)
        models = [model.id async for model in api.models.list()]

        assert whole.choices[0].message.content
        assert pieces[-1].usage is not None
        assert pieces[-1].usage.prompt_tokens == whole.usage.prompt_tokens  # type: ignore[union-attr]
        assert called.choices[0].message.tool_calls[0].function.name == "read"  # type: ignore[index, union-attr]
        assert raw.headers["x-warmroute-replica"] in ("r1", "r2")
        assert text.choices[0].text
        assert models == ["tiny"]
        assert stage.metric("warmroute_token_mismatches_total") == 0


async def test_errors_are_of_the_classes_it_knows() -> None:
    """By status, with the message; a broken stream raises and does not end quietly."""
    async with client(time_model=SLOW) as (api, _, engines):
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await api.chat.completions.create(**ASK | {"model": "gpt-9"})
        with pytest.raises(openai.BadRequestError, match="`messages\\[0\\]`"):
            await api.chat.completions.create(**ASK | {"messages": ["x"]})
        for engine in engines:
            arm(engine, "status", status=500, count=1)
        with pytest.raises(openai.InternalServerError, match="emulated"):
            await api.chat.completions.create(**ASK)
        for engine in engines:
            arm(engine, "die_after", after_tokens=2, count=1)
        with pytest.raises(openai.APIError, match="failed inside its answer"):
            async for _ in await api.chat.completions.create(
                **ASK | {"max_tokens": 64}, stream=True, extra_body={"ignore_eos": True}
            ):  # else a client may have all of it before an engine dies
                pass
        for engine in engines:
            arm(engine, "kill")
            await engine.serve()
        with pytest.raises(openai.InternalServerError) as caught:
            await api.chat.completions.create(**ASK)

        assert caught.value.status_code == 503
        assert caught.value.response.headers["Retry-After"]
