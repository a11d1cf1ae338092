"""Deltas as calls of the scripts that write them.

What became of a replica's blocks is one entry of its stream's log. What was learned of a pool is
written block by block, because every router writes it. Redis serves no other client during that
(1.7 us a block), so a large delta of a pool is written in parts, removals first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from router.base.messages import Delta, encode
from router.cluster.redis_connection import Word

MAX_KEYS: Final = 1_000
"""Keys of a pool in one call."""

_KEY_BYTES: Final = 8


def append_words(delta: Delta, *, incarnation: str, router: str) -> tuple[Word, ...]:
    """Return the arguments of the call that appends a delta to its stream's log.

    Args:
        delta: The changes to write.
        incarnation: Of the namespace that they belong to.
        router: The writer, which must hold the stream's lease.
    """
    return (
        incarnation,
        router,
        delta.stream_id,
        int(delta.cleared),
        encode(delta.position) if delta.position is not None else b"",
        encode(delta.newest) if delta.newest is not None else b"",
        encode(delta.status) if delta.status is not None else b"",
        int(any(change.stored or change.copies for change in delta.changes)),
        encode(delta.changes) if delta.changes else b"",
    )


def pool_calls(delta: Delta, *, incarnation: str) -> Iterator[tuple[Word, ...]]:
    """Yield the arguments of each call that writes a delta of a pool; see lua/write.lua."""
    size = MAX_KEYS * _KEY_BYTES
    removed = b"".join(change.removed for change in delta.changes)
    stored = b"".join(change.stored for change in delta.changes)
    parts: list[tuple[bytes, bytes]] = []
    parts += [(b"", removed[at : at + size]) for at in range(0, len(removed), size)]
    parts += [(stored[at : at + size], b"") for at in range(0, len(stored), size)]
    for number, (some_stored, some_removed) in enumerate(parts or [(b"", b"")]):
        is_cleared = int(delta.cleared and not number)
        yield incarnation, delta.stream_id, is_cleared, some_stored, some_removed
