"""Deltas and notes as entries of Redis streams: cut into pieces, packed for a script, read back.

What must live here: how an entry looks, what proves that none is missing. What must not: sockets.

    log   n  number of the entry, one after the other     d  a Delta     m  "2/5": its second piece
    work  r  the router                                    d  its Notes

A delta is one call of a script and no other router is served meanwhile (1.7 us a block), so a large
one goes in pieces. Its stream's head counts them ("41+2"), and none is applied before the last one
is there: half a delta belongs to no position in the engine's stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import Struct

from router.cluster.redis_connection import Word
from router.messages import (
    Delta,
    Notes,
    StreamHead,
    StreamId,
    TierChange,
    decode_delta,
    decode_notes,
    decode_position,
    decode_status,
    encode,
    pack_keys,
)

MAX_KEYS: Final = 1_000
"""In one call."""

KEEP_MS: Final = 60_000
"""A router further behind loads a snapshot, which takes a second or two."""

MAX_STREAMS: Final = 65_536

_MAX_PIECES: Final = 4_096  # of a delta, and of deltas whose rest is still to come
_KEY_BYTES: Final = 8

Entry = tuple[bytes, list[bytes]]
"""An id, and names and values by turns."""


class Cursor(Struct, frozen=True):
    """How far both streams were read, and of which life of which Redis."""

    incarnation: str  # another one: Redis was emptied
    origin: str  # another one: it restarted or failed over, its last writes may be gone
    log_id: str
    log_number: int
    work_id: str
    pieces: dict[StreamId, Delta] = {}  # whose rest is still to come


class NewEntries(Struct, frozen=True):
    """What came since a cursor.

    After a gap the cursor is of no use: load a snapshot. What is here is in order and complete up
    to the gap. Notes of the reading router itself are left out.
    """

    deltas: list[Delta]
    notes: list[Notes]
    cursor: Cursor
    is_gap: bool
    num_garbage: int = 0  # entries that are not ours, or not readable


# -- writing -------------------------------------------------------------------------------------


def calls(
    delta: Delta, *, incarnation: str, router: str, log_entries: int
) -> Iterator[tuple[Word, ...]]:
    """Yield the arguments of the script calls that write one delta."""
    parts = list(_pieces(delta))
    counts = delta.number > 0
    before = str(delta.number - 1)
    for i, part in enumerate(parts):
        is_last = i == len(parts) - 1
        expected = before if i == 0 else f"{before}+{i}"
        reached = str(delta.number) if is_last else f"{before}+{i + 1}"
        yield (
            incarnation,
            router,
            delta.stream_id,
            expected if counts else "",
            reached if counts else "",
            "1" if part.cleared else "0",
            delta.pool or delta.stream_id,
            _position(part),
            encode(part.status) if part.status is not None else b"",
            log_entries,
            KEEP_MS,
            f"{i + 1}/{len(parts)}" if counts and len(parts) > 1 else "",
            encode(part),
            *(word for change in part.changes for word in _words(change)),
        )


def _position(part: Delta) -> bytes:
    """Write a position; "" leaves what is there, "-" takes it away."""
    if part.continues:
        return b"-"
    return encode(part.position) if part.position is not None else b""


def _words(change: TierChange) -> tuple[Word, ...]:
    copied = pack_keys(key for key, _ in change.copies)
    counts = ",".join(str(num) for _, num in change.copies)
    return change.tier, change.stored, change.removed, copied, counts


def _pieces(delta: Delta) -> Iterator[Delta]:
    """Cut a delta: the first piece clears, the last one moves its stream on."""
    if sum(_num_keys(change) for change in delta.changes) <= MAX_KEYS:
        yield delta
        return
    changes = [part for change in delta.changes for part in _cut(change)]
    last = len(changes) - 1
    for i, change in enumerate(changes):
        yield Delta(
            stream_id=delta.stream_id,
            number=delta.number,
            cleared=delta.cleared and i == 0,
            changes=(change,),
            position=delta.position if i == last else None,
            status=delta.status if i == last else None,
            pool=delta.pool,
            continues=delta.continues and i == last,
        )


def _num_keys(change: TierChange) -> int:
    return (len(change.stored) + len(change.removed)) // _KEY_BYTES + len(change.copies)


def _cut(change: TierChange) -> Iterator[TierChange]:
    size = MAX_KEYS * _KEY_BYTES
    for at in range(0, len(change.removed), size):
        yield TierChange(change.tier, removed=change.removed[at : at + size])
    for at in range(0, len(change.stored), size):
        yield TierChange(change.tier, stored=change.stored[at : at + size])
    for at in range(0, len(change.copies), MAX_KEYS):
        yield TierChange(change.tier, copies=change.copies[at : at + MAX_KEYS])


# -- reading -------------------------------------------------------------------------------------


def read_entries(
    after: Cursor, log: Sequence[Entry], work: Sequence[Entry], *, router: str
) -> NewEntries:
    """Read what lies behind a cursor, up to where something proves to be missing."""
    deltas: list[Delta] = []
    pieces = dict(after.pieces)
    log_id, log_number = after.log_id, after.log_number
    num_garbage, is_gap = 0, False
    for id_, fields in log:
        entry = _fields(fields)
        number = entry.get(b"n", b"")
        if not is_number(number):
            num_garbage += 1  # not ours: numbers go on behind it
            log_id = id_.decode()
            continue
        try:
            if int(number) != log_number + 1:
                raise ValueError("an entry is missing")
            delta = _joined(pieces, decode_delta(entry[b"d"]), entry.get(b"m"))
        except (ValueError, KeyError):
            is_gap = True
            break
        log_id, log_number = id_.decode(), log_number + 1
        if delta is not None:
            deltas.append(delta)
    notes, num_odd = _notes(work, router)
    return NewEntries(
        deltas=deltas,
        notes=notes,
        cursor=Cursor(
            incarnation=after.incarnation,
            origin=after.origin,
            log_id=log_id,
            log_number=log_number,
            work_id=work[-1][0].decode() if work else after.work_id,
            pieces=pieces,
        ),
        is_gap=is_gap,
        num_garbage=num_garbage + num_odd,
    )


def _joined(pieces: dict[StreamId, Delta], part: Delta, which: bytes | None) -> Delta | None:
    """Put a piece to those before it; None: the last one is still to come."""
    before = pieces.pop(part.stream_id, None) if part.number > 0 else None
    if which is None:
        return part
    number, num_pieces = (int(text) for text in which.split(b"/") if is_number(text))
    if num_pieces > _MAX_PIECES or len(pieces) >= _MAX_PIECES:
        raise ValueError("a delta of too many pieces")
    if number > 1 and before is not None:
        part = Delta(
            stream_id=part.stream_id,
            number=part.number,
            cleared=before.cleared,
            changes=before.changes + part.changes,
            position=part.position,
            status=part.status,
            pool=part.pool,
            continues=part.continues,
        )
    if number < num_pieces:
        pieces[part.stream_id] = part
        return None
    return part


def _notes(work: Sequence[Entry], router: str) -> tuple[list[Notes], int]:
    notes: list[Notes] = []
    num_garbage = 0
    own = router.encode()
    for _, fields in work:
        entry = _fields(fields)
        if entry.get(b"r") == own:
            continue
        try:
            notes.append(decode_notes(entry[b"d"]))
        except (ValueError, KeyError):
            num_garbage += 1
    return notes, num_garbage


def _fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=False))


def read_heads(flat: Sequence[bytes]) -> tuple[dict[StreamId, StreamHead], int]:
    """Read the heads of all streams, and count what is none.

    A stream in the middle of a delta has no position: what is there belongs to none.
    """
    heads: dict[StreamId, StreamHead] = {}
    fields = _fields(flat)
    num_garbage = 0
    for name, value in fields.items():
        if not name.startswith(b"n"):
            continue
        stream_id = name[1:]
        number, plus, _ = value.partition(b"+")
        position, status = fields.get(b"p" + stream_id), fields.get(b"s" + stream_id)
        try:
            if not is_number(number) or len(heads) >= MAX_STREAMS:
                raise ValueError("no number, or too many streams")
            heads[StreamId(stream_id.decode())] = StreamHead(
                number=int(number),
                position=decode_position(position) if position and not plus else None,
                status=decode_status(status) if status else None,
            )
        except ValueError:
            num_garbage += 1
    return heads, num_garbage


def is_number(text: bytes) -> bool:
    """Return whether this is a plain number of a size that ours have."""
    return len(text) <= 18 and text.isdigit()


def stream_entries(reply: Any, key: str) -> list[Entry]:
    """Pick one stream out of what XREAD gave; None stands for nothing in time."""
    for name, entries in reply or ():
        if name.decode() == key:
            return [(id_, fields or []) for id_, fields in entries]
    return []
