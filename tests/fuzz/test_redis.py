"""Whatever lies in Redis: skipped and counted, or applied; the router's state stays sane."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import strategies as st

from policies.view import CandidateId
from router.base.messages import (
    Alive,
    Answered,
    Began,
    Ended,
    Notes,
    OpenLease,
    OpenLeases,
    PoolChanged,
    Position,
    Registered,
    ReplicaRecord,
    SessionState,
    StreamId,
    StreamStatus,
    TierChange,
    decode_record,
    decode_session,
    decode_status,
    encode,
    pack_keys,
)
from router.cluster.redis_snapshot import LogReader, PoolSnapshot, named_bits, read_heads, read_logs
from router.cluster.shares import TurnWaits, WaitingNow
from router.config import ReplicaConfig
from router.index.block_index import BlockIndex
from router.kv_events.stream import RankStream
from router.observers.sessions.describe import session_fields, turn_fields
from router.observers.sessions.turn_share import Booked, Over, Remembered, Run, SharedParts
from router.observers.sessions.turns import Turn
from router.records.record import Change, Computed, Loss, Move
from router.replicas.registry import Registry
from tests.engine import BLOCK_SIZE, CONTRACT, batch, prompt, stored
from tests.fuzz.budget import fuzz
from tests.fuzz.mutations import mangled, packed
from tests.nodes import Node

X = StreamId("http://x#0")
R1 = CandidateId("r1")
KEYS = pack_keys([1, 2, 3])  # type: ignore[list-item]

STATUS = StreamStatus("exact", "", CONTRACT, 100)
BEGAN = Began(1, X, 100, 10, 0, True, KEYS, session_hash=5)
TURN = Turn(
    request_id="id",
    at=1.0,
    candidate=CandidateId(X),
    model="m",
    outcome="ok",
    num_tokens=9,
    computed=Computed(
        tokens={"new": 9},
        change=Change(part="system", offset=1),
        move=Move(origin=X),
        loss=Loss(replica=X, since_s=1.0, num_between_tokens=1),
    ),
)
NOTES = Notes(
    "other",
    (
        BEGAN,
        Answered(1, 3.5),
        Alive((1, 2), 2),
        Registered(),
        PoolChanged(X, TierChange("pool", removed=KEYS)),
        Ended(1, True),
        Remembered(
            conversation=5,
            parent=6,
            tenant="t",
            routing=7,
            stream_id=X,
            space=8,
            contract=CONTRACT,
            keys=Run(0, 0, KEYS),
            num_tokens=9,
            num_computed=9,
            num_pool_tokens=0,
            parts=SharedParts(1, 2, 3, Run(0, 0, KEYS), 1, True),
            change="system",
            num_in_row=1,
        ),
        Booked(5, encode(TURN)),
        Over(5, (7,)),
        TurnWaits(5),
        WaitingNow(2, 1.0),
    ),
)


def a_node() -> Node:
    """Make a router that takes notes of all kinds."""
    node = Node("me", ("x",))
    for kind in (Registered, PoolChanged, Over):
        node.peers.notes.register(kind, lambda *_: None)
    return node


LOAD = OpenLeases(2, (OpenLease(BEGAN, 0.5, True),))
notes = packed(st.just(NOTES))


def is_sane(node: Node) -> bool:
    """Return whether a decision can be made of what a router knows."""
    return all(
        math.isfinite(figure) and figure >= 0
        for status in node.fleet.load.status(10.0)
        for figure in (status.num_requests, status.num_queued_tokens)
    )


@fuzz(packed(st.just(STATUS)))
def test_statuses(status: bytes) -> None:
    """A stream starts from what decodes; then it follows its engine as ever."""
    index = BlockIndex()
    stream = RankStream(R1, index, block_size=BLOCK_SIZE, capacity_blocks=100)
    with suppress(ValueError):
        stream.resume(Position(9, b"m"), decode_status(status), 0.0, newest=None)
    assert stream.contract.block_size > 0
    encode(stream.status())

    stream.connected()
    while stream.wanted_replay is not None:
        stream.begin_replay()
        stream.replayed(0, batch(stored(prompt(1))))
        stream.end_replay(is_complete=True)
    assert index.num_blocks(R1) == 3
    assert stream.state == "exact"


@fuzz(st.lists(notes, max_size=5), packed(st.just(LOAD)), packed(st.just(SessionState(X, 3, 0.5))))
def test_notes(some: list[bytes], load: bytes, session: bytes) -> None:
    """Another router's notes: figures stay finite; when it falls silent nothing of it is left."""
    node = a_node()
    for packed_notes in some:
        with suppress(ValueError):
            node.peers.apply(node.peers.notes.decode(packed_notes), 1.0)
        assert is_sane(node)
        assert node.queues.num_waiting(0.0) >= 0
        assert math.isfinite(node.queues.first_s(1.0) or 0.0)
    for session in node.ledger:
        assert sum(session.totals.by_cause.values()) >= 0
        msgspec.json.encode([session_fields(session), *map(turn_fields, session.turns)])
    node.peers.join({"other": load}, 1.0)
    with suppress(ValueError):
        node.peers.learn_sessions({5: decode_session(session)}, 1.0)
    assert is_sane(node)

    node.peers.apply(Notes("sane", (Began(1, X, 100, 0, 0, True),)), 2.0)
    assert node.fleet.load.status(2.0)[0].num_requests >= 1
    node.peers.expire(1_000.0)
    assert node.fleet.load.status(1_000.0)[0].num_requests == 0


