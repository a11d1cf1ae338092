"""Read an answer, and compute the right answer to the same request.

An emulated replica's reply depends on the prompt and a seed that all replicas share, so the right
answer is known beforehand, to the last character and token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import orjson
from msgspec import Struct

from loadtest.chaos.stack import NUM_GPU_BLOCKS, REPLY_SEED
from loadtest.emulator.options import EmulatorOptions
from loadtest.emulator.replica import Replica
from loadtest.emulator.wire import parse_generation

Api = Literal["chat", "completions"]


class Expected(Struct, frozen=True, kw_only=True):
    """The right answer; `texts` and `reasons` by choice."""

    texts: list[str]
    reasons: list[str]
    num_prompt_tokens: int
    num_completion_tokens: int


class Oracle:
    """Computes right answers, with the emulator's own code."""

    def __init__(self) -> None:
        self._replica = Replica(
            EmulatorOptions(seed=REPLY_SEED, events=False, num_gpu_blocks=NUM_GPU_BLOCKS)
        )

    def ids(self, text: str) -> list[int]:
        """Tokenize a plain text."""
        return self._replica.tokenizer.encode(text).ids

    def expect(self, api: Api, body: Mapping[str, Any]) -> Expected:
        """Answer a request of one prompt."""
        tokenizer = self._replica.tokenizer
        if api == "chat":
            text = tokenizer.render(body["messages"], tools=body.get("tools"))
            ids = tokenizer.encode(text).ids
        elif isinstance(body["prompt"], str):
            ids = [*tokenizer.special_prefix(), *tokenizer.encode(body["prompt"]).ids]
        else:
            ids = body["prompt"]
        params = parse_generation(body, "chat" if api == "chat" else "completion")
        replies = [self._replica.reply(ids, params, body, index=i) for i in range(params.n)]
        return Expected(
            texts=[reply.text() for reply in replies],
            reasons=[reply.finish_reason for reply in replies],
            num_prompt_tokens=len(ids),
            num_completion_tokens=sum(len(reply.ids) for reply in replies),
        )


class Read(Struct, kw_only=True):
    """An answer, as far as it arrived."""

    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usages: list[Mapping[str, Any]] = []
    ids: set[str] = set()
    num_done: int = 0
    error: Mapping[str, Any] | None = None
    fault: str | None = None  # how the answer breaks the API's rules

    @property
    def has_text(self) -> bool:
        return any(self.texts.values())


def read_whole(body: bytes) -> Read:
    """Read an answer that is one JSON object."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return Read(fault="the answer is not JSON")
    if not isinstance(found, dict):
        return Read(fault="the answer is not an object")
    read = Read()
    _take(read, found)
    return read


def read_stream(body: bytes) -> Read:
    """Read an event stream, whole or broken off."""
    read = Read()
    *blocks, rest = body.replace(b"\r\n", b"\n").split(b"\n\n")
    if rest.strip():
        read.fault = "the stream ends inside an event"
    for block in blocks:
        lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
        data = b"\n".join(lines)
        if not data:
            continue
        if read.num_done:
            read.fault = "an event follows [DONE]"
        if data == b"[DONE]":
            read.num_done += 1
            continue
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            # A stream that broke inside an event is ended by an error event behind it.
            read.fault = read.fault or "an event is not JSON"
            continue
        if read.error is not None:
            read.fault = "an event follows the error"
        _take(read, event)
    if read.error is not None and read.fault == "an event is not JSON":
        read.fault = None
    return read


def is_error(found: Any) -> bool:
    """Whether an error has the shape of OpenAI's (as vLLM writes it) or of Anthropic's."""
    if not isinstance(found, dict):
        return False
    if found.get("type") == "error":
        found = {"error": {"code": 0, **(found.get("error") or {})}}
    error = found.get("error")
    if not isinstance(error, dict):
        return False
    return all(isinstance(error.get(name), str) for name in ("message", "type")) and "code" in error


def _take(read: Read, event: Mapping[str, Any]) -> None:
    if "error" in event:
        read.error = event
        if not is_error(event):
            read.fault = "the error is not in the API's shape"
        return
    if isinstance(event.get("id"), str):
        read.ids.add(event["id"])
    usage = event.get("usage")
    if usage:
        read.usages.append(usage)
    for choice in event.get("choices") or ():
        index = choice["index"]
        part = choice.get("text")
        if part is None:
            part = (choice.get("delta") or choice.get("message") or {}).get("content")
        read.texts[index] = read.texts.get(index, "") + (part or "")
        reason = choice.get("finish_reason")
        if reason is not None:
            if index in read.reasons:
                read.fault = "a choice ends twice"
            read.reasons[index] = reason


def difference(read: Read, expected: Expected, *, streams: bool, wants_usage: bool) -> str | None:
    """Describe how an answer differs from the right one; None: it does not."""
    if read.fault is not None:
        return read.fault
    if streams and read.num_done != 1:
        return f"{read.num_done} times [DONE]"
    texts = [read.texts.get(i, "") for i in range(len(expected.texts))]
    if texts != expected.texts or len(read.texts) != len(texts):
        pairs = enumerate(zip(texts[0], expected.texts[0], strict=False))
        at = next((i for i, (one, other) in pairs if one != other), None)
        return (
            f"another text: {len(texts[0])} characters, not {len(expected.texts[0])}, "
            f"first difference at {at}"
        )
    if [read.reasons.get(i) for i in range(len(texts))] != expected.reasons:
        return f"finish_reason {read.reasons}, not {expected.reasons}"
    if len(read.ids) != 1:
        return f"{len(read.ids)} different ids"
    if len(read.usages) != int(wants_usage):
        return f"usage came {len(read.usages)} times"
    if wants_usage:
        reported = (read.usages[0].get("prompt_tokens"), read.usages[0].get("completion_tokens"))
        right = (expected.num_prompt_tokens, expected.num_completion_tokens)
        if reported != right:
            return f"usage {reported}, not {right}"
    return None
