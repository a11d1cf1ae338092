"""The kinds of notes: what is decoded of an entry, and who receives it."""

from __future__ import annotations

import msgspec
import pytest

from router.base.messages import (
    Alive,
    Began,
    Ended,
    Note,
    Notes,
    PoolChanged,
    StreamId,
    TierChange,
    encode,
)
from router.cluster.peers import NoteKinds
from tests.nodes import Node, chain_of

X = StreamId("http://x#0")
POOL_NOTE = PoolChanged(StreamId("pool/m"), TierChange("pool"))


def test_notes_come_back_by_their_tags() -> None:
    """Each kind of note is distinguished from the others."""
    kinds = NoteKinds()
    for kind in (Began, Ended, Alive):
        kinds.register(kind, lambda *_: None)
    notes = Notes("router-1", (Began(1, X, 10, 90, 0, True, b"", session_hash=5), Ended(1, True)))

    assert kinds.decode(encode(notes)) == notes
    assert kinds.num_garbage == 0


def test_a_note_of_an_older_release_is_read() -> None:
    """While routers are upgraded one by one: fields have their places, `num_held` among them."""
    kinds = NoteKinds()
    kinds.register(Began, lambda *_: None)
    sent = ["began", 1, X, 10, 90, 0, True, b"", 3, 5, b"", False, 0, False, True]

    (note,) = kinds.decode(encode(["router-1", [sent]])).notes

    assert isinstance(note, Began)
    assert (note.session_hash, note.is_visit, kinds.num_garbage) == (5, True, 0)


def test_an_unknown_note_costs_no_other() -> None:
    """A router that watches no sessions counts the load of one that does."""
    a, b = Node("a"), Node("b")
    a.begin("r1", chain_of(1, 2), 0.0)
    router, notes = msgspec.msgpack.decode(encode(a.take_notes()))
    b.peers.receive(encode([router, [["later", 1, {"a": [2]}], *notes, 7, ["began", "?"]]]), 0.0)

    assert b.load(0.0) == a.load(0.0)
    assert b.peers.notes.num_garbage == 3


@pytest.mark.parametrize("packed", [b"", b"\xc1", encode(7), encode(["r"]), encode([7, []])])
def test_what_is_no_entry_is_counted(packed: bytes) -> None:
    """Whatever else is under the key."""
    node = Node("a")
    node.peers.receive(packed, 0.0)

    assert node.peers.notes.num_garbage == 1
    assert node.peers.routers == ()


def test_our_own_notes_are_received_where_their_order_counts() -> None:
    """As those about the pool; of all others only other routers' are."""
    received: list[tuple[str, Note]] = []
    node = Node("me")
    for kind, with_own in ((PoolChanged, True), (Ended, False)):
        node.peers.notes.register(
            kind, lambda note, router, now_s: received.append((router, note)), with_own=with_own
        )
    for router in ("me", "other"):
        node.peers.receive(encode(Notes(router, (POOL_NOTE, Ended(1, True)))), 0.0)

    assert received == [("me", POOL_NOTE), ("other", POOL_NOTE), ("other", Ended(1, True))]
