"""Make the known beginning of a conversation's next prompt: its token ids and block keys.

The request that a client is likely to send next is the conversation, the answer as clients send it
back, and a new message whose text is not known. Reasoning is sent back if the client has done so
before. The next request is written twice with different new messages. What both prompts have in
common, in whole blocks, does not depend on the new message.

Most answers call a tool, and their text is not needed. So bytes are kept as they come, and read
at the end or if they exceed `_FOLD_BYTES`. An answer has no text if it is longer than `MAX_BYTES`,
calls tools, is not understood, exceeds the bound of all answers, or has no reasoning in front.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct
from msgspec.structs import replace

from policies.view import CandidateId
from router.base.contracts import BlockKey, HashContract
from router.index.cache_view import CacheView
from router.replicas.fleet import Fleet
from router.request.read import Reader, extra_keys
from router.request.results import Prompt
from router.request.tokenize import Tokenizer
from router.tokens import Tokens

MAX_BYTES: Final = 1024 * 1024
"""The most bytes of text, and of one event."""

_FOLD_BYTES: Final = 16 * 1024
_PIECE_BYTES: Final = 48  # what Python adds to each piece
_CALL: Final = re.compile(
    rb'"(?:finish_reason|stop_reason|type)": ?"(?:tool_calls|tool_use|function_call)"'
)
_REASONING: Final = re.compile(rb'"(?:reasoning|reasoning_content|thinking)"')
_LAST_PIECES: Final = 4
_STOPPED: Final = frozenset({"stop", "end_turn", "completed"})


class Held:
    """Counts the bytes that are kept, of all answers and bodies, those in flight included.

    Args:
        most: The bound, in bytes.
    """

    __slots__ = ("most", "num_bytes")

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_bytes = 0

    def fits(self, num_bytes: int) -> bool:
        """Return whether so many more bytes are within the bound."""
        return self.num_bytes + num_bytes <= self.most

    def take(self, num_bytes: int) -> bool:
        """Count so many more bytes; False: they exceed the bound, and nothing is counted."""
        if not self.fits(num_bytes):
            return False
        self.num_bytes += num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        """Count so many bytes less."""
        self.num_bytes -= num_bytes


class AnswerText:
    """The text of one answer, read from its bytes.

    Args:
        path: Of its API.
        is_event_stream: Whether the bytes are an event stream; else a JSON object.
        request: The body of its request.
        held: Counts the bytes of all answers.

    text, reasoning: In UTF-8.
    """

    __slots__ = ("_held", "_is_event_stream", "_num_counted", "_num_pieces", "_pieces", "_read",
                 "_request", "finish", "is_bad", "reasoning", "text")  # fmt: skip

    def __init__(self, path: str, *, is_event_stream: bool, request: bytes, held: Held) -> None:
        self._read = _READERS.get(path)
        self._is_event_stream = is_event_stream
        self._request = request
        self._held = held
        self._pieces: list[bytes] = []
        self._num_pieces = 0  # bytes of them
        self._num_counted = 0  # bytes that are counted in `held`
        self.text = bytearray()
        self.reasoning = bytearray()
        self.finish: str | None = None
        self.is_bad = self._read is None

    def __del__(self) -> None:
        self._held.give(self._num_counted)

    @property
    def is_end_of_turn(self) -> bool:
        """Whether the answer ended by itself and called no tool."""
        return not self.is_bad and self.finish in _STOPPED

    @property
    def seems_to_call(self) -> bool:
        """Whether its end names a call of a tool; it is not read for that."""
        return _CALL.search(b"".join(self._pieces[-_LAST_PIECES:])) is not None

    def take(self, piece: bytes) -> None:
        """Add the next piece of the answer."""
        if self.is_bad:
            return
        num_bytes = len(piece) + _PIECE_BYTES
        if not self._held.take(num_bytes):
            self._fail()
            return
        self._num_counted += num_bytes
        self._num_pieces += num_bytes
        self._pieces.append(piece)
        if self._num_pieces > _FOLD_BYTES:
            self._fold()

    def end(self) -> None:
        """Read what is left; idempotent."""
        if self._is_event_stream:
            self._pieces.append(b"\n")
            self._fold()
        elif self._pieces:
            data = b"".join(self._pieces)
            self._keep(b"")
            if not self.is_bad:
                self._event(data)
        if not self.is_bad and not self._may_change():
            self._fail()

    def _may_change(self) -> bool:
        """Return whether there is reasoning that a chat template may leave out of the next prompt.

        Without it, the next prompt goes on from this one and its answer, which are cached.
        """
        return bool(self.reasoning) or _REASONING.search(self._request) is not None

    def _keep(self, rest: bytes) -> None:
        """Keep only these bytes beside the text, and count what is kept."""
        self._pieces = [rest] if rest else []
        self._num_pieces = len(rest)
        num_bytes = len(rest) + len(self.text) + len(self.reasoning)
        self._held.give(self._num_counted - num_bytes)
        self._num_counted = num_bytes

    def _fail(self) -> None:
        self.is_bad = True
        self.text, self.reasoning, self._request = bytearray(), bytearray(), b""
        self._keep(b"")

    def _fold(self) -> None:
        """Read the events that are whole, and keep the rest."""
        data = b"".join(self._pieces)
        end = data.rfind(b"\n") + 1 if self._is_event_stream else 0
        for line in data[:end].split(b"\n"):
            if line.startswith(b"data:") and not self.is_bad:
                event = line[5:].strip()
                if event != b"[DONE]":
                    self._event(event)
        self._keep(b"" if self.is_bad else data[end:])
        is_plain = self.text and not self._may_change()
        if is_plain or self._num_counted > MAX_BYTES:
            self._fail()

    def _event(self, data: bytes) -> None:
        assert self._read is not None
        try:
            self._read(self, orjson.loads(data))
        except (ValueError, TypeError, LookupError, AttributeError):
            self._fail()

    def add(self, text: str | None, *, reasoning: str | None = None) -> None:
        """Add a piece of text, of reasoning, or of both."""
        if text:
            self.text += text.encode()
        if reasoning:
            self.reasoning += reasoning.encode()


def _chat(answer: AnswerText, event: Mapping[str, Any]) -> None:
    for choice in event.get("choices") or ():
        said = choice.get("delta") or choice.get("message") or {}
        if choice.get("index") or said.get("tool_calls"):
            answer.finish = "tool_calls"
        reasoning = said.get("reasoning") or said.get("reasoning_content")
        answer.add(said.get("content"), reasoning=reasoning)
        if choice.get("finish_reason") and answer.finish is None:
            answer.finish = choice["finish_reason"]


def _message(answer: AnswerText, event: Mapping[str, Any]) -> None:
    match event.get("type"):
        case "content_block_delta":
            delta = event["delta"]
            answer.add(delta.get("text"), reasoning=delta.get("thinking"))
        case "message_delta":
            answer.finish = event["delta"].get("stop_reason")
        case "message":
            for block in event["content"]:
                answer.add(block.get("text"), reasoning=block.get("thinking"))
            answer.finish = event.get("stop_reason")


def _response(answer: AnswerText, event: Mapping[str, Any]) -> None:
    response = event if event.get("object") == "response" else event.get("response")
    if not isinstance(response, dict) or response.get("status") != "completed":
        return
    answer.finish = "completed"
    for item in response["output"]:
        match item.get("type"):
            case "message":
                for part in item["content"]:
                    answer.add(part.get("text"))
            case "reasoning":
                for part in item.get("content") or ():
                    answer.add(None, reasoning=part.get("text"))
            case _:
                answer.finish = "tool_calls"


_READERS: Final[dict[str, Callable[[AnswerText, Mapping[str, Any]], None]]] = {
    "/v1/chat/completions": _chat,
    "/v1/messages": _message,
    "/v1/responses": _response,
}


_REASONING_FIELDS: Final = ("reasoning", "reasoning_content")


def next_body(
    path: str, body: Mapping[str, Any], answer: AnswerText, new_text: str
) -> dict[str, Any] | None:
    """Add an answer and a new message to a request's body. None: that API is not known."""
    write = _WRITERS.get(path)
    text, reasoning = answer.text.decode(), answer.reasoning.decode()
    return write(body, text, reasoning, new_text) if write is not None else None


