"""Decision records as a trace: what a router wrote with `log.decisions` becomes a workload.

Records have no prompt text and no block names, but times, lengths, a digest of the session and how
many tokens the engine found cached. From these the blocks of a session are rebuilt:

- A turn begins with the whole prompt of the turn before, as an agent's does. A shorter prompt is a
  rewritten conversation: nothing after its beginning is shared with the one before.
- The cached tokens of a session's first turn are what it shares with other sessions of its model,
  a system prompt as a rule. They are the beginning of all its prompts.

A record without a session is a session of its own. Records of requests that failed, that were
counted only, or that were placed before their tokens were known are left out.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from loadtest.traces.errors import decoded, in_range
from loadtest.traces.request import (
    MAX_TIMESTAMP_MS,
    MAX_TOKENS,
    Draft,
    LineReader,
    check_tokens,
)

BLOCK_TOKENS: Final = 512
_ALLOWED: Final = {
    "at": "unix time in seconds",
    "model": "a string",
    "num_prompt_tokens": f"a whole number, 1 to {MAX_TOKENS:,}",
    "num_completion_tokens": f"a whole number, 0 to {MAX_TOKENS:,}, or null",
    "num_reported_cached_tokens": "a whole number, or null",
    "status": "an HTTP status",
    "snapshot": "the snapshot of a decision, with its request",
}


class _Request(Struct, gc=False):
    session_hash: int | None = None


class _Snapshot(Struct, gc=False):
    request: _Request


class _Record(Struct, gc=False):
    at: float  # when it ended
    model: str
    snapshot: _Snapshot
    status: int
    num_prompt_tokens: int
    total_ms: float = 0.0
    num_completion_tokens: int | None = None
    num_reported_cached_tokens: int | None = None

    @property
    def arrived_s(self) -> float:
        return self.at - self.total_ms / 1000.0


class _Session(Struct):
    """A session as its last turn left it; its first `num_shared` blocks belong to its model."""

    name: str
    num_shared: int = 0
    num_tokens: int = 0
    ids: tuple[int, ...] = ()
    ended_s: float | None = None  # None: there was no turn


class Records(LineReader):
    """Takes the lines of one file; blocks are named when all are known, in order of arrival."""

    __slots__ = ("_decoder", "_next_id", "_records", "_shared")

    def __init__(self, block_size: int | None = None) -> None:
        super().__init__(block_size or BLOCK_TOKENS)
        self._decoder = msgspec.json.Decoder(_Record)
        self._records: list[_Record] = []
        self._shared: dict[str, list[int]] = {}  # by model: the blocks that sessions begin with
        self._next_id = 0

    @property
    def num_requests(self) -> int:
        return len(self._records)

    def add(self, raw: bytes) -> None:
        line = decoded(self._decoder, raw, _ALLOWED)
        if line.status >= 400 or line.num_prompt_tokens < 1:
            return
        check_tokens(line.num_prompt_tokens, line.num_completion_tokens or 0)
        in_range("at", 1000.0 * line.arrived_s, 0, MAX_TIMESTAMP_MS)
        self._records.append(line)

    def drafts(self) -> list[Draft]:
        sessions: dict[tuple[str, int], _Session] = {}
        return [
            self._draft(number, record, sessions)
            for number, record in enumerate(sorted(self._records, key=lambda each: each.arrived_s))
        ]

    def _draft(
        self, number: int, record: _Record, sessions: dict[tuple[str, int], _Session]
    ) -> Draft:
        digest = record.snapshot.request.session_hash
        if digest is None:
            session = _Session(f"request {number}")
        else:
            key = record.model, digest
            session = sessions.setdefault(key, _Session(f"{record.model} {digest:x}"))
        ended_s, arrived_s = session.ended_s, record.arrived_s
        self._grow(session, record)
        return Draft(
            timestamp_ms=1000.0 * arrived_s,
            num_input_tokens=record.num_prompt_tokens,
            num_output_tokens=record.num_completion_tokens or 0,
            hash_ids=session.ids,
            session_id=session.name,
            delay_ms=None if ended_s is None else 1000.0 * max(0.0, arrived_s - ended_s),
        )

    def _grow(self, session: _Session, record: _Record) -> None:
        """Name a prompt's blocks: those of the turn before as far as they go, then new ones."""
        num_tokens = record.num_prompt_tokens
        num_blocks = -(-num_tokens // self.block_size)
        if session.ended_s is None:
            num_cached = min(record.num_reported_cached_tokens or 0, num_tokens - 1)
            session.num_shared = num_cached // self.block_size
            ids = self._shared_ids(record.model, session.num_shared)
        elif num_tokens >= session.num_tokens:
            ids = session.ids[: session.num_tokens // self.block_size]
        else:
            ids = session.ids[: min(session.num_shared, num_tokens // self.block_size)]
        session.ids = (*ids, *self._fresh(num_blocks - len(ids)))
        session.num_tokens, session.ended_s = num_tokens, record.at

    def _shared_ids(self, model: str, num_blocks: int) -> tuple[int, ...]:
        shared = self._shared.setdefault(model, [])
        shared += self._fresh(num_blocks - len(shared))
        return tuple(shared[:num_blocks])

    def _fresh(self, num_blocks: int) -> range:
        first = self._next_id
        self._next_id += max(0, num_blocks)
        return range(first, self._next_id)
