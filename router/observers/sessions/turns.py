"""Turns of a session, and their sums."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from policies.view import CandidateId
from router.base.decoding import strict
from router.base.wire import Count, Seconds
from router.records.computed import Computed

Milliseconds = Annotated[float, Meta(ge=-1e15, le=1e15)]
"""No NaN is in them."""


class Turn(Struct, frozen=True, array_like=True, kw_only=True):
    """One turn of a session. Times in milliseconds.

    at: When the request arrived, unix seconds.
    num_cached: As the engine reports; None: it does not.
    num_gpu, num_cpu, num_pool: Where these came from.
    engine_ms: What computing the prompt took, by the cost model; `saved_ms`: what caches saved.
    """

    request_id: str
    at: Seconds
    candidate: CandidateId
    model: str
    outcome: str
    num_tokens: Count
    num_cached: Count | None = None
    num_gpu: Count = 0
    num_cpu: Count = 0
    num_pool: Count = 0
    num_output: Count | None = None
    computed: Computed | None = None
    router_ms: Milliseconds = 0.0
    waited_ms: Milliseconds = 0.0
    ttft_ms: Milliseconds | None = None
    total_ms: Milliseconds = 0.0
    engine_ms: Milliseconds = 0.0
    saved_ms: Milliseconds = 0.0
    prefill_at: CandidateId | None = None
    waited_for: str | None = None


encode_turn = msgspec.msgpack.Encoder().encode
decode_turn = strict(msgspec.msgpack.Decoder(Turn).decode)


class Totals(Struct):
    """Sums over a session's turns. `by_cause` has `cached`, too, where the engine reports."""

    num_turns: int = 0
    num_tokens: int = 0
    num_output: int = 0
    num_gpu: int = 0
    num_cpu: int = 0
    num_pool: int = 0
    by_cause: dict[str, int] = msgspec.field(default_factory=dict)
    num_moves: int = 0
    waited_s: float = 0.0
    engine_s: float = 0.0
    saved_s: float = 0.0

    def add(self, turn: Turn) -> None:
        """Count a turn."""
        self.num_turns += 1
        self.num_tokens += turn.num_tokens
        self.num_output += turn.num_output or 0
        self.num_gpu += turn.num_gpu
        self.num_cpu += turn.num_cpu
        self.num_pool += turn.num_pool
        self.waited_s += turn.waited_ms / 1000
        self.engine_s += turn.engine_ms / 1000
        self.saved_s += turn.saved_ms / 1000
        by_cause, computed = self.by_cause, turn.computed
        if turn.num_cached is not None:
            by_cause["cached"] = by_cause.get("cached", 0) + turn.num_cached
        if computed is not None:
            self.num_moves += computed.move is not None
            for cause, num_tokens in computed.tokens.items():
                by_cause[cause] = by_cause.get(cause, 0) + num_tokens
