"""Right answers are known, and everything else is noticed."""

from __future__ import annotations

import re
from typing import Any

import aiohttp
import orjson
import pytest

from loadtest.dev.chaos.answers import (
    Expected,
    Oracle,
    Read,
    difference,
    read_stream,
    read_whole,
)
from loadtest.dev.chaos.stack import NUM_GPU_BLOCKS, REPLY_SEED
from loadtest.emulator.emulator import Emulator
from loadtest.emulator.faults import Fault
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
MESSAGE = CHAT | {"system": "Be brief."}
RESPONSE: dict[str, Any] = {
    "model": "tiny",
    "input": [{"role": "user", "content": "hello"}],
    "max_output_tokens": 5,
    "metadata": {"request": "mine"},
}
STREAM = {"stream": True}
PATHS = {
    "chat": "chat/completions",
    "completions": "completions",
    "messages": "messages",
    "responses": "responses",
}
NUM_TOKENS = re.compile(rb'"(?:completion|output)_tokens":')
LAST_EVENT = re.compile(
    rb"data: \[DONE\]\n\n|event: (?:message_stop|response\.(?:completed|incomplete))\n.*\n\n"
)

ASKED: list[tuple[Any, dict[str, Any]]] = [
    ("chat", CHAT),
    ("chat", CHAT | USAGE),
    ("chat", CHAT | {"n": 2}),
    ("completions", PROMPT),
    ("completions", PROMPT | USAGE),
    ("completions", PROMPT | {"prompt": [5, 6, 7, 8]}),
    ("messages", MESSAGE),
    ("messages", MESSAGE | STREAM),
    ("responses", RESPONSE),
    ("responses", RESPONSE | STREAM),
]


async def answered(api: str, body: dict[str, Any], fault: Fault | None = None) -> bytes:
    """Have an emulated replica answer."""
    options = EmulatorOptions(
        seed=REPLY_SEED,
        num_gpu_blocks=NUM_GPU_BLOCKS,
        time_model=PRESETS["instant"],
        events=False,
    )
    headers = {"X-Request-Id": "mine"}
    async with Emulator(options) as engine, aiohttp.ClientSession(headers=headers) as client:
        if fault is not None:
            engine.app.arm(fault)
        async with client.post(f"{engine.url}/v1/{PATHS[api]}", json=body) as answer:
            assert answer.status == 200
            return await answer.read()


def read_of(body: dict[str, Any], data: bytes) -> Read:
    return read_stream(data) if "stream" in body else read_whole(data)


def wrong(body: dict[str, Any], data: bytes, expected: Expected) -> str | None:
    """Say how an answer differs from the right one."""
    read = read_of(body, data)
    return difference(read, expected, streams="stream" in body, wants_usage=True)


@pytest.mark.parametrize(("api", "body"), ASKED)
async def test_an_engine_says_what_was_expected(api: Any, body: dict[str, Any]) -> None:
    """To the character, for each way of asking; and what is cut off or altered is not that."""
    expected = Oracle().expect(api, body, "mine")
    data = await answered(api, body)

    assert wrong(body, data, expected) is None
    assert wrong(body, data[: len(data) // 2], expected) is not None
    assert wrong(body, data.replace(expected.texts[0][-4:].encode(), b"XXXX"), expected)
    assert wrong(body, NUM_TOKENS.sub(lambda found: found[0] + b"1", data), expected)
    if "stream" in body:
        assert wrong(body, LAST_EVENT.sub(b"", data), expected) is not None
        assert wrong(body, data + data, expected) is not None


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
