"""Notes of sessions, as routers share them: what they had, and what it cost.

They wait for the next message of the router: see `Outbox.tell_later`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from router.base.contracts import HashContract
from router.base.wire_types import Count, Keys, Number, Text
from router.records.computed import Part

MAX_TURN_BYTES = 16 * 1024

MAX_DIGESTS = 256
"""Models that a session has turns of; real ones have four at most."""

_Hash = Annotated[int, Meta(ge=0)]  # msgpack has none over 64 bits


class Run(Struct, frozen=True, array_like=True):
    """A list of 8-byte items, as what it adds to a list that others may have.

    `num_common` leading items are those of the other list; `check` stands for them.
    """

    num_common: Count
    check: _Hash
    added: Keys


class SharedParts(Struct, frozen=True, array_like=True):
    """Digests of a chat's parts; see router.api.part_digests."""

    tools: _Hash
    tool_set: _Hash
    system: _Hash
    messages: Run
    num_system: Count
    has_answers: bool


class Remembered(Struct, frozen=True, array_like=True, tag="prompt"):
    """A conversation's prompt was computed at a candidate: see `Thread` of the sessions.

    Earlier routers of schema 2 send two more items, which are ignored.
    """

    conversation: Number
    parent: Number | None
    tenant: Text | None
    routing: Number | None
    stream_id: Text  # of the candidate
    space: _Hash
    contract: HashContract | None
    keys: Run
    num_tokens: Count
    num_computed: Count  # there, in this turn
    num_pool_tokens: Count
    parts: SharedParts | None
    change: Part | None
    num_in_row: Count


class Over(Struct, frozen=True, array_like=True, tag="over"):
    """A client says that a session is over.

    conversation: Its key in the ledger of sessions.
    sessions: What routing knows it by, one digest a model.
    """

    conversation: Number
    sessions: Annotated[tuple[Number, ...], Meta(max_length=MAX_DIGESTS)] = ()


class Booked(Struct, frozen=True, array_like=True, tag="turn"):
    """A turn of a conversation was booked; packed, with stream ids in place of candidates."""

    conversation: Number
    turn: Annotated[bytes, Meta(max_length=MAX_TURN_BYTES)]