def _next_chat(
    body: Mapping[str, Any], text: str, reasoning: str, new_text: str
) -> dict[str, Any] | None:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return None
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    for name in _REASONING_FIELDS:
        if reasoning and any(message.get(name) for message in messages):
            answer[name] = reasoning
    return {**body, "messages": [*messages, answer, {"role": "user", "content": new_text}]}


def _next_message(
    body: Mapping[str, Any], text: str, reasoning: str, new_text: str
) -> dict[str, Any] | None:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return None
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if reasoning and any(map(_thinks, messages)):
        blocks.insert(0, {"type": "thinking", "thinking": reasoning, "signature": ""})
    question = {"role": "user", "content": [{"type": "text", "text": new_text}]}
    answer = {"role": "assistant", "content": blocks}
    return {**body, "messages": [*messages, answer, question]}


def _thinks(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(block, dict) and block.get("type") == "thinking" for block in content
    )


def _next_response(
    body: Mapping[str, Any], text: str, reasoning: str, new_text: str
) -> dict[str, Any] | None:
    items = body.get("input")
    if isinstance(items, str):
        items = [{"type": "message", "role": "user", "content": items}]
    if not isinstance(items, list) or body.get("previous_response_id") is not None:
        return None
    part = {"type": "output_text", "text": text, "annotations": []}
    said: list[dict[str, Any]] = [{"type": "message", "role": "assistant", "content": [part]}]
    if reasoning and any(item.get("type") == "reasoning" for item in items):
        thought = {"type": "reasoning_text", "text": reasoning}
        said.insert(0, {"type": "reasoning", "summary": [], "content": [thought]})
    asked = {
        "type": "message", "role": "user", "content": [{"type": "input_text", "text": new_text}],
    }  # fmt: skip
    return {**body, "input": [*items, *said, asked]}


