"""What several routers share, in Redis: blocks and who holds them, leases, load, sessions.

All keys begin with `{wr:NAMESPACE}:` and so lie in one slot of a Cluster.

    meta          hash     schema, incarnation, how many entries the log has had
    b:XX          hash     65,536 buckets, by the low 2 bytes of a key: other 6 -> holders' bits
    holders       hash     bit -> "tier STREAM", empty: dead; and "tier STREAM" -> bit
    feeds         hash     heads of streams: nSTREAM number, pSTREAM position, sSTREAM status,
                           wSTREAM who wrote last, aSTREAM abandoned since
    copies:BIT    hash     8-byte key -> copies, where there are several
    log, work     streams  router.cluster.redis_log
    lease:STREAM  string   which router leads it; expires
    load:ROUTER   string   what it has in flight; expires
    routers       zset     which routers live, and until when
    sessions      hash     session -> when it is forgotten (4 bytes), state
    replicas      hash     name -> record
    experiments   hash     name -> state
    response:KEY  string   digest of a response's id -> the replica that issued it; expires
    sweeper       string   which router sweeps; expires

A bucket stays a listpack (a ziplist before Redis 7) up to 512 blocks with fewer than 512 holders'
bits: 33 million blocks at the servers' defaults, 19 bytes each; beyond that it works on, larger.

An epoch of a stream is a bit: to clear the stream is to call its bits dead and, when something is
stored again, to take others. `sweep` takes dead bits out of the buckets and frees them.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Final

import msgspec
from msgspec import Struct

from router.cluster import redis_scripts as scripts
from router.cluster.redis_connection import RedisConnection, Word
from router.cluster.redis_errors import is_out_of_memory
from router.cluster.redis_facts import StoreFacts, memory_of, other_schema
from router.cluster.redis_log import KEEP_MS, Cursor, NewEntries, calls, read_entries, read_heads
from router.cluster.redis_log import stream_entries as _entries
from router.cluster.redis_records import RedisRecords
from router.cluster.redis_scripts import Scripts
from router.cluster.redis_snapshot import IndexSnapshot, begin_snapshot
from router.cluster.redis_sweep import Swept, sweep
from router.config import RedisConfig
from router.errors import StoreRefused
from router.messages import (
    SCHEMA,
    Delta,
    Note,
    Notes,
    SharedTier,
    StreamHead,
    StreamId,
    encode,
    is_pool_stream,
)

_NOT_REDIS: Final = "what answers there does not answer as Redis does"

_PIPELINE_BYTES: Final = 256 * 1024
_READ_ENTRIES: Final = 256


class Written(Enum):
    """What became of a delta; after anything but OK the stream's later ones fail, too."""

    OK = "ok"
    FENCED = "fenced"  # the lease is not ours
    LOST = "lost"  # Redis lost the deltas before it, or another router wrote
    NO_ROOM = "no_room"  # Redis is full; what only removes is written all the same


class Beat(Struct, frozen=True):
    """What a heartbeat brought back."""

    incarnation: str
    log_number: int
    routers: frozenset[str]  # that live, this one included


