"""All blocks that Redis knows of some streams, in slices: what a router starts with.

A script packs ranges of buckets, so that one call takes a millisecond or two; numpy unpacks them.
Slices are of different moments, so a stream's blocks may be newer than the position that was read
first. If Redis is emptied meanwhile, the blocks read so far are of no use.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

from router.base.contracts import BlockKey
from router.base.errors import EMPTIED, StoreRefused, StoreUnavailable
from router.base.messages import (
    SharedTier,
    StreamHead,
    StreamId,
    decode_position,
    decode_status,
    unpack_keys,
)
from router.cluster.redis_connection import RedisConnection
from router.cluster.redis_scripts import BEGIN, SLICE, Scripts

Holder = tuple[StreamId, SharedTier]
Keys = NDArray[np.uint64]

NUM_BUCKETS: Final = 1 << 16
MAX_STREAMS: Final = 65_536

BLOCKS_A_CALL: Final = 2_000  # 1 ms of the server's time
_COPIES_A_CALL: Final = 1_000
_MAX_VALUES: Final = 65_536  # distinct ones that are remembered
_MAX_VALUE_BYTES: Final = 2 * MAX_STREAMS // 8  # a bit of each holder: two tiers a stream
_TIERS: Final = frozenset(get_args(SharedTier))


class IndexSnapshot:
    """The heads of the wanted streams, and an iterator over their blocks.

    Args:
        incarnation: Of the namespace when the snapshot began.
        work_id: The last note at that moment.
        heads: Of each stream, no later than its blocks.
        bits: The holders of each bit.
    """

    __slots__ = ("_base", "_bits", "_connection", "_holders_of", "_scripts", "heads",
                 "incarnation", "num_garbage", "work_id")  # fmt: skip

    def __init__(
        self,
        connection: RedisConnection,
        scripts: Scripts,
        base: str,
        *,
        incarnation: str,
        work_id: str,
        heads: Mapping[StreamId, StreamHead],
        bits: Mapping[int, Holder],
    ) -> None:
        self._connection = connection
        self._scripts = scripts
        self._base = base
        self._bits = bits
        self._holders_of: dict[bytes, tuple[Holder, ...]] = {}
        self.incarnation = incarnation
        self.work_id = work_id
        self.heads = heads
        self.num_garbage = 0

    async def slices(self) -> AsyncIterator[dict[Holder, Keys]]:
        """Yield keys by holder, shape (num_blocks,), each block of a holder once.

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

    async def copies(self) -> dict[Holder, dict[BlockKey, int]]:
        """Read which blocks are held in several copies, and in how many.

        Raises:
            StoreError: Redis failed or was emptied.
        """
        copies: dict[Holder, dict[BlockKey, int]] = {}
        for bit, holder in self._bits.items():
            position = b"0"
            while True:
                position, flat = await self._connection.ask(
                    "HSCAN", f"{self._base}copies:{bit}", position, "COUNT", _COPIES_A_CALL
                )
                for key, count in zip(flat[::2], flat[1::2], strict=True):
                    if len(key) == 8 and _is_number(count) and int(count) > 0:
                        copies.setdefault(holder, {})[BlockKey(unpack_keys(key)[0])] = int(count)
                    else:
                        self.num_garbage += 1
                if position == b"0":
                    break
        await self._check_incarnation()
        return copies

    async def _check_incarnation(self) -> None:
        (found,) = await self._connection.ask("HMGET", f"{self._base}meta", "incarnation")
        if (found or b"") != self.incarnation.encode():
            raise StoreUnavailable(EMPTIED)

    def unpacked(self, packed: Sequence[bytes]) -> dict[Holder, Keys]:
        parts: dict[Holder, list[Keys]] = {}
        for value, keys in zip(packed[::2], packed[1::2], strict=True):
            holders = self._holders_of.get(value)
            if holders is None:
                if len(self._holders_of) >= _MAX_VALUES:
                    self._holders_of.clear()
                holders = self._holders_of[value] = self._holders(value)
            if holders:
                array = np.frombuffer(keys, dtype="<u8")
                for holder in holders:
                    parts.setdefault(holder, []).append(array)
        return {
            holder: arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            for holder, arrays in parts.items()
        }

    def _holders(self, value: bytes) -> tuple[Holder, ...]:
        """Name the holders whose bits are set; dead bits have no name."""
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
) -> IndexSnapshot:
    """Read heads and holders, all of one moment, of the `wanted` streams."""
    incarnation, work_id, holders, flat_heads = await scripts.run(BEGIN)
    try:
        names = incarnation.decode(), work_id.decode()
    except ValueError as exc:
        raise StoreRefused(f"what lies under {base}meta is not ours") from exc
    heads, num_garbage = read_heads(flat_heads)
    bits, num_odd = named_bits(holders)
    snapshot = IndexSnapshot(
        connection,
        scripts,
        base,
        incarnation=names[0],
        work_id=names[1],
        heads={stream_id: head for stream_id, head in heads.items() if stream_id in wanted},
        bits={bit: holder for bit, holder in bits.items() if holder[0] in wanted},
    )
    snapshot.num_garbage = num_garbage + num_odd
    return snapshot


def read_heads(flat: Sequence[bytes]) -> tuple[dict[StreamId, StreamHead], int]:
    """Read the heads of all streams, and count the entries that are none."""
    heads: dict[StreamId, StreamHead] = {}
    fields = dict(zip(flat[::2], flat[1::2], strict=False))
    num_garbage = 0
    for name, writer in fields.items():
        if not name.startswith(b"w"):
            continue
        position, newest, status = (fields.get(letter + name[1:]) for letter in (b"p", b"t", b"s"))
        try:
            if len(heads) >= MAX_STREAMS:
                raise ValueError("too many streams")
            heads[StreamId(name[1:].decode())] = StreamHead(
                position=decode_position(position) if position else None,
                newest=decode_position(newest) if newest else None,
                status=decode_status(status) if status else None,
                writer=writer.decode(),
            )
        except ValueError:
            num_garbage += 1
    return heads, num_garbage


def named_bits(flat: Sequence[bytes]) -> tuple[dict[int, Holder], int]:
    """Read who each bit belongs to; fields that are names lead the other way."""
    bits: dict[int, Holder] = {}
    num_garbage = 0
    for field, value in zip(flat[::2], flat[1::2], strict=False):
        if not _is_number(field) or not value:
            continue
        tier: Any
        tier, _, stream_id = value.decode(errors="replace").partition(" ")
        if tier in _TIERS and stream_id:
            bits[int(field)] = StreamId(stream_id), tier
        else:
            num_garbage += 1
    return bits, num_garbage


def _is_number(text: bytes) -> bool:
    """Return whether this is a plain number of a size that ours have."""
    return len(text) <= 18 and text.isdigit()