_WRITERS: Final[dict[str, Callable[[Mapping[str, Any], str, str, str], dict[str, Any] | None]]] = {
    "/v1/chat/completions": _next_chat,
    "/v1/messages": _next_message,
    "/v1/responses": _next_response,
}


MAX_BODY_BYTES: Final = 4 * 1024 * 1024
"""The largest body of a request whose conversation is followed: it is parsed once more."""

_NEW_TEXTS: Final = ("a", "The 2nd")


class Beginning(Struct, frozen=True, kw_only=True):
    """The known beginning of a prompt, in whole blocks."""

    ids: Sequence[int]
    keys: Sequence[BlockKey]
    block_size: int


class NextPrompts:
    """Makes the beginnings of next prompts."""

    def __init__(
        self, *, fleet: Fleet, caches: CacheView, reader: Reader, tokenizer: Tokenizer
    ) -> None:
        self._fleet = fleet
        self._caches = caches
        self._reader = reader
        self._tokenizer = tokenizer

    async def make(
        self, prompt: Prompt, answer: AnswerText, candidate: CandidateId
    ) -> Beginning | None:
        """Make the beginning of the prompt behind an answer. None: it cannot be known.

        Raises:
            RouterError: the next request would be refused.
        """
        contract = self._caches.contract(candidate)
        if contract is None:
            return None
        body = orjson.loads(prompt.read.received.body or b"{}")
        extra = extra_keys(self._fleet, prompt.read.model or "", prompt.read.salt)
        found: list[tuple[Tokens, Sequence[BlockKey]]] = []
        for new_text in _NEW_TEXTS:
            await asyncio.sleep(0)  # it takes milliseconds: requests go first
            tokens = await self._tokens(prompt, body, answer, new_text)
            if tokens is None:
                return None
            found.append((tokens, tokens.keys(contract, extra)))
        (tokens, keys), (_, others) = found
        num_blocks = num_common(keys, others)
        size = contract.block_size
        ids = tokens.ids()[: num_blocks * size]
        return Beginning(ids=ids, keys=keys[:num_blocks], block_size=size)

    def contract(self, candidate: CandidateId) -> HashContract | None:
        """Return how a candidate's engine names blocks. None: it is not known."""
        return self._caches.contract(candidate)

    def num_cached_blocks(self, beginning: Beginning, candidate: CandidateId) -> int:
        """Count the leading blocks that a candidate has on its GPU or in its own CPU memory."""
        found = self._caches.match(beginning.keys, [candidate]).get(candidate)
        return max(found.num_gpu_blocks, found.num_cpu_blocks) if found is not None else 0

    def computed(
        self, beginning: Beginning, candidate: CandidateId, start: int, end: int, now_s: float
    ) -> None:
        """Record that a candidate computed the blocks from `start` to `end`: they count at once."""
        num_tokens = end * beginning.block_size
        claim = self._caches.claim(candidate, beginning.keys[:end], start, num_tokens)
        self._caches.release(claim, computed=True, now_s=now_s)

    async def _tokens(
        self, prompt: Prompt, body: Mapping[str, Any], answer: AnswerText, new_text: str
    ) -> Tokens | None:
        received = prompt.read.received
        following = next_body(received.path, body, answer, new_text)
        if following is None:
            return None
        inbound = replace(received, body=orjson.dumps(following), as_sent=None, slots={})
        read = await self._reader.read(inbound, prompt.read.request_id)
        if read.chat is None or read.model != prompt.read.model:
            return None
        found = await self._tokenizer.find(read)
        return found.tokens if not found.num_rest_tokens else None


def num_common(some: Sequence[BlockKey], others: Sequence[BlockKey]) -> int:
    """Count the leading keys that are the same; keys are chained, so by bisecting."""
    low, high = 0, min(len(some), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if some[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
