"""Shares the sessions' ledger: each router publishes the prompts and the turns that it books.

A note says of a prompt only what it adds to prompts that the other routers should have. Block keys
stand for all blocks before them, so a receiver finds that part in any thread of the conversation. A
receiver that does not have it keeps the totals, and no keys: the next turn's causes are `unknown`.

Notes wait for the next message of the router: see `Outbox.tell_later`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, cast

from msgspec import Meta, Struct
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from policies.view import CandidateId
from router.api.digests import PartDigests
from router.base.contracts import BlockKey, HashContract
from router.base.decoding import Count, Keys, Number, Text
from router.base.messages import (
    StreamId,
    pack_keys,
    unpack_words,
)
from router.cluster.candidate_source import CandidateNames
from router.cluster.outbox import Outbox
from router.cluster.peers import Peers
from router.index.block_index import BlockIndex
from router.index.copies import num_common_blocks
from router.observers.sessions.session_ledger import (
    Memory,
    SessionLedger,
    Thread,
    num_equal,
)
from router.observers.sessions.turns import Turn, decode_turn, encode_turn
from router.records.record import Part

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
    """Digests of a chat's parts; see router.api.digests."""

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


_NOTE_BYTES = 200


def share_turns(
    ledger: SessionLedger, *, index: BlockIndex, names: CandidateNames, outbox: Outbox, peers: Peers
) -> None:
    """Connect the ledger of this router with those of others."""

    def tell(memory: Memory) -> None:
        stream_id = names.stream_id_of(memory.thread.candidate)
        if stream_id is not None:
            note = _note_of(memory, stream_id)
            num_messages = len(note.parts.messages.added) if note.parts is not None else 0
            outbox.tell_later(note, _NOTE_BYTES + len(note.keys.added) + num_messages)

    def tell_turn(key: int, turn: Turn) -> None:
        packed = encode_turn(_renamed(turn, lambda name: names.stream_id_of(CandidateId(name))))
        if len(packed) <= MAX_TURN_BYTES:
            outbox.tell_later(Booked(key, packed), _NOTE_BYTES + len(packed))

    def candidate_of(stream_id: str) -> CandidateId | None:
        return names.candidate_of(StreamId(stream_id))

    def receive_turn(note: Booked, router: str, now_s: float) -> None:
        turn = decode_turn(note.turn)
        ledger.learn_turn(note.conversation, _renamed(turn, candidate_of))

    def receive(note: Remembered, router: str, now_s: float) -> None:
        before = (*ledger.threads(note.conversation), *ledger.threads(note.parent))
        candidate = candidate_of(note.stream_id) or CandidateId(note.stream_id)
        ledger.learn(_memory_of(note, before, candidate, index.num_emptied(candidate)))

    ledger.on_remembered, ledger.on_added = tell, tell_turn
    peers.notes.register(Remembered, receive)
    peers.notes.register(Booked, receive_turn)


def _note_of(memory: Memory, stream_id: StreamId) -> Remembered:
    thread, before = memory.thread, memory.before
    alike = [each for each in before if each.contract == thread.contract]
    num_common = max([num_common_blocks(thread.keys, each.keys) for each in alike], default=0)
    check = thread.keys[num_common - 1] if num_common else 0
    return Remembered(
        conversation=memory.key,
        parent=memory.parent,
        tenant=memory.tenant,
        routing=memory.routing,
        stream_id=stream_id,
        space=thread.space,
        contract=thread.contract,
        keys=Run(num_common, check, pack_keys(thread.keys[num_common:])),
        num_tokens=thread.num_tokens,
        num_computed=memory.num_computed,
        num_pool_tokens=thread.num_pool_tokens,
        parts=_shared_parts(thread.parts, before) if thread.parts is not None else None,
        change=thread.change,
        num_in_row=thread.num_in_row,
    )


def _shared_parts(parts: PartDigests, before: Sequence[Thread]) -> SharedParts:
    num_common = max([num_equal(each.parts, parts) for each in before], default=0)
    check, added = _digest(parts.messages[:num_common]), parts.messages[num_common:]
    return SharedParts(
        tools=parts.tools,
        tool_set=parts.tool_set,
        system=parts.system,
        messages=Run(num_common, check, pack_keys(added)),
        num_system=parts.num_system,
        has_answers=parts.has_answers,
    )


def _memory_of(
    note: Remembered, before: Sequence[Thread], candidate: CandidateId, num_emptied: int
) -> Memory:
    """Rebuild a prompt from a note.

    Raises:
        ValueError: the note is malformed.
    """
    alike = [each.keys for each in before if each.contract == note.contract]
    keys = _whole(note.keys, alike, lambda keys: keys[-1])
    thread = Thread(
        space=note.space,
        contract=note.contract,
        keys=cast("Sequence[BlockKey]", keys) if keys is not None else (),
        num_tokens=note.num_tokens,
        parts=_parts_of(note.parts, before) if note.parts is not None else None,
        candidate=candidate,
        num_emptied=num_emptied,
        at_s=time.monotonic(),
        num_pool_tokens=note.num_pool_tokens,
        change=note.change,
        num_in_row=note.num_in_row,
    )
    return Memory(
        key=note.conversation,
        parent=note.parent,
        thread=thread,
        num_computed=note.num_computed,
        tenant=note.tenant,
        routing=note.routing,
    )


def _parts_of(shared: SharedParts, before: Sequence[Thread]) -> PartDigests | None:
    known = [each.parts.messages for each in before if each.parts is not None]
    messages = _whole(shared.messages, known, _digest)
    if messages is None:
        return None
    return PartDigests(
        tools=shared.tools,
        tool_set=shared.tool_set,
        system=shared.system,
        messages=messages,
        num_system=shared.num_system,
        has_answers=shared.has_answers,
    )


def _whole(
    run: Run, known: Sequence[Sequence[int]], check: Callable[[Sequence[int]], int]
) -> array[int] | None:
    """Add a run to the list that it goes on; None: no known list begins so."""
    added = unpack_words(run.added)
    if not run.num_common:
        return added
    for words in known:
        if len(words) >= run.num_common:
            head = array("Q", words[: run.num_common])
            if check(head) == run.check:
                return head + added
    return None


def _digest(words: Sequence[int]) -> int:
    return xxh3_64_intdigest(pack_keys(words))


def _renamed(turn: Turn, rename: Callable[[str], str | None]) -> Turn:
    """Write the names of candidates that a turn has otherwise; one that is not known stays."""

    def named(name: CandidateId) -> CandidateId:
        return CandidateId(rename(name) or name)

    computed = turn.computed
    if computed is not None and computed.move is not None:
        move = replace(computed.move, origin=named(CandidateId(computed.move.origin)))
        computed = replace(computed, move=move)
    if computed is not None and computed.loss is not None:
        loss = replace(computed.loss, replica=named(CandidateId(computed.loss.replica)))
        computed = replace(computed, loss=loss)
    return replace(
        turn,
        candidate=named(turn.candidate),
        prefill_at=named(turn.prefill_at) if turn.prefill_at is not None else None,
        computed=computed,
    )
