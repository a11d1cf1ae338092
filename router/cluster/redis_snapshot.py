"""What Redis has of streams and pools: heads and logs of streams, the blocks of pools in slices.

A script packs ranges of buckets, so that one call takes a millisecond or two; numpy unpacks them.
Slices are of different moments. If Redis is emptied meanwhile, what was read is of no use.

A log has what changed in a replica's blocks, in order. The router that holds a stream's lease
appends what changed. Now and then it begins the log again with all blocks, which is another
*generation*. A reader goes on where it stopped, or begins again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from router.base.decoding import decoder
from router.base.errors import EMPTIED, StoreRefused, StoreUnavailable
from router.base.messages import (
    StreamHead,
    StreamId,
    TierChange,
    decode_position,
    decode_status,
)
from router.cluster.redis_connection import RedisConnection
from router.cluster.redis_scripts import BEGIN, LOG, SLICE, Scripts
from router.index.copies import StagedBlocks

Keys = NDArray[np.uint64]

NUM_BUCKETS: Final = 1 << 16
MAX_STREAMS: Final = 65_536

BLOCKS_A_CALL: Final = 2_000  # 1 ms of the server's time
_MAX_VALUES: Final = 65_536  # distinct ones that are remembered
_MAX_VALUE_BYTES: Final = 2 * MAX_STREAMS // 8  # a bit of each pool, and of dead ones


class PoolSnapshot:
    """An iterator over the blocks of some pools.

    Args:
        incarnation: Of the namespace when the snapshot began.
        bits: The pool of each bit.
    """

    __slots__ = ("_base", "_bits", "_connection", "_pools_of", "_scripts",
                 "incarnation", "num_garbage")  # fmt: skip

    def __init__(
        self,
        connection: RedisConnection,
        scripts: Scripts,
        base: str,
        *,
        incarnation: str,
        bits: Mapping[int, StreamId],
    ) -> None:
        self._connection = connection
        self._scripts = scripts
        self._base = base
        self._bits = bits
        self._pools_of: dict[bytes, tuple[StreamId, ...]] = {}
        self.incarnation = incarnation
        self.num_garbage = 0

    async def slices(self) -> AsyncIterator[dict[StreamId, Keys]]:
        """Yield keys by pool, shape (num_blocks,), each block of a pool once.

        Raises:
            StoreError: Redis failed or was emptied; what was yielded is of no use.
        """
        bucket = 0
        while bucket < NUM_BUCKETS:
            bucket, num_skipped, *packed = await self._scripts.run(SLICE, bucket, BLOCKS_A_CALL)
            self.num_garbage += num_skipped
            keys = self.unpacked(packed)
            if keys:
                yield keys
        await self._check_incarnation()

    async def _check_incarnation(self) -> None:
        (found,) = await self._connection.ask("HMGET", f"{self._base}meta", "incarnation")
        if (found or b"") != self.incarnation.encode():
            raise StoreUnavailable(EMPTIED)

    def unpacked(self, packed: Sequence[bytes]) -> dict[StreamId, Keys]:
        parts: dict[StreamId, list[Keys]] = {}
        for value, keys in zip(packed[::2], packed[1::2], strict=True):
            holders = self._pools_of.get(value)
            if holders is None:
                if len(self._pools_of) >= _MAX_VALUES:
                    self._pools_of.clear()
                holders = self._pools_of[value] = self._pools(value)
            if holders:
                array = np.frombuffer(keys, dtype="<u8")
                for holder in holders:
                    parts.setdefault(holder, []).append(array)
        return {
            holder: arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            for holder, arrays in parts.items()
        }

    def _pools(self, value: bytes) -> tuple[StreamId, ...]:
        """Name the pools whose bits are set; dead bits have no name."""
        if len(value) > _MAX_VALUE_BYTES:
            self.num_garbage += 1
            return ()
        return tuple(
            self._bits[bit]
            for i, byte in enumerate(value)
            for bit in range(8 * i, 8 * i + 8)
            if byte >> (bit & 7) & 1 and bit in self._bits
        )


async def begin_snapshot(
    connection: RedisConnection, scripts: Scripts, base: str, wanted: Collection[StreamId]
) -> PoolSnapshot:
    """Read which bits belong to the `wanted` pools."""
    incarnation, holders = await scripts.run(BEGIN)
    try:
        name = incarnation.decode()
    except ValueError as exc:
        raise StoreRefused(f"what lies under {base}meta is not ours") from exc
    bits, num_odd = named_bits(holders)
    snapshot = PoolSnapshot(
        connection,
        scripts,
        base,
        incarnation=name,
        bits={bit: stream_id for bit, stream_id in bits.items() if stream_id in wanted},
    )
    snapshot.num_garbage = num_odd
    return snapshot


def read_heads(flat: Sequence[bytes]) -> tuple[dict[StreamId, StreamHead], int]:
    """Read the heads of all streams, and count the entries that are none."""
    heads: dict[StreamId, StreamHead] = {}
    fields = dict(zip(flat[::2], flat[1::2], strict=False))
    num_garbage = 0
    for name, writer in fields.items():
        if not name.startswith(b"w"):
            continue
        parts = [fields.get(letter + name[1:], b"") for letter in (b"p", b"t", b"s")]
        try:
            if len(heads) >= MAX_STREAMS:
                raise ValueError("too many streams")
            head = head_of(writer, *parts)
            if head is not None:
                heads[StreamId(name[1:].decode())] = head
        except ValueError:
            num_garbage += 1
    return heads, num_garbage


def head_of(writer: bytes, position: bytes, newest: bytes, status: bytes) -> StreamHead | None:
    """Read the head of a stream; None: it has none.

    Raises:
        ValueError: it is malformed.
    """
    if not writer:
        return None
    return StreamHead(
        position=decode_position(position) if position else None,
        newest=decode_position(newest) if newest else None,
        status=decode_status(status) if status else None,
        writer=writer.decode(),
    )


def named_bits(flat: Sequence[bytes]) -> tuple[dict[int, StreamId], int]:
    """Read who each bit belongs to; fields that are names lead the other way."""
    bits: dict[int, StreamId] = {}
    num_garbage = 0
    for field, value in zip(flat[::2], flat[1::2], strict=False):
        if not _is_number(field) or not value:
            continue
        tier, _, stream_id = value.decode(errors="replace").partition(" ")
        if tier == "pool" and stream_id:
            bits[int(field)] = StreamId(stream_id)
        else:
            num_garbage += 1
    return bits, num_garbage


def _is_number(text: bytes) -> bool:
    """Return whether this is a plain number of a size that ours have."""
    return len(text) <= 18 and text.isdigit()


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