class RedisStore:
    """The shared store of one namespace.

    Every call raises StoreUnavailable where Redis is gone, slow or failing over, and StoreRefused
    where it cannot be used as it is, with what to do about it; the next call tries again.

    Args:
        config: Where Redis is, and how long to wait.
        router: What this process is called, unique to it.
        password: None: none.
    """

    def __init__(self, config: RedisConfig, *, router: str, password: str | None) -> None:
        self._config = config
        self._router = router
        self._base = f"{{wr:{config.namespace}}}:"
        self._lease_ms = round(config.lease_s * 1000)
        meta = self._key("meta")
        self._connection = RedisConnection(config, key=meta, password=password)
        self._scripts = Scripts(self._connection, meta)
        self._incarnation = ""
        self._num_garbage = 0
        self.records = RedisRecords(
            self._connection,
            self._scripts,
            self._base,
            timeout_s=config.timeout_s,
        )

    @property
    def num_garbage(self) -> int:
        """Count the things under our keys that are not ours, and were skipped."""
        return self._num_garbage + self.records.num_garbage

    async def open(self) -> StoreFacts:
        """Connect, check whether this Redis can be used, and create the namespace if it is new."""
        try:
            await self._scripts.load()
            used_bytes, max_bytes, policy = await memory_of(self._connection)
            await self._look("", b"")
        except (TypeError, ValueError, AttributeError, LookupError) as exc:
            raise StoreRefused(_NOT_REDIS) from exc
        server = self._connection.server
        assert server is not None
        warnings: tuple[str, ...] = ()
        if max_bytes and policy.startswith("volatile"):
            warnings = (f"maxmemory-policy {policy} evicts leases: noeviction is better",)
        return StoreFacts(
            address=server.address,
            server=server.name,
            version=server.version,
            mode=server.mode,
            incarnation=self._incarnation,
            used_bytes=used_bytes,
            max_bytes=max_bytes,
            warnings=warnings,
        )

    async def close(self) -> None:
        """Cut the connections; what is ours in Redis expires."""
        await self._connection.close()

    # -- blocks ------------------------------------------------------------------------------

    async def write(self, deltas: Sequence[Delta]) -> list[Written]:
        """Write deltas in order, pipelined; each whole or not at all, as far as readers can see."""
        results = [Written.OK] * len(deltas)
        batch: list[tuple[Word, ...]] = []
        places: list[int] = []
        size = 0
        for i, delta in enumerate(deltas):
            for words in calls(
                delta,
                incarnation=self._incarnation,
                router=self._router,
                log_entries=self._config.log_entries,
            ):
                batch.append(words)
                places.append(i)
                size += sum(len(word) for word in words if isinstance(word, bytes))
                if size >= _PIPELINE_BYTES:
                    await self._write(batch, places, results)
                    batch, places, size = [], [], 0
        if batch:
            await self._write(batch, places, results)
        return results

    async def _write(
        self, batch: list[tuple[Word, ...]], places: list[int], results: list[Written]
    ) -> None:
        replies = await self._scripts.run_all(scripts.WRITE, batch)
        for i, value in zip(places, replies.values, strict=True):
            if isinstance(value, Exception) and not is_out_of_memory(value):
                raise await self._connection.refusal(value)
            if isinstance(value, Exception):
                result = Written.NO_ROOM
            else:
                result = _RESULTS[value[0]]
                self._num_garbage += value[1]
            if results[i] is Written.OK:
                results[i] = result

    async def read(self, after: Cursor, *, block_s: float) -> NewEntries:
        """Wait for entries of either stream behind a cursor, and read them."""
        log, work = self._key("log"), self._key("work")
        wait: tuple[Word, ...] = ("BLOCK", max(1, round(block_s * 1000))) if block_s > 0 else ()
        replies = await self._connection.ask_all(
            [
                ("XREAD", "COUNT", _READ_ENTRIES, *wait, "STREAMS", log, work, after.log_id,
                 after.work_id),
                ("HMGET", self._key("meta"), "incarnation", "log"),
            ],
            timeout_s=block_s + self._config.timeout_s,
        )  # fmt: skip
        for value in replies.values:
            if isinstance(value, Exception):
                raise await self._connection.refusal(value)
        found, (incarnation, log_number) = replies.values
        if replies.origin != after.origin or incarnation != after.incarnation.encode():
            return NewEntries([], [], after, is_gap=True)
        reading = read_entries(
            after, _entries(found, log), _entries(found, work), router=self._router
        )
        self._num_garbage += reading.num_garbage
        if int(log_number or 0) < reading.cursor.log_number:  # rolled back
            return msgspec.structs.replace(reading, is_gap=True)
        return reading

    async def heads(self) -> dict[StreamId, StreamHead]:
        """Read the head of every stream."""
        heads, num_garbage = read_heads(await self._connection.ask("HGETALL", self._key("feeds")))
        self._num_garbage += num_garbage
        return heads

    async def snapshot(self, stream_ids: Collection[StreamId] | None = None) -> IndexSnapshot:
        """Begin a snapshot of the given streams, or of all."""
        return await begin_snapshot(self._connection, self._scripts, self._base, stream_ids)

    async def lookup(
        self, chain: bytes, stream_ids: Sequence[StreamId]
    ) -> dict[tuple[StreamId, SharedTier], int]:
        """Count leading blocks of a packed chain per holder, in one round trip.

        Returns:
            For a replica's stream its blocks on gpu, and on gpu or cpu as tier cpu; for a pool's
            stream those in the pool.
        """
        asked: list[tuple[StreamId, SharedTier]] = []
        for stream_id in stream_ids:
            if is_pool_stream(stream_id):
                asked.append((stream_id, "pool"))
            else:
                asked += [(stream_id, "gpu"), (stream_id, "cpu")]
        words = [word for stream_id, tier in asked for word in (tier, stream_id)]
        counts = await self._scripts.run(
            scripts.LOOKUP, chain, *words, timeout_s=self._config.lookup_timeout_s
        )
        num_blocks = len(chain) // 8
        if not isinstance(counts, list) or len(counts) != len(asked):
            raise StoreRefused(_NOT_REDIS)
        if not all(isinstance(count, int) and 0 <= count <= num_blocks for count in counts):
            raise StoreRefused(_NOT_REDIS)
        return dict(zip(asked, counts, strict=True))

    # -- leases, load ------------------------------------------------------------------------

    async def hold(self, wanted: Sequence[StreamId]) -> frozenset[StreamId]:
        """Renew our leases among the wanted and take free ones; return those that are ours now."""
        held = await self._scripts.run(scripts.HOLD, self._router, self._lease_ms, *wanted)
        return frozenset(id_ for id_, is_ours in zip(wanted, held, strict=True) if is_ours)

    async def release(self, stream_ids: Iterable[StreamId]) -> None:
        """Give leases back."""
        await self._scripts.run(scripts.RELEASE, self._router, "0", *stream_ids)

    async def leave(self, stream_ids: Iterable[StreamId] = ()) -> None:
        """Give leases back and be no living router any more."""
        await self._scripts.run(scripts.RELEASE, self._router, "1", *stream_ids)

    async def publish(self, notes: Sequence[Note]) -> None:
        """Add notes to the work stream."""
        packed = encode(Notes(self._router, tuple(notes)))
        words = (self._router, packed, self._config.log_entries, KEEP_MS)
        await self._scripts.run(scripts.PUBLISH, *words)

    async def beat(self, load: bytes) -> Beat:
        """Send a heartbeat, with what this router has in flight."""
        return await self._look(self._router, load)

    async def _look(self, router: str, load: bytes) -> Beat:
        schema, incarnation, log_number, routers = await self._scripts.run(
            scripts.BEAT, SCHEMA, uuid.uuid4().hex, router, load, self._lease_ms
        )
        if schema != str(SCHEMA).encode():
            raise other_schema(schema, self._base, self._config.namespace)
        self._incarnation = incarnation.decode()
        return Beat(
            incarnation=self._incarnation,
            log_number=int(log_number),
            routers=frozenset(name.decode(errors="replace") for name in routers),
        )

    async def loads(self) -> dict[str, bytes]:
        """Read what the other living routers have in flight, packed."""
        flat = await self._scripts.run(scripts.LOADS)
        loads = {
            name.decode(errors="replace"): load
            for name, load in zip(flat[::2], flat[1::2], strict=True)
        }
        loads.pop(self._router, None)
        return loads

    # -- sweeping ----------------------------------------------------------------------------

    async def sweep(self, *, pause_s: float = 0.005, forget_after_s: float = 86_400.0) -> Swept:
        """Take out what no router needs any more; see router.cluster.redis_sweep."""
        return await sweep(
            self._scripts,
            router=self._router,
            lease_ms=10 * self._lease_ms,
            pause_s=pause_s,
            forget_after_s=forget_after_s,
        )

    # -- inside ------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return self._base + name


_RESULTS: Final = (Written.OK, Written.FENCED, Written.LOST)
