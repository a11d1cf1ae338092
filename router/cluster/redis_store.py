"""What several routers share, in Redis: blocks and who holds them, leases, load, sessions.

All keys begin with `{wr:NAMESPACE}:` and so lie in one slot of a Cluster.

    meta          hash     schema, incarnation
    b:XX          hash     65,536 buckets, by the low 2 bytes of a key: other 6 -> holders' bits
    holders       hash     bit -> "tier STREAM", empty: dead; and "tier STREAM" -> bit
    feeds         hash     heads of streams: wSTREAM who wrote last, pSTREAM position,
                           tSTREAM newest, sSTREAM status, aSTREAM abandoned since
    copies:BIT    hash     8-byte key -> copies, where there are several
    work          stream   r: the router, d: its notes
    lease:STREAM  string   which router writes the stream; expires
    load:ROUTER   string   what the router has in flight; expires
    routers       zset     which routers live, and until when
    sessions      hash     session -> when it is forgotten (4 bytes), state
    replicas      hash     name -> record
    experiments   hash     name -> state
    response:KEY  string   digest of a response's id -> the replica that issued it; expires
    sweeper       string   which router sweeps; expires

A bucket stays a listpack (a ziplist before Redis 7) up to 512 blocks with fewer than 512 holders'
bits: 33 million blocks at the servers' defaults, 19 bytes each. Larger ones work, too.

An epoch of a stream is a bit. To clear the stream is to call its bits dead; the next store takes
others. `sweep` takes dead bits out of the buckets and frees them.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Final

from msgspec import Struct

from router.base.errors import EMPTIED, StoreRefused, StoreUnavailable
from router.base.host_names import Names
from router.base.messages import (
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
from router.cluster import redis_scripts as scripts
from router.cluster.redis_connection import RedisConnection, Word
from router.cluster.redis_errors import is_out_of_memory
from router.cluster.redis_facts import StoreFacts, memory_of, other_schema
from router.cluster.redis_records import RedisRecords
from router.cluster.redis_scripts import Scripts
from router.cluster.redis_snapshot import IndexSnapshot, begin_snapshot, read_heads
from router.cluster.redis_sweep import Swept, sweep
from router.cluster.redis_writes import calls
from router.config import RedisConfig

_NOT_REDIS: Final = "what answers there does not answer as Redis does"

PIPELINE_BYTES: Final = 256 * 1024
_READ_ENTRIES: Final = 256
_KEEP_MS: Final = 60_000  # a note; a router that reads later asks for all that is in flight


class Written(Enum):
    """The result of writing a delta."""

    OK = "ok"
    FENCED = "fenced"  # another router holds the lease
    NO_ROOM = "no_room"  # Redis is full; a delta that only removes is written all the same


class Beat(Struct, frozen=True):
    """The reply to a heartbeat."""

    incarnation: str
    routers: frozenset[str]  # that live, this one included


class RedisStore:
    """The shared store of one namespace.

    Every call raises StoreUnavailable if Redis is gone, slow or failing over. It raises
    StoreRefused if Redis cannot be used as it is, with what to do about it. The next call tries
    again.

    Args:
        config: Where Redis is, and how long to wait.
        router: What this process is called, unique to it.
        password: None: none.
        names: The addresses of hosts; None: no other client shares them.
    """

    def __init__(
        self,
        config: RedisConfig,
        *,
        router: str,
        password: str | None,
        names: Names | None = None,
    ) -> None:
        self._config = config
        self._router = router
        self._base = f"{{wr:{config.namespace}}}:"
        self._lease_ms = round(config.lease_s * 1000)
        meta = self._key("meta")
        self._connection = RedisConnection(config, key=meta, password=password, names=names)
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
        """Cut the connections; our entries in Redis expire."""
        await self._connection.close()

    # -- blocks ------------------------------------------------------------------------------

    async def write(self, deltas: Sequence[Delta]) -> list[Written]:
        """Write deltas in order, pipelined.

        Raises:
            StoreUnavailable: Redis was emptied, or did not answer; deltas may have been written.
        """
        results = [Written.OK] * len(deltas)
        batch: list[tuple[Word, ...]] = []
        places: list[int] = []
        size = 0
        for i, delta in enumerate(deltas):
            is_fenced = not is_pool_stream(delta.stream_id)
            for words in calls(
                delta, incarnation=self._incarnation, router=self._router, is_fenced=is_fenced
            ):
                batch.append(words)
                places.append(i)
                size += sum(len(word) for word in words if isinstance(word, bytes))
                if size >= PIPELINE_BYTES:
                    await self._write(batch, places, results)
                    batch, places, size = [], [], 0
        if batch:
            await self._write(batch, places, results)
        return results

    async def _write(
        self, batch: list[tuple[Word, ...]], places: list[int], results: list[Written]
    ) -> None:
        replies = await self._scripts.run_all(scripts.WRITE, batch)
        for i, value in zip(places, replies, strict=True):
            if isinstance(value, Exception):
                if not is_out_of_memory(value):
                    raise await self._connection.refusal(value)
                result = Written.NO_ROOM
            else:
                code, num_skipped = value
                self._num_garbage += num_skipped
                if code == _LOST:
                    raise StoreUnavailable(EMPTIED)
                result = _RESULTS[code]
            if results[i] is Written.OK:
                results[i] = result

    async def heads(self) -> dict[StreamId, StreamHead]:
        """Read the head of every stream."""
        heads, num_garbage = read_heads(await self._connection.ask("HGETALL", self._key("feeds")))
        self._num_garbage += num_garbage
        return heads

    async def snapshot(self, stream_ids: Collection[StreamId]) -> IndexSnapshot:
        """Begin a snapshot of the given streams."""
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

    # -- notes -------------------------------------------------------------------------------

    async def publish(self, notes: Sequence[Note]) -> None:
        """Add notes to the work stream."""
        packed = encode(Notes(self._router, tuple(notes)))
        words = (self._router, packed, self._config.log_entries, _KEEP_MS)
        await self._scripts.run(scripts.PUBLISH, *words)

    async def last_note(self) -> str:
        """Return the id of the last note; later ones are read from there."""
        return (await self.snapshot(())).work_id

    async def read_notes(self, after: str, *, block_s: float) -> tuple[list[bytes], str]:
        """Wait for entries behind an id, our own among them; return them and the last one's id."""
        wait: tuple[Word, ...] = ("BLOCK", max(1, round(block_s * 1000))) if block_s > 0 else ()
        reply = await self._connection.ask(
            *("XREAD", "COUNT", _READ_ENTRIES, *wait, "STREAMS", self._key("work"), after),
            timeout_s=block_s + self._config.timeout_s,
        )
        entries: list[bytes] = []
        for id_, fields in _entries(reply):
            after = id_
            packed = fields.get(b"d")
            if packed is None:
                self._num_garbage += 1
            else:
                entries.append(packed)
        return entries, after

    # -- leases, load ------------------------------------------------------------------------

    async def hold(self, wanted: Sequence[StreamId]) -> frozenset[StreamId]:
        """Renew our leases among the wanted and take free ones; return those that are ours now."""
        held = await self._scripts.run(scripts.HOLD, self._router, self._lease_ms, *wanted)
        return frozenset(id_ for id_, is_ours in zip(wanted, held, strict=True) if is_ours)

    async def release(self, stream_ids: Iterable[StreamId]) -> None:
        """Release leases."""
        await self._scripts.run(scripts.RELEASE, self._router, "0", *stream_ids)

    async def leave(self, stream_ids: Iterable[StreamId] = ()) -> None:
        """Release leases, and end as a living router."""
        await self._scripts.run(scripts.RELEASE, self._router, "1", *stream_ids)

    async def beat(self, load: bytes) -> Beat:
        """Send a heartbeat, with what this router has in flight."""
        return await self._look(self._router, load)

    async def _look(self, router: str, load: bytes) -> Beat:
        schema, incarnation, routers = await self._scripts.run(
            scripts.BEAT, SCHEMA, uuid.uuid4().hex, router, load, self._lease_ms
        )
        if schema != str(SCHEMA).encode():
            raise other_schema(schema, self._base, self._config.namespace)
        self._incarnation = incarnation.decode()
        return Beat(
            incarnation=self._incarnation,
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
        """Remove dead bits, old streams and old sessions; see router.cluster.redis_sweep."""
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


def _entries(reply: Any) -> Iterator[tuple[str, dict[bytes, bytes]]]:
    """Yield the entries of the one stream that XREAD gave; None stands for nothing in time."""
    for _, entries in reply or ():
        for id_, flat in entries:
            yield id_.decode(), dict(zip(flat[::2], flat[1::2], strict=False)) if flat else {}


_RESULTS: Final = (Written.OK, Written.FENCED)
_LOST: Final = 2  # the incarnation is another one
