"""Make the known beginning of a conversation's next prompt: its token ids and block keys.

The next request is written twice with different new messages. What both prompts have in common, in
whole blocks, does not depend on the new message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct
from msgspec.structs import replace

from policies.view import CandidateId
from router.base.contracts import BlockKey, HashContract
from router.index.cache_view import CacheView
from router.observers.early.answer_text import AnswerText
from router.observers.early.next_body import next_body
from router.replicas.fleet import Fleet
from router.request.read import Reader, extra_keys
from router.request.results import Prompt
from router.request.tokenize import Tokenizer
from router.tokens import Tokens

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
        """Record that a candidate computed the blocks from `start` to `end`, and used all before.

        Else the order in which it evicts would not be known.
        """
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
