"""Bodies on their way in: bounded each, and all together; read without holding up others."""

from __future__ import annotations

from contextlib import AsyncExitStack
from io import BytesIO

import orjson

from tests.faults.stage import Engines, RawClient, chat, on_stage, words


async def test_bodies_have_a_budget_together() -> None:
    """Beyond it 503 with Retry-After, before the body is read; then there is room again."""
    async with Engines(1) as engines, on_stage(*engines, limits__inflight_bytes=40_000) as stage:
        async with RawClient.connected(stage.url) as first:
            await first.send(head(30_000) + b"x" * 25_000)
            await stage.until(lambda: stage.metric("warmroute_body_bytes") == 25_000)
            async with RawClient.connected(stage.url) as second:
                await second.send(head(20_000))
                refused = await second.head()
            small = await stage.ask(chat(words(1)))
        await stage.until(lambda: stage.metric("warmroute_body_bytes") == 0)
        later = await stage.ask(chat("x " * 15_000, max_tokens=1))

        assert refused.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in refused.lower()
        assert small.status == 200
        assert later.status != 503


async def test_what_is_announced_takes_up_nothing() -> None:
    """A body that drips counts as far as it has come."""
    async with (
        Engines(1) as engines,
        on_stage(*engines, limits__inflight_bytes=40_000) as stage,
        AsyncExitStack() as clients,
    ):
        for _ in range(5):
            client = await clients.enter_async_context(RawClient.connected(stage.url))
            await client.send(head(30_000) + b"x" * 100)
        await stage.until(lambda: stage.metric("warmroute_body_bytes") == 500)
        reply = await stage.ask(chat(words(1)))

        assert reply.status == 200


async def test_a_body_of_too_many_values_is_outlined() -> None:
    """It goes to the engine without tokens; far too many values are refused."""
    bias = {str(number): 1 for number in range(400_000)}
    async with Engines(1) as engines, on_stage(*engines) as stage:
        many = orjson.dumps(chat(words(1)) | {"x": bias})
        refused = await stage.ask(BytesIO(orjson.dumps(chat() | {"x": [bias] * 3})))
        passed = await stage.ask(BytesIO(many))
        broken = await stage.ask(BytesIO(many[:-1]))

        assert refused.status == 413
        assert passed.body  # whatever the engine says to such a field
        assert stage.metric("warmroute_tokenized_requests_total", way="unknown") == 1
        assert broken.status == 400
        assert "JSON" in broken.error["message"]


def head(num_bytes: int) -> bytes:
    """Write the head of a chat of so many bytes."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % num_bytes
    )
