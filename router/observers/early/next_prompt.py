"""Make the known beginning of a conversation's next prompt: its token ids and block keys.

The next request is written twice with different new messages. What both prompts have in common, in
whole blocks, does not depend on the new message.

The request that a client is likely to send next is the conversation, the answer as clients send it
back, and a new message whose text is not known. Reasoning is sent back if the client has done so
before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct
from msgspec.structs import replace

from policies.view import CandidateId
from router.base.contracts import BlockKey, HashContract
from router.index.cache_view import CacheView
from router.observers.early.answer_text import AnswerText
from router.replicas.fleet import Fleet
from router.request.read import Reader, extra_keys
from router.request.results import Prompt
from router.request.tokenize import Tokenizer
from router.tokens import Tokens

_REASONING: Final = ("reasoning", "reasoning_content")


def next_body(
    path: str, body: Mapping[str, Any], answer: AnswerText, new_text: str
) -> dict[str, Any] | None:
    """Add an answer and a new message to a request's body. None: that API is not known."""
    write = _WRITERS.get(path)
    text, reasoning = answer.text.decode(), answer.reasoning.decode()
    return write(body, text, reasoning, new_text) if write is not None else None


def _chat(
    body: Mapping[str, Any], text: str, reasoning: str, new_text: str
) -> dict[str, Any] | None:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return None
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    for name in _REASONING:
        if reasoning and any(message.get(name) for message in messages):
            answer[name] = reasoning
    return {**body, "messages": [*messages, answer, {"role": "user", "content": new_text}]}


def _message(
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


def _response(
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
    "/v1/chat/completions": _chat,
    "/v1/messages": _message,
    "/v1/responses": _response,
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
