"""Read an answer, and compute the right answer to the same request.

An emulated replica's reply depends on the prompt and a seed that all replicas share, so the right
answer is known beforehand, to the last character and token. An answer also names its request: in
its id, or in the metadata of a response, which has no id of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import orjson
from msgspec import Struct

from loadtest.dev.chaos.stack import NUM_GPU_BLOCKS, REPLY_SEED
from loadtest.emulator.messages import chat_body
from loadtest.emulator.options import EmulatorOptions
from loadtest.emulator.replica import Replica
from loadtest.emulator.responses import read_asked
from loadtest.emulator.wire import parse_generation

Api = Literal["chat", "completions", "messages", "responses"]

_REASONS: Final[Mapping[str, Mapping[str, str]]] = {
    "messages": {"stop": "end_turn", "length": "max_tokens"},
    "responses": {"stop": "completed", "length": "incomplete"},
}
"""How an answer ended, in the words of APIs that have their own."""

_LAST_EVENTS: Final = frozenset({"message_stop", "response.completed", "response.incomplete"})
_ABORTED: Final = "abort"


class Expected(Struct, frozen=True, kw_only=True):
    """The right answer; `texts` and `reasons` by choice. `request` is the id of what was asked."""

    request: str
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

    def expect(self, api: Api, body: Mapping[str, Any], request: str) -> Expected:
        """Answer a request of one prompt."""
        match api:
            case "messages":
                body = chat_body(body)
            case "responses":
                body = read_asked(body).chat
            case _:
                pass
        ids = self._prompt(body)
        params = parse_generation(body, "completion" if api == "completions" else api)
        replies = [self._replica.reply(ids, params, body, index=i) for i in range(params.n)]
        reasons = _REASONS.get(api, {})
        return Expected(
            request=request,
            texts=[reply.text() for reply in replies],
            reasons=[reasons.get(reply.finish_reason, reply.finish_reason) for reply in replies],
            num_prompt_tokens=len(ids),
            num_completion_tokens=sum(len(reply.ids) for reply in replies),
        )

    def _prompt(self, body: Mapping[str, Any]) -> list[int]:
        """Tokenize the prompt of a chat or a completion, as the emulator does."""
        tokenizer = self._replica.tokenizer
        if "messages" in body:
            text = tokenizer.render(body["messages"], tools=body.get("tools"))
            prefix = tokenizer.special_prefix() if body.get("add_special_tokens") else ()
            return [*prefix, *tokenizer.encode(text).ids]
        prompt = body["prompt"]
        if isinstance(prompt, str):
            return [*tokenizer.special_prefix(), *tokenizer.encode(prompt).ids]
        return list(prompt)


class Read(Struct, kw_only=True):
    """An answer, as far as it arrived.

    `requests` are those that it names; `usages` have prompt and completion tokens.
    """

    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usages: list[tuple[int, int]] = []
    ids: set[str] = set()
    requests: set[str] = set()
    num_done: int = 0
    error: Mapping[str, Any] | None = None
    fault: str | None = None  # how the answer breaks the API's rules

    @property
    def has_text(self) -> bool:
        return any(self.texts.values())

    @property
    def is_aborted(self) -> bool:
        """Whether its engine gave it up, and says so; a completion's stream has no choice then."""
        is_empty = self.num_done > 0 and not self.texts
        return is_empty or _ABORTED in self.reasons.values()


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
        if not isinstance(event, dict):
            read.fault = "an event is not an object"
            continue
        _take(read, event)
        if event.get("type") in _LAST_EVENTS:
            read.num_done += 1
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
    """Read an event, or a whole answer."""
    if "error" in event:
        read.error = event
        if not is_error(event):
            read.fault = "the error is not in the API's shape"
        return
    try:
        _take_content(read, event)
    except (LookupError, TypeError, AttributeError):
        read.fault = "it is not in the API's shape"


def _take_content(read: Read, event: Mapping[str, Any]) -> None:
    match event.get("type") or event.get("object"):
        case str(kind) if kind.startswith("response"):
            _take_response(read, event)
        case "message" | "message_start" | "message_delta" | "content_block_delta":
            _take_message(read, event)
        case _:
            _take_choices(read, event)


def _name(read: Read, id_: Any) -> None:
    """Record an answer's id. Behind its first dash is the id of the request."""
    if isinstance(id_, str):
        read.ids.add(id_)
        read.requests.add(id_.partition("-")[2])


def _take_response(read: Read, event: Mapping[str, Any]) -> None:
    """Read an event of the Responses API, or a whole response."""
    if event.get("type") == "response.output_text.delta":
        read.texts[0] = read.texts.get(0, "") + event["delta"]
    response = event.get("response", event)
    if response.get("object") != "response":
        return
    read.ids.add(response["id"])
    read.requests.add(str((response.get("metadata") or {}).get("request")))
    if response["status"] == "in_progress":
        return
    usage = response["usage"]
    read.usages.append((usage["input_tokens"], usage["output_tokens"]))
    is_aborted = response["status"] == "cancelled" or not usage["output_tokens"]
    read.reasons[0] = _ABORTED if is_aborted else response["status"]
    whole = "".join(part["text"] for item in response["output"] for part in item["content"])
    if event is response:
        read.texts[0] = whole
    elif whole != read.texts.get(0, ""):
        read.fault = "the response is not what its events were"


def _take_message(read: Read, event: Mapping[str, Any]) -> None:
    """Read an event of the Messages API, or a whole message."""
    kind = event["type"]
    if kind == "content_block_delta":
        read.texts[0] = read.texts.get(0, "") + event["delta"]["text"]
        return
    if kind == "message_start":
        _name(read, event["message"]["id"])
        return
    if kind == "message":
        _name(read, event["id"])
        read.texts[0] = "".join(block["text"] for block in event["content"])
    usage = event["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"]
    read.usages.append((num_prompt + usage["cache_read_input_tokens"], usage["output_tokens"]))
    read.reasons[0] = event.get("delta", event).get("stop_reason") or _ABORTED


def _take_choices(read: Read, event: Mapping[str, Any]) -> None:
    """Read a chunk or the whole answer of a chat or completion."""
    _name(read, event.get("id"))
    usage = event.get("usage")
    if usage:
        read.usages.append((usage["prompt_tokens"], usage["completion_tokens"]))
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
    if others := read.requests - {expected.request}:
        return f"the answer of another request: {', '.join(sorted(others))}"
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
        right = (expected.num_prompt_tokens, expected.num_completion_tokens)
        if read.usages[0] != right:
            return f"usage {read.usages[0]}, not {right}"
    return None


def is_beginning(read: Read, expected: Expected) -> bool:
    """Return whether an answer that was given up is its own request's as far as it goes."""
    if read.fault is not None or read.requests - {expected.request}:
        return False
    return all(
        index < len(expected.texts) and expected.texts[index].startswith(text)
        for index, text in read.texts.items()
    )