RECORD = ReplicaRecord(url="http://y", events=("tcp://y:1",), replay=("tcp://y:2",))
names = st.one_of(st.sampled_from(["y", "http://y", "pool", "", "\0"]), st.text(max_size=8))


@fuzz(st.lists(st.tuples(names, packed(st.just(RECORD))), max_size=5))
def test_records(some: list[tuple[str, bytes]]) -> None:
    """Replicas in the registry: followed or refused with a reason, and no name is taken twice."""
    registry = Registry([ReplicaConfig(url="http://x")])
    records = {}
    for name, record in some:
        with suppress(ValueError):
            records[name] = decode_record(record)
    for name, found in records.items():
        reason = registry.refused(name, found)
        assert reason is None or reason
    registry.apply(records)

    urls = [entry.replica.url for entry in registry.entries]
    assert len(set(urls)) == len(urls)
    assert "http://x" in urls


fields = st.dictionaries(
    st.one_of(
        st.binary(max_size=6), st.sampled_from([b"wx", b"px", b"tx", b"sx", b"0", b"9" * 5_000])
    ),
    st.one_of(
        st.binary(max_size=12),
        packed(st.just(STATUS)),
        packed(st.just(Position(1, b"m"))),
        mangled(st.sampled_from([b"41", b"router", b"pool pool/tiny"])),
    ),
    max_size=6,
)


@fuzz(fields, st.lists(st.tuples(st.binary(max_size=20), st.just(KEYS)), max_size=4))
def test_snapshots(hash_: dict[bytes, bytes], values: list[tuple[bytes, bytes]]) -> None:
    """Heads of streams, pools of bits, blocks: the sane ones, and a count of the rest."""
    flat = [part for pair in hash_.items() for part in pair]
    heads, num_garbage = read_heads(flat)
    assert all(head.writer is not None for head in heads.values())
    assert num_garbage >= 0
    bits, _ = named_bits(flat)
    snapshot = PoolSnapshot(
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        "",
        incarnation="i",
        bits=bits,
    )
    found = snapshot.unpacked([part for pair in values for part in pair])
    assert found.keys() <= set(bits.values())


class OneLog:
    """Answers as the script that reads logs does."""

    def __init__(self, *entries: bytes) -> None:
        self._entries = entries

    async def run(self, *_: Any, **__: Any) -> list[Any]:
        head = [b"router", encode(Position(1, b"m")), b"", encode(STATUS)]
        return [0, [b"1", 0, 1, *head, list(self._entries)]]


CHANGES = (TierChange("gpu", stored=KEYS), TierChange("cpu", removed=KEYS))


@fuzz(st.lists(packed(st.just(CHANGES)), max_size=4))
def test_logs(entries: list[bytes]) -> None:
    """What changed in a replica's blocks: the sane entries are applied, the rest is counted."""
    reader = LogReader()
    part = asyncio.run(read_logs(OneLog(*entries), {X: reader}))[X]  # type: ignore[arg-type]
    reader.begin(part)
    for entry in part.entries:
        reader.apply(entry)
    assert reader.num_read == len(entries)
    assert 0 <= part.num_garbage <= len(entries)
    assert all(num > 0 for copies in reader.blocks.copies.values() for num in copies.values())


def test_the_samples_are_sane() -> None:
    """What is twisted above decodes when it is not."""
    assert decode_status(encode(STATUS)) == STATUS
    assert a_node().peers.notes.decode(encode(NOTES)) == NOTES
    (part,) = asyncio.run(read_logs(OneLog(encode(CHANGES)), {X: LogReader()})).values()  # type: ignore[arg-type]
    assert part.entries == [CHANGES]
