"""ShareGPT-style conversations: a JSON array or JSON Lines, one conversation in each entry.

    {"id": "...", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}

The K-th call sends the first 2K-1 messages; its reply is as long as the message after them. One
conversation is one session. There are no times: sessions start and tools take as long as
`loadtest.timing` draws.
Source: the data set Inferact/codex_swebenchpro_traces, as its readers describe it.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import msgspec
from msgspec import Struct

from loadtest.traces.blocks import Blocks
from loadtest.traces.errors import BadLine, decoded
from loadtest.traces.request import Draft, LineReader, check_tokens

ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "user",
    "function_response": "user",
    "observation": "user",
}
"""Who speaks, in the OpenAI API's words; an answer of a tool without a call's id is a user's."""

_ALLOWED: Final = {
    "conversations": 'a list of {"from": ..., "value": ...}',
    "from": ", ".join(ROLES),
    "value": "a string",
    "id": "a string or a whole number",
}


class _Said(Struct, gc=False):
    speaker: str = msgspec.field(name="from")
    value: str


class _Entry(Struct, gc=False):
    conversations: tuple[_Said, ...]
    id: str | int | None = None


class ShareGpt(LineReader):
    """Takes the entries of one file."""

    __slots__ = ("_blocks", "_decoder", "_session_ids")

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(blocks.block_size)
        self._blocks = blocks
        self._decoder = msgspec.json.Decoder(_Entry)
        self._session_ids: set[str] = set()

    def add(self, raw: bytes) -> None:
        entry = decoded(self._decoder, raw, _ALLOWED)
        drafts = self._calls(entry, self._session_id(entry))
        if not drafts:
            raise BadLine("conversations", "no answer in it; allowed: a human's and a gpt's turns")
        self._session_ids.add(drafts[0].session_id or "")
        self._drafts += drafts

    def _session_id(self, entry: _Entry) -> str:
        number = len(self._session_ids)
        session_id = f"c{number}" if entry.id is None else str(entry.id)
        return f"{session_id}#{number}" if session_id in self._session_ids else session_id

    def _calls(self, entry: _Entry, session_id: str) -> list[Draft]:
        """Make a request of every message that a model said."""
        drafts: list[Draft] = []
        messages: list[dict[str, Any]] = []
        parts: list[array[int]] = []
        for said in entry.conversations:
            role = ROLES.get(said.speaker.lower())
            if role is None:
                raise BadLine("from", f"{said.speaker[:20]!r}; allowed: {_ALLOWED['from']}")
            if role == "assistant" and messages:
                num_input_tokens, hash_ids = self._blocks.name(parts)
                num_output_tokens = self._blocks.count(said.value)
                check_tokens(num_input_tokens, num_output_tokens)
                drafts.append(
                    Draft(
                        timestamp_ms=None,
                        num_input_tokens=num_input_tokens,
                        num_output_tokens=num_output_tokens,
                        hash_ids=hash_ids,
                        session_id=session_id,
                        messages=tuple(messages),
                    )
                )
            message, tokens = self._blocks.read({"role": role, "content": said.value})
            messages.append(message)
            parts.append(tokens)
        return drafts
