"""Streams' logs in Redis, as they are read: what changed in each replica's blocks, in order.

The router that holds a stream's lease appends what changed. Now and then it begins the log again
with all blocks, which is another *generation*. A reader goes on where it stopped, or begins again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from router.base.decoding import decoder
from router.base.errors import StoreRefused
from router.base.messages import StreamHead, StreamId, TierChange
from router.cluster.redis_scripts import LOG, Scripts
from router.cluster.redis_snapshot import head_of
from router.index.staged_blocks import StagedBlocks

BYTES_A_CALL: Final = 256 * 1024  # a fraction of a millisecond of the server's time

_decode_changes = decoder(tuple[TierChange, ...], "msgpack")


class LogPart(Struct, frozen=True, kw_only=True):
    """A part of a stream's log.

    head: Of the stream, at the moment of reading; None: Redis has nothing of it.
    generation: Of the log.
    first: The number of the first entry.
    entries: Changes; of an entry that is malformed, none.
    is_end: Nothing follows: the blocks are those of `head`.
    """

    head: StreamHead | None
    generation: bytes
    first: int
    entries: list[tuple[TierChange, ...]]
    num_garbage: int
    is_end: bool


class LogReader:
    """The blocks of one stream, read from its log."""

    __slots__ = ("blocks", "generation", "num_keys", "num_read")

    def __init__(self) -> None:
        self.blocks = StagedBlocks()
        self.generation = b""
        self.num_read = 0  # entries
        self.num_keys = 0  # in these, with repetitions

    def begin(self, part: LogPart) -> None:
        """Prepare for a part; one of another generation begins again."""
        if part.generation != self.generation or part.first != self.num_read:
            self.blocks = StagedBlocks()
            self.generation = part.generation
            self.num_read = self.num_keys = 0

    def apply(self, entry: tuple[TierChange, ...]) -> None:
        """Apply the next entry of the part that was begun."""
        self.num_read += 1
        for change in entry:
            self.num_keys += self.blocks.apply(change)


async def read_logs(
    store: Scripts, readers: Mapping[StreamId, LogReader], *, timeout_s: float | None = None
) -> dict[StreamId, LogPart]:
    """Read on in some streams' logs, in one round trip; those without room in the answer later.

    Raises:
        StoreError: see `Scripts.run`.
    """
    words = [
        word
        for stream_id, reader in readers.items()
        for word in (stream_id, reader.generation, reader.num_read)
    ]
    _, *found = await store.run(LOG, BYTES_A_CALL, *words, timeout_s=timeout_s)
    parts: dict[StreamId, LogPart] = {}
    try:
        for stream_id, (generation, first, is_end, *head, entries) in zip(
            readers, found, strict=True
        ):
            changes = [_decoded(entry) for entry in entries]
            parts[stream_id] = LogPart(
                head=_head(head),
                generation=generation,
                first=int(first),
                entries=changes,
                num_garbage=changes.count(()),
                is_end=bool(is_end),
            )
    except (TypeError, ValueError) as exc:
        raise StoreRefused("what answers there does not answer as Redis does") from exc
    return parts


def _decoded(entry: bytes) -> tuple[TierChange, ...]:
    try:
        changes = _decode_changes(entry)
    except ValueError:
        return ()
    is_sound = all(
        change.tier != "pool" and not (len(change.stored) | len(change.removed)) % 8
        for change in changes
    )
    return changes if is_sound else ()


def _head(fields: Sequence[bytes]) -> StreamHead | None:
    try:
        return head_of(*fields)
    except ValueError:
        return None
