"""Agents' requests, made beforehand: bodies, token counts, block keys, KV events.

The bench tokenizes and hashes with the router's own code. A fake replica can therefore report usage
and publish events of blocks that it "computed", and predictions can be checked.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct

from loadtest import agent_text
from loadtest.agents import Profile, Session, TurnPlan
from loadtest.dev.bench.client import request_bytes
from loadtest.dev.bench.fake_engine import BLOCK_SIZE, MODEL
from router.api.openai import TokenIds, parse_chat
from router.base.contracts import BlockKey, HashContract
from router.kv_events.wire import BlockStored, EventBatch, KvEvent, encode
from router.tokens import Prompter, Tokens

CONTRACT: Final = HashContract(algorithm="sha256", block_size=BLOCK_SIZE)

TARGET: Final = "/v1/chat/completions"
NEW_TOKENS: Final = 2_000
_OUTPUT_TOKENS: Final = 300
_MARKUP_TOKENS: Final = 60  # what template and tool call add to a turn, about
_SHARED_TOKENS: Final = 11_500  # of an agent's system prompt and tools


class Prepared(Struct, frozen=True, kw_only=True):
    """A request and what an engine would say about its prompt.

    keys: Of the prompt's full blocks, shape (num_tokens // BLOCK_SIZE,).
    token_ids: Shape (num_tokens,).
    """

    body: bytes
    num_tokens: int
    keys: Sequence[BlockKey]
    token_ids: TokenIds

    @property
    def num_reusable_blocks(self) -> int:
        """Count the blocks that an engine could reuse at most: it computes the last token."""
        return (self.num_tokens - 1) // BLOCK_SIZE

    def stored(self, num_held_blocks: int) -> bytes:
        """Write the event batch for the blocks behind the first `num_held_blocks`."""
        return encode(EventBatch(ts=1.0, events=[self._stored(num_held_blocks)]))

    def _stored(self, start: int) -> KvEvent:
        end = len(self.keys)
        return BlockStored(
            block_hashes=list(self.keys[start:]),
            parent_block_hash=self.keys[start - 1] if start else None,
            token_ids=self.token_ids[start * BLOCK_SIZE : end * BLOCK_SIZE].tolist(),
            block_size=BLOCK_SIZE,
            medium="GPU",
            extra_keys=[None] * (end - start),
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )

    def request(self, *, num_cached_tokens: int | None = None, stream: str | None = None) -> bytes:
        """Write the HTTP request; the headers order what the fake replica answers.

        Args:
            num_cached_tokens: For the usage; None: it does not say.
            stream: "EVENTS,INTERVAL_MS"; None: not streamed. Must fit the body.
        """
        cached = "" if num_cached_tokens is None else f",{num_cached_tokens}"
        headers = {"X-Bench-Usage": f"{self.num_tokens}{cached}", "Authorization": "Bearer bench"}
        if stream is not None:
            headers["X-Bench-Stream"] = stream
        return request_bytes(TARGET, self.body, headers)


def growing(
    prompter: Prompter, name: str, context_tokens: int, num_turns: int, *, new: int = NEW_TOKENS
) -> Iterator[Prepared]:
    """Yield an agent's requests: one of about `context_tokens`, then `num_turns` more.

    Each adds a model's tool call and the tool's result, about `new` tokens in all. The context
    grew in the same way, behind a system prompt and tools that all conversations share.
    """
    shared = min(_SHARED_TOKENS, context_tokens // 2)
    num_before = max(0, context_tokens - shared - new) // new
    first = max(50, context_tokens - shared - num_before * new)
    plans = [_plan(first - _MARKUP_TOKENS)]
    plans += [_plan(new - _OUTPUT_TOKENS - _MARKUP_TOKENS)] * (num_before + num_turns)
    system, tools = agent_text.preamble(shared, variant="bench")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    session = Session(Profile(model=MODEL), name, tuple(plans), messages, tools, None)
    for number in range(len(plans)):
        turn = session.next_turn()
        assert turn is not None
        if number >= num_before:
            yield prepare(prompter, {**turn.body, "stream": True})
        session.advance(None)


def siblings(prompter: Prompter, context_tokens: int, num: int) -> Iterator[Prepared]:
    """Yield one request of about `context_tokens`, then `num` that add other 2,000 tokens to it."""
    base = next(growing(prompter, "siblings", context_tokens, 0))
    yield base
    body = orjson.loads(base.body)
    for number in range(num):
        rng = random.Random(number)
        reply = {"role": "assistant", "content": agent_text.code(rng, _OUTPUT_TOKENS)}
        question = agent_text.code(rng, NEW_TOKENS - _OUTPUT_TOKENS - _MARKUP_TOKENS)
        messages = [*body["messages"], reply, {"role": "user", "content": question}]
        yield prepare(prompter, {**body, "messages": messages})


def of_size(prompter: Prompter, name: str, num_bytes: int) -> Prepared:
    """Make an agent's request, not streamed, whose body has about `num_bytes` bytes."""
    num_tokens = round(num_bytes / 4.15)  # JSON escapes included
    prepared = next(growing(prompter, name, num_tokens, 0, new=max(500, num_tokens // 12)))
    return prepare(prompter, {**orjson.loads(prepared.body), "stream": False})


def prepare(prompter: Prompter, body: dict[str, Any]) -> Prepared:
    """Compute a request's tokens and block keys."""
    tokens = tokens_of(prompter, body)
    return Prepared(
        body=orjson.dumps(body),
        num_tokens=tokens.num_tokens,
        keys=tokens.keys(CONTRACT),
        token_ids=array("I", tokens.ids()),
    )


def tokens_of(prompter: Prompter, body: dict[str, Any]) -> Tokens:
    """Tokenize a chat request."""
    plan = prompter.plan_chat(parse_chat(body))
    return prompter.commit(plan, plan.encode())


def _plan(num_input_tokens: int) -> TurnPlan:
    return TurnPlan(num_input_tokens=num_input_tokens, num_output_tokens=_OUTPUT_TOKENS, wait_s=0.0)


def num_leading(keys: Sequence[BlockKey], held: set[BlockKey]) -> int:
    """Count the leading keys that are held."""
    for number, key in enumerate(keys):
        if key not in held:
            return number
    return len(keys)
