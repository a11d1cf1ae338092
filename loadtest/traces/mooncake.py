"""Mooncake traces: JSON Lines of lengths and block ids; the common denominator of the field.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

`timestamp` counts ms from the start; `hash_ids` name prefixes of 512 tokens, renumbered: equal
id, equal block and equal prefix; the last one is partial.
Source: kvcache-ai/Mooncake, FAST25-release/README.md.

Optional, as AIPerf writes and reads them (ai-dynamo/aiperf: dataset/loader/models.py and its
tutorial on the agentic code generator):

    session_id    lines of one conversation, in its order (the file need not be in order of time)
    delay         ms from the end of the turn before to this one; then `timestamp` may be missing
    context_mode  what a follow-up's lengths and ids are:
                  message_array_with_responses   the whole prompt, as in Mooncake's own traces
                  deltas_without_responses       what was added to prompt and reply before it
                  deltas_with_responses          what was added to the prompt before it

AIPerf's default, and what its generator writes without saying so, are deltas. A file that does
not say is taken for whole prompts if any follow-up begins with the block that its session began
with (a delta never does), else for deltas.

Two fields are ours, and others ignore them. `block_size` is there if it is not 512. `after` is a
list of [session_id, number of the turn], if a turn does not come after the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from loadtest.traces.errors import BadLine, decoded, in_range
from loadtest.traces.request import (
    MAX_DELAY_MS,
    MAX_HASH_ID,
    MAX_TOKENS,
    Clock,
    Draft,
    LineReader,
    check_hash_ids,
    check_tokens,
)
from loadtest.workload import Turn, TurnKey, Workload

BLOCK_TOKENS: Final = 512
WHOLE: Final = "message_array_with_responses"
MAX_BLOCK_SIZE: Final = 1 << 20

ContextMode = Literal[
    "message_array_with_responses", "deltas_without_responses", "deltas_with_responses"
]

_ALLOWED: Final = {
    "timestamp": "a number of ms, 0 or more",
    "delay": f"a number of ms, 0 to {MAX_DELAY_MS:,.0f}",
    "input_length": f"a whole number, 1 to {MAX_TOKENS:,}",
    "output_length": f"a whole number, 0 to {MAX_TOKENS:,}",
    "hash_ids": f"a list of whole numbers, 0 to {MAX_HASH_ID:,}, one for each block",
    "session_id": "a string or a whole number",
    "context_mode": "message_array_with_responses, deltas_without_responses, deltas_with_responses",
    "block_size": f"a whole number, 1 to {MAX_BLOCK_SIZE:,}",
    "after": "a list of [session_id, turn]",
}


class MooncakeLine(Struct, kw_only=True, omit_defaults=True, gc=False):
    """One line of a file, fields in the order in which we write them."""

    timestamp: float | None = None
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session_id: str | int | None = None
    delay: float | None = None
    context_mode: ContextMode | None = None
    block_size: int | None = None
    after: tuple[TurnKey, ...] | None = None


class Mooncake(LineReader):
    """Takes the lines of one file."""

    __slots__ = ("_clock", "_decoder", "_fixed", "_lines")

    def __init__(self, block_size: int | None = None) -> None:
        """Read blocks of `block_size` tokens; None: what the file says, or else 512."""
        super().__init__(block_size or BLOCK_TOKENS)
        self._fixed = block_size is not None
        self._clock = Clock()
        self._decoder = msgspec.json.Decoder(MooncakeLine)
        self._lines: list[MooncakeLine] = []

    @property
    def num_requests(self) -> int:
        return len(self._lines)

    def add(self, raw: bytes) -> None:
        line = decoded(self._decoder, raw, _ALLOWED)
        session_id = self._check(line)
        if line.timestamp is not None:
            self._clock.set(line.timestamp, session_id)
        self._lines.append(line)

    def _check(self, line: MooncakeLine) -> str | None:
        """Check a line against the format and the lines before; return its session."""
        session_id = None if line.session_id is None else str(line.session_id)
        check_tokens(line.input_length, line.output_length)
        block_size = self._block_size_of(line)
        check_hash_ids(line.hash_ids, line.input_length, block_size)
        if line.delay is not None:
            in_range("delay", line.delay, 0, MAX_DELAY_MS)
        if line.timestamp is not None:
            self._clock.check(line.timestamp, session_id)
        elif session_id is None:
            raise BadLine("timestamp", f"missing; allowed: {_ALLOWED['timestamp']}")
        self.block_size, self._fixed = block_size, True
        return session_id

    def _block_size_of(self, line: MooncakeLine) -> int:
        stated = line.block_size
        if stated is None:
            return self.block_size
        in_range("block_size", stated, 1, MAX_BLOCK_SIZE)
        if self._fixed and stated != self.block_size:
            raise BadLine("block_size", f"{stated}; allowed: {self.block_size}, as before")
        return stated

    def drafts(self) -> list[Draft]:
        if _has_deltas(self._lines):
            return list(_whole(self._lines, self.block_size))
        return [_draft(line, line.input_length, line.hash_ids) for line in self._lines]


def _has_deltas(lines: Iterable[MooncakeLine]) -> bool:
    """Return whether follow-ups hold only what was added: see above."""
    firsts: dict[str | int, int] = {}
    modes: set[ContextMode | None] = set()
    has_follow_ups = False
    for line in lines:
        if line.session_id is None:
            continue
        modes.add(line.context_mode)
        if line.session_id not in firsts:
            firsts[line.session_id] = line.hash_ids[0]
        elif line.hash_ids[0] == firsts[line.session_id]:
            return bool(modes - {None, WHOLE})
        else:
            has_follow_ups = True
    return has_follow_ups and WHOLE not in modes


def _whole(lines: Iterable[MooncakeLine], block_size: int) -> Iterator[Draft]:
    """Join deltas to whole prompts.

    Blocks of a first prompt keep their ids, because sessions may share them. What follows belongs
    to its session alone; a partial last block becomes another one as it fills.
    """
    lines = list(lines)
    fresh = count(1 + max(max(line.hash_ids) for line in lines))
    prompts: dict[str | int, tuple[int, list[int]]] = {}  # tokens, ids; the reply not among them
    replies: dict[str | int, int] = {}
    for line in lines:
        key = line.session_id
        if key is None or key not in prompts:
            num_tokens, ids = line.input_length, list(line.hash_ids)
        else:
            num_tokens, ids = prompts[key]
            if num_tokens % block_size:
                ids.pop()
            if line.context_mode != "deltas_with_responses":
                num_tokens += replies[key]
            num_tokens += line.input_length
            ids += islice(fresh, -(-num_tokens // block_size) - len(ids))
        if key is not None:
            prompts[key] = num_tokens, ids
            replies[key] = line.output_length
        yield _draft(line, num_tokens, tuple(ids))


def _draft(line: MooncakeLine, num_input_tokens: int, hash_ids: tuple[int, ...]) -> Draft:
    return Draft(
        timestamp_ms=line.timestamp,
        num_input_tokens=num_input_tokens,
        num_output_tokens=line.output_length,
        hash_ids=hash_ids,
        session_id=None if line.session_id is None else str(line.session_id),
        delay_ms=line.delay,
        after=line.after,
    )


def write_trace(workload: Workload, path: Path) -> None:
    """Write a workload as Mooncake JSON Lines with sessions and delays.

    Prompts are whole and say so; times are kept to the microsecond. Texts are not written: their
    lengths and ids are.

    Raises:
        OSError: The file cannot be written.
    """
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for turn in workload.turns:
            file.write(encoder.encode(_line(turn, workload.block_size)) + b"\n")


def _line(turn: Turn, block_size: int) -> MooncakeLine:
    before = ((turn.session_id, turn.number - 1),) if turn.number else ()
    return MooncakeLine(
        timestamp=round(turn.arrival_s * 1000.0, 3),
        input_length=turn.num_input_tokens,
        output_length=turn.num_output_tokens,
        hash_ids=turn.hash_ids,
        session_id=turn.session_id,
        delay=round(turn.wait_s * 1000.0, 3) if turn.after else None,
        context_mode=WHOLE,
        block_size=None if block_size == BLOCK_TOKENS else block_size,
        after=None if turn.after == before else turn.after,
    )
