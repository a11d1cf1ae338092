"""All that Redis knows of blocks, in slices: what a router begins with, or begins again.

Packed by a script over ranges of buckets, so that one call takes a millisecond or two and others
are served in between; unpacked by numpy. Slices are of different moments. That does no harm, for
the log is followed from a cursor taken before the first of them, and what it says is absolute.
But where Redis is emptied on the way, what is there already is a torn part of the old index: with
the position that the whole had it would count, and no delta would bring the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Final, get_args

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from router.cluster.redis_connection import RedisConnection
from router.cluster.redis_log import MAX_STREAMS, Cursor, is_number, read_heads
from router.cluster.redis_scripts import BEGIN, SLICE, Scripts
from router.contracts import BlockKey
from router.errors import EMPTIED, StoreRefused, StoreUnavailable
from router.messages import SharedTier, StreamHead, StreamId, unpack_keys

Holder = tuple[StreamId, SharedTier]
Keys = NDArray[np.uint64]

NUM_BUCKETS: Final = 1 << 16

_BLOCKS_A_CALL: Final = 2_000  # 1 ms of the server's time
_COPIES_A_CALL: Final = 1_000
_MAX_VALUES: Final = 65_536  # distinct ones that are remembered
_MAX_VALUE_BYTES: Final = 2 * MAX_STREAMS // 8  # a bit of each holder: two tiers a stream
_TIERS: Final = frozenset(get_args(SharedTier))


class IndexSnapshot:
    """What a snapshot begins with; `slices` and `copies` bring the blocks.

    `cursor`: follow the log from here. `heads`: of each stream, no later than the blocks.
    """

    __slots__ = ("_base", "_bits", "_connection", "_holders_of", "_scripts", "cursor", "heads",
                 "num_garbage")  # fmt: skip

    def __init__(
        self,
        connection: RedisConnection,
        scripts: Scripts,
        base: str,
        cursor: Cursor,
        heads: Mapping[StreamId, StreamHead],
        bits: Mapping[int, Holder],
    ) -> None:
        self._connection = connection
        self._scripts = scripts
        self._base = base
        self._bits = bits
        self._holders_of: dict[bytes, tuple[Holder, ...]] = {}
        self.cursor = cursor
        self.heads = heads
        self.num_garbage = 0

    async def slices(self) -> AsyncIterator[dict[Holder, Keys]]:
        """Yield keys by holder, shape (num_blocks,), each block of a holder once.

        Raises:
            StoreError: Redis failed or was emptied; what was yielded is of no use.
        """
        bucket = 0
        while bucket < NUM_BUCKETS:
            bucket, num_skipped, *packed = await self._scripts.run(SLICE, bucket, _BLOCKS_A_CALL)
            self.num_garbage += num_skipped
            keys = self._unpacked(packed)
            if keys:
                yield keys
        await self._still_there()

    async def copies(self) -> dict[Holder, dict[BlockKey, int]]:
        """Read which blocks are held in more than one copy, and in how many.

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
                    if len(key) == 8 and is_number(count) and int(count) > 0:
                        copies.setdefault(holder, {})[BlockKey(unpack_keys(key)[0])] = int(count)
                    else:
                        self.num_garbage += 1
                if position == b"0":
                    break
        await self._still_there()
        return copies

    async def _still_there(self) -> None:
        (found,) = await self._connection.ask("HMGET", f"{self._base}meta", "incarnation")
        if (found or b"") != self.cursor.incarnation.encode():
            raise StoreUnavailable(EMPTIED)

    def _unpacked(self, packed: Sequence[bytes]) -> dict[Holder, Keys]:
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
        """Name the holders whose bits are set; bits of the dead have no name."""
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
    connection: RedisConnection,
    scripts: Scripts,
    base: str,
    wanted: Collection[StreamId] | None,
) -> IndexSnapshot:
    """Read cursor, heads and holders, all of one moment; of `wanted` streams or of all."""
    replies = await scripts.run_all(BEGIN, [()])
    (value,) = replies.values
    if isinstance(value, Exception):
        raise await connection.refusal(value)
    incarnation, log_number, log_id, work_id, holders, flat_heads, led = value
    try:
        cursor = Cursor(
            incarnation=incarnation.decode(),
            origin=replies.origin,
            log_id=log_id.decode(),
            log_number=int(log_number),
            work_id=work_id.decode(),
        )
    except ValueError as exc:
        raise StoreRefused(f"what lies under {base}meta is not ours") from exc
    heads, num_garbage = read_heads(flat_heads)
    bits, num_odd = _named_bits(holders)
    heads = {
        stream_id: replace(head, has_leader=stream_id.encode() in led)
        for stream_id, head in heads.items()
        if wanted is None or stream_id in wanted
    }
    if wanted is not None:
        bits = {bit: holder for bit, holder in bits.items() if holder[0] in wanted}
    snapshot = IndexSnapshot(connection, scripts, base, cursor, heads, bits)
    snapshot.num_garbage = num_garbage + num_odd
    return snapshot


def _named_bits(flat: Sequence[bytes]) -> tuple[dict[int, Holder], int]:
    """Read who each bit belongs to; fields that are names lead the other way."""
    bits: dict[int, Holder] = {}
    num_garbage = 0
    for field, value in zip(flat[::2], flat[1::2], strict=False):
        if not is_number(field) or not value:
            continue
        tier: Any
        tier, _, stream_id = value.decode(errors="replace").partition(" ")
        if tier in _TIERS and stream_id:
            bits[int(field)] = StreamId(stream_id), tier
        else:
            num_garbage += 1
    return bits, num_garbage
