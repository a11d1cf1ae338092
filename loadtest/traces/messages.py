"""Plain messages: JSON Lines, one request in each, in the OpenAI API's own words.

    {"session_id": "s1", "messages": [{"role": "user", "content": "..."}], "output_length": 52,
     "delay": 4503.3}

Optional: `timestamp` and `delay` in ms as AIPerf has them, `pre_gap` in seconds and `input` for
`messages` as in the LMCache agentic traces, `tools`. Lines of one session follow one another; a
line without `session_id` is a session of its own. What has no times gets those that
`loadtest.timing` draws.
Sources: ai-dynamo/aiperf, dataset/loader/models.py; the data set sammshen/lmcache-agentic-traces.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from loadtest.traces.blocks import Blocks
from loadtest.traces.errors import BadLine, decoded, in_range
from loadtest.traces.request import MAX_DELAY_MS, MAX_TOKENS, Clock, Draft, LineReader, check_tokens

_MESSAGES: Final = 'a list of at least one {"role": ..., "content": ...}'
_ALLOWED: Final = {
    "session_id": "a string or a whole number",
    "messages": _MESSAGES,
    "input": _MESSAGES,
    "output_length": f"a whole number, 0 to {MAX_TOKENS:,}",
    "timestamp": "a number of ms, 0 or more",
    "delay": f"a number of ms, 0 to {MAX_DELAY_MS:,.0f}",
    "pre_gap": f"a number of seconds, 0 to {MAX_DELAY_MS / 1000:,.0f}",
    "tools": "a list of tool definitions",
}


class _Line(Struct, kw_only=True, gc=False):
    session_id: str | int | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    input: tuple[dict[str, Any], ...] | None = None
    output_length: int
    timestamp: float | None = None
    delay: float | None = None
    pre_gap: float | None = None
    tools: tuple[dict[str, Any], ...] | None = None


class Messages(LineReader):
    """Takes the lines of one file."""

    __slots__ = ("_blocks", "_clock", "_decoder")

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(blocks.block_size)
        self._blocks = blocks
        self._clock = Clock()
        self._decoder = msgspec.json.Decoder(_Line)

    def add(self, raw: bytes) -> None:
        line = decoded(self._decoder, raw, _ALLOWED)
        session_id = f"m{self.num_requests}" if line.session_id is None else str(line.session_id)
        delay_ms = _delay_ms(line)
        if line.timestamp is not None:
            self._clock.check(line.timestamp, session_id)
        read = [self._blocks.read(message) for message in _messages(line)]
        num_input_tokens, hash_ids = self._blocks.name(
            [self._blocks.tools(line.tools), *(tokens for _, tokens in read)]
        )
        check_tokens(num_input_tokens, line.output_length)
        if line.timestamp is not None:
            self._clock.set(line.timestamp, session_id)
        self._drafts.append(
            Draft(
                timestamp_ms=line.timestamp,
                num_input_tokens=num_input_tokens,
                num_output_tokens=line.output_length,
                hash_ids=hash_ids,
                session_id=session_id,
                delay_ms=delay_ms,
                messages=tuple(message for message, _ in read),
                tools=line.tools or None,
            )
        )


def _messages(line: _Line) -> tuple[dict[str, Any], ...]:
    messages = line.messages or line.input
    if not messages:
        raise BadLine("messages", f"missing or empty; allowed: {_MESSAGES}")
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise BadLine("messages", f"number {number} has no role; allowed: {_MESSAGES}")
    return messages


def _delay_ms(line: _Line) -> float | None:
    """Return `delay`, or else `pre_gap`."""
    if line.pre_gap is not None:
        in_range("pre_gap", line.pre_gap, 0, MAX_DELAY_MS / 1000)
    if line.delay is not None:
        in_range("delay", line.delay, 0, MAX_DELAY_MS)
        return line.delay
    return None if line.pre_gap is None else line.pre_gap * 1000.0
