"""Right answers are known, and everything else is noticed."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
import pytest

from loadtest.chaos.answers import Oracle, Read, difference, read_stream, read_whole
from loadtest.chaos.stack import NUM_GPU_BLOCKS, REPLY_SEED
from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from loadtest.engine_model.time_model import PRESETS

ERROR = b'data: {"error": {"message": "gone", "type": "Broken", "param": null, "code": 502}}\n\n'
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 5,
}
PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "once upon a time", "max_tokens": 5}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("chat", CHAT),
        ("chat", CHAT | USAGE),
        ("chat", CHAT | {"n": 2}),
        ("completions", PROMPT),
        ("completions", PROMPT | USAGE),
        ("completions", PROMPT | {"prompt": [5, 6, 7, 8]}),
    ],
)
async def test_an_engine_says_what_was_expected(api: Any, body: dict[str, Any]) -> None:
    """To the character, for each way of asking; and what is cut off or altered is not that."""
    expected = Oracle().expect(api, body)
    options = EmulatorOptions(
        seed=REPLY_SEED,
        num_gpu_blocks=NUM_GPU_BLOCKS,
        time_model=PRESETS["instant"],
        events=False,
    )
    path = "chat/completions" if api == "chat" else "completions"
    async with Emulator(options) as engine, aiohttp.ClientSession() as client:
        async with client.post(f"{engine.url}/v1/{path}", json=body) as answer:
            data = await answer.read()
    streams = "stream" in body
    read = read_stream if streams else read_whole

    def wrong(data: bytes) -> str | None:
        return difference(read(data), expected, streams=streams, wants_usage=True)

    assert wrong(data) is None
    assert wrong(data[: len(data) // 2]) is not None
    assert wrong(data.replace(expected.texts[0][-4:].encode(), b"XXXX")) is not None
    assert wrong(data.replace(b'"completion_tokens":', b'"completion_tokens":1')) is not None
    if streams:
        assert wrong(data.replace(b"data: [DONE]\n\n", b"")) is not None
        assert wrong(data + data) is not None


def test_an_error_event_ends_a_broken_event() -> None:
    """Half an event before it is the engine's; the error is clear all the same."""
    read = read_stream(b'data: {"choices": [{"ind\n\n' + ERROR)

    assert read.error is not None
    assert read.fault is None


@pytest.mark.parametrize("behind", [b"data: [DONE]\n\n", b'data: {"choices": []}\n\n'])
def test_nothing_follows_an_error(behind: bytes) -> None:
    """A client that reads on would take the answer for whole."""
    read = read_stream(ERROR + behind)

    assert read.num_done or read.fault is not None


def test_an_error_without_a_shape_is_noticed() -> None:
    """An API's clients could not read it."""
    assert read_whole(orjson.dumps({"error": "no"})).fault is not None
    assert read_whole(b"<html>").fault is not None
    assert Read().fault is None
