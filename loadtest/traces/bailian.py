"""Qwen Bailian traces: JSON Lines of production chats, linked to the turn before.

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521,
     "output_length": 132, "type": "text", "turn": 2, "hash_ids": [1089, 1090, ...]}

`timestamp` counts seconds; `hash_ids` are of 16 tokens each, and every line has its whole prompt.
They name blocks by their content alone, so they are chained here: equal id, equal block and equal
prefix. A chat whose parent is -1 begins a session; another follows its parent.
Source: alibaba-edu/qwen-bailian-usagetraces-anon, README.md.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from loadtest.traces.errors import BadLine, decoded
from loadtest.traces.request import (
    MAX_HASH_ID,
    MAX_TOKENS,
    Clock,
    Draft,
    LineReader,
    check_hash_ids,
    check_tokens,
)
from loadtest.workload import TurnKey

BLOCK_TOKENS: Final = 16
_ROOT: Final = -1

_ALLOWED: Final = {
    "chat_id": "a whole number, each only once",
    "parent_chat_id": "the chat_id of an earlier line, or -1",
    "timestamp": "a number of seconds, 0 or more",
    "input_length": f"a whole number, 1 to {MAX_TOKENS:,}",
    "output_length": f"a whole number, 0 to {MAX_TOKENS:,}",
    "hash_ids": f"a list of whole numbers, 0 to {MAX_HASH_ID:,}, one for each block",
    "type": "a string",
    "turn": "a whole number",
}


class BailianLine(Struct, kw_only=True, gc=False):
    """One line of a file; `type` and `turn` are not needed."""

    chat_id: int
    parent_chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    type: str = ""
    turn: int = 1


class Bailian(LineReader):
    """Takes the lines of one file."""

    __slots__ = ("_chains", "_clock", "_decoder", "_keys", "_num_turns")

    def __init__(self, block_size: int | None = None) -> None:
        """Read blocks of `block_size` tokens; None: 16."""
        super().__init__(block_size or BLOCK_TOKENS)
        self._clock = Clock()
        self._decoder = msgspec.json.Decoder(BailianLine)
        self._keys: dict[int, TurnKey] = {}  # of chats
        self._num_turns: dict[str, int] = {}
        self._chains: dict[tuple[int, int], int] = {}  # id before, block: id

    def add(self, raw: bytes) -> None:
        line = decoded(self._decoder, raw, _ALLOWED)
        self._check(line)
        self._clock.set(line.timestamp * 1000.0)
        parent = self._keys.get(line.parent_chat_id)
        session_id = parent[0] if parent else str(line.chat_id)
        number = self._num_turns.get(session_id, 0)
        self._num_turns[session_id] = number + 1
        self._keys[line.chat_id] = session_id, number
        self._drafts.append(
            Draft(
                timestamp_ms=line.timestamp * 1000.0,
                num_input_tokens=line.input_length,
                num_output_tokens=line.output_length,
                hash_ids=self._chain(line.hash_ids),
                session_id=session_id,
                after=(parent,) if parent else (),
            )
        )

    def _check(self, line: BailianLine) -> None:
        check_tokens(line.input_length, line.output_length)
        check_hash_ids(line.hash_ids, line.input_length, self.block_size)
        self._clock.check(line.timestamp * 1000.0)
        if line.chat_id in self._keys or line.chat_id < 0:
            raise BadLine("chat_id", f"{line.chat_id}; allowed: {_ALLOWED['chat_id']}, 0 or more")
        if line.parent_chat_id != _ROOT and line.parent_chat_id not in self._keys:
            raise BadLine(
                "parent_chat_id",
                f"{line.parent_chat_id} is unknown; allowed: {_ALLOWED['parent_chat_id']}",
            )

    def _chain(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Turn ids of blocks into ids of prefixes, numbered as they appear."""
        chains = self._chains
        ids: list[int] = []
        before = -1
        for block in blocks:
            before = chains.setdefault((before, block), len(chains))
            ids.append(before)
        return tuple(ids)
