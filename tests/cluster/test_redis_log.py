"""router.cluster.redis_log: deltas in pieces, entries in order, what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cluster.redis_log import (
    MAX_KEYS,
    Cursor,
    Entry,
    NewEntries,
    calls,
    read_entries,
    read_heads,
    stream_entries,
)
from router.messages import Delta, Position, TierChange, encode
from tests.cluster.redis_stores import R1, R2, pack, stored

BEGIN = Cursor("incarnation", "origin", "0-0", 0, "0-0")
DELTA_WORD, PIECE_WORD = 12, 11


def entries_of(*deltas: Delta) -> list[Entry]:
    """Make log entries as the script does."""
    entries: list[Entry] = []
    for delta in deltas:
        for words in calls(delta, incarnation="i", router="r", log_entries=1000):
            number = len(entries) + 1
            blob, piece = words[DELTA_WORD], words[PIECE_WORD]
            assert isinstance(blob, bytes)
            fields = [b"n", str(number).encode(), b"d", blob]
            fields += [b"m", str(piece).encode()] if piece else []
            entries.append((f"{number}-0".encode(), fields))
    return entries


def read(log: Sequence[Entry], after: Cursor = BEGIN, work: Sequence[Entry] = ()) -> NewEntries:
    """Read as router `me`."""
    return read_entries(after, log, work, router="me")


def content(delta: Delta) -> dict[str, Any]:
    """Return what a delta says, however its changes are cut."""
    said: dict[str, Any] = {}
    for change in delta.changes:
        for kind in ("stored", "removed", "copies"):
            key = f"{change.tier} {kind}"
            said[key] = said.get(key, type(getattr(change, kind))()) + getattr(change, kind)
    return {key: value for key, value in said.items() if value}


@given(
    st.lists(
        st.builds(
            TierChange,
            st.sampled_from(["gpu", "cpu", "pool"]),
            st.integers(0, 2_500).map(lambda n: pack(range(n))),
            st.integers(0, 2_500).map(lambda n: pack(range(9_000, 9_000 + n))),
            st.integers(0, 1_500).map(lambda n: tuple((i, 2) for i in range(n))),
        ),
        max_size=3,
    ),
    st.booleans(),
    st.data(),
)
def test_a_delta_comes_back_whole_wherever_reading_was_interrupted(
    changes: list[TierChange], cleared: bool, data: st.DataObject
) -> None:
    """In pieces of bounded size, which no reader sees."""
    delta = Delta(R1, 7, cleared, tuple(changes), Position(3, b"m"))
    entries = entries_of(delta, stored(R2, 1, [1]))
    cut = data.draw(st.integers(0, len(entries)))

    first = read(entries[:cut])
    second = read(entries[cut:], first.cursor)

    whole, other = first.deltas + second.deltas
    assert content(whole) == content(delta)
    assert (whole.number, whole.cleared, whole.position) == (7, cleared, Position(3, b"m"))
    assert other.stream_id == R2
    assert second.cursor.pieces == {}
    assert second.cursor.log_number == len(entries)
    for words in calls(delta, incarnation="i", router="r", log_entries=1000):
        keys = sum(len(word) for word in words[DELTA_WORD + 1 :] if isinstance(word, bytes)) // 8
        assert keys <= MAX_KEYS


def test_pieces_whose_rest_never_came_are_forgotten() -> None:
    """The stream begins anew."""
    begun = entries_of(stored(R1, 1, range(2_500)))[:2]
    anew = entries_of(*[stored(R2, n, [n]) for n in (1, 2)], stored(R1, 1, [7], cleared=True))[2:]

    reading = read(begun + anew)

    assert [content(delta) for delta in reading.deltas] == [{"gpu stored": pack([7])}]
    assert reading.cursor.pieces == {}
    assert not reading.is_gap


@pytest.mark.parametrize(
    "fields",
    [
        [b"n", b"3", b"d", encode(stored(R1, 2, [2]))],
        [b"n", b"1", b"d", encode(stored(R1, 2, [2]))],
        [b"n", b"2", b"d", b"\xc1"],
        [b"n", b"2"],
        [b"n", b"2", b"d", encode(stored(R1, 2, [2])), b"m", b"x"],
    ],
)
def test_what_does_not_follow_is_a_gap(fields: list[bytes]) -> None:
    """What lies before it counts; the cursor stays there."""
    reading = read([*entries_of(stored(R1, 1, [1])), (b"9-0", fields)])

    assert reading.is_gap
    assert len(reading.deltas) == 1
    assert (reading.cursor.log_id, reading.cursor.log_number) == ("1-0", 1)


def test_entries_of_others_are_passed_over() -> None:
    """Counted, in either stream."""
    odd: Entry = (b"5-0", [b"hello", b"world"])
    reading = read([odd, *entries_of(stored(R1, 1, [1]))], work=[odd])

    assert (reading.num_garbage, reading.is_gap, len(reading.deltas)) == (2, False, 1)
    assert reading.cursor.work_id == "5-0"


def test_states_that_cannot_be_read_are_counted() -> None:
    """The others are there."""
    flat = [
        b"nr1",
        b"3",
        b"pr1",
        encode(Position(1, b"m")),
        b"nr2",
        b"x",
        b"nr3",
        b"1",
        b"sr3",
        b"x",
    ]
    heads, num_garbage = read_heads(flat)

    assert {stream_id: state.number for stream_id, state in heads.items()} == {"r1": 3}
    assert num_garbage == 2


def test_a_stream_is_picked_by_its_key() -> None:
    """Nothing in time is no entry; nor is one that was deleted under our eyes."""
    entry = [b"1-0", [b"n", b"1"]]

    assert stream_entries(None, "log") == []
    assert stream_entries([[b"work", [entry]]], "log") == []
    assert stream_entries([[b"log", [entry, [b"2-0", None]]]], "log") == [
        (b"1-0", [b"n", b"1"]),
        (b"2-0", []),
    ]
