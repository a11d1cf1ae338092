"""Deltas as calls of the script that writes them.

Redis serves no other client during a script (1.7 us a block), so a large delta is written in parts.
Removals come first, and the position comes with the last part. A reader may come in between, and
find blocks newer than the position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from router.base.messages import Delta, TierChange, encode, pack_keys
from router.cluster.redis_connection import Word

MAX_KEYS: Final = 1_000
"""Keys in one call."""

_KEY_BYTES: Final = 8


def calls(
    delta: Delta, *, incarnation: str, router: str, is_fenced: bool
) -> Iterator[tuple[Word, ...]]:
    """Yield the arguments of each call; see lua/write.lua.

    Args:
        delta: The changes to write.
        incarnation: Of the namespace that they belong to.
        router: The writer.
        is_fenced: Whether the router must hold the stream's lease.
    """
    parts = list(_parts(delta))
    for number, changes in enumerate(parts, 1):
        is_last = number == len(parts)
        yield (
            incarnation,
            router,
            delta.stream_id,
            int(is_fenced),
            int(delta.cleared and number == 1),
            encode(delta.position) if is_last and delta.position is not None else b"",
            encode(delta.newest) if delta.newest is not None else b"",
            encode(delta.status) if is_last and delta.status is not None else b"",
            *(word for change in changes for word in _words(change)),
        )


def _parts(delta: Delta) -> list[tuple[TierChange, ...]]:
    changes = delta.changes
    if sum(_num_keys(change) for change in changes) <= MAX_KEYS:
        return [changes]
    removed = [(part,) for change in changes for part in _cut_removed(change)]
    stored = [(part,) for change in changes for part in _cut_stored(change)]
    return [*removed, *stored]


def _num_keys(change: TierChange) -> int:
    return (len(change.stored) + len(change.removed)) // _KEY_BYTES + len(change.copies)


def _cut_removed(change: TierChange) -> Iterator[TierChange]:
    size = MAX_KEYS * _KEY_BYTES
    for at in range(0, len(change.removed), size):
        yield TierChange(change.tier, removed=change.removed[at : at + size])


def _cut_stored(change: TierChange) -> Iterator[TierChange]:
    size = MAX_KEYS * _KEY_BYTES
    for at in range(0, len(change.stored), size):
        yield TierChange(change.tier, stored=change.stored[at : at + size])
    for at in range(0, len(change.copies), MAX_KEYS):
        yield TierChange(change.tier, copies=change.copies[at : at + MAX_KEYS])


def _words(change: TierChange) -> tuple[Word, ...]:
    copied = pack_keys(key for key, _ in change.copies)
    counts = ",".join(str(num) for _, num in change.copies)
    return change.tier, change.stored, change.removed, copied, counts
