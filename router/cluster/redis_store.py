"""What several routers share, in Redis: blocks and who holds them, leases, load, sessions.

All keys begin with `{wr:NAMESPACE}:`.

    meta          hash     schema, incarnation
    feeds         hash     heads of streams: wSTREAM who wrote last, pSTREAM position,
                           tSTREAM newest, sSTREAM status, aSTREAM abandoned since,
                           gSTREAM how often its log was begun
    log:STREAM    list     what changed in a replica's blocks, packed, in order
    lease:STREAM  string   which router writes the stream; expires
    b:XX          hash     blocks of pools: 65,536 buckets, by the low 2 bytes of a key:
                           other 6 -> pools' bits
    holders       hash     bit -> "pool STREAM", empty: dead; and "pool STREAM" -> bit
    load:ROUTER   string   what the router has in flight; expires
    routers       zset     which routers live, and until when
    sessions      hash     session -> when it is forgotten (4 bytes), state
    replicas      hash     name -> record
    response:KEY  string   digest of a response's id -> the replica that issued it; expires
    sweeper       string   which router sweeps; expires

Notes are published on the channel `notes:SCHEMA:DB`, and kept nowhere.

A log takes 8 bytes for each block that it names. Its writer begins it again with what is held once
most of it is old: 8 to 24 bytes for each block of a replica. A bucket stays a listpack (a ziplist
before Redis 7) up to 512 blocks: 33 million blocks of pools, 19 bytes each. To clear a pool is to
call its bit dead; the next store takes another. `sweep` takes dead bits out of the buckets, and
removes old streams and old sessions.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    StreamHead,
    StreamId,
    encode,
    is_pool_stream,
)
from router.cluster import redis_scripts as scripts
from router.cluster.redis_connection import RedisConnection, Subscription, Word
from router.cluster.redis_errors import is_out_of_memory
from router.cluster.redis_records import RedisRecords
from router.cluster.redis_scripts import Script, Scripts, append_words, pool_calls
from router.cluster.redis_snapshot import (
    NUM_BUCKETS,
    LogPart,
    LogReader,
    PoolSnapshot,
    begin_snapshot,
    read_heads,
    read_logs,
)
from router.config import RedisConfig

_SWEPT_BLOCKS: Final = 1_000  # a call: about a millisecond of the server's time
_SESSIONS_A_CALL: Final = 500


class Swept(Struct, frozen=True, kw_only=True):
    """What a sweep did; not ours: another router sweeps."""

    is_ours: bool
    num_changed: int = 0  # blocks that lost some holders
    num_dropped: int = 0  # blocks that lost all
    num_bits: int = 0  # freed
    num_streams: int = 0  # forgotten
    num_sessions: int = 0  # forgotten


async def sweep(
    store: Scripts, *, router: str, lease_ms: int, pause_s: float, forget_after_s: float
) -> Swept:
    """Clear dead bits in the buckets, forget streams long without a lease, and old sessions.

    Args:
        router: Who sweeps; one at a time.
        lease_ms: For how long it may.
        pause_s: Between two calls, of about a millisecond each.
        forget_after_s: A stream that no router wrote for so long is forgotten.
    """
    is_ours, num_streams, dead = await store.run(
        scripts.DEAD, router, lease_ms, round(forget_after_s * 1000)
    )
    if not is_ours:
        return Swept(is_ours=False)
    bucket, num_changed, num_dropped = (0 if dead else NUM_BUCKETS), 0, 0
    while bucket < NUM_BUCKETS:
        bucket, changed, dropped = await store.run(
            scripts.SWEEP, router, lease_ms, bucket, _SWEPT_BLOCKS
        )
        if bucket < 0:  # it took too long and another router began
            return Swept(is_ours=False, num_changed=num_changed, num_dropped=num_dropped)
        num_changed += changed
        num_dropped += dropped
        await asyncio.sleep(pause_s)
    num_sessions = await _forget_sessions(store, pause_s)
    num_bits = await store.run(scripts.FREE, router, *dead)
    return Swept(
        is_ours=True,
        num_changed=num_changed,
        num_dropped=num_dropped,
        num_bits=num_bits,
        num_streams=num_streams,
        num_sessions=num_sessions,
    )


async def _forget_sessions(store: Scripts, pause_s: float) -> int:
    position, num_sessions = b"0", 0
    num_over: int
    while True:
        position, num_over, _ = await store.run(scripts.SESSIONS, position, _SESSIONS_A_CALL)
        num_sessions += num_over
        if position == b"0":
            return num_sessions
        await asyncio.sleep(pause_s)


_NOT_REDIS: Final = "what answers there does not answer as Redis does"

PIPELINE_BYTES: Final = 256 * 1024


def notes_channel(namespace: str, db: int) -> str:
    """Name the channel that a namespace's notes are published on: databases have all in common."""
    return f"{{wr:{namespace}}}:notes:{SCHEMA}:{db}"


class StoreFacts(Struct, frozen=True, kw_only=True):
    """What was found at `open`."""

    address: str
    server: str  # redis, valkey
    version: str
    incarnation: str  # another one: Redis was emptied in between


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
        self._connection = RedisConnection(config, password=password, names=names)
        self._scripts = Scripts(self._connection, meta)
        self._channel = notes_channel(config.namespace, self._connection.db)
        self._incarnation = ""
        self._num_garbage = 0
        self.records = RedisRecords(
            self._connection,
            self._scripts,
            self._base,
            timeout_s=config.timeout_s,
        )

    def use_password(self, password: str | None) -> None:
        """Log in with another password from the next connection on."""
        self._connection.use_password(password)

    @property
    def num_garbage(self) -> int:
        """Count the things under our keys that are not ours, and were skipped."""
        return self._num_garbage + self.records.num_garbage

    async def open(self) -> StoreFacts:
        """Connect, check whether this Redis can be used, and create the namespace if it is new."""
        try:
            await self._scripts.load()
            await _check_memory(self._connection)
            await self._look("", b"")
        except (TypeError, ValueError, AttributeError, LookupError) as exc:
            raise StoreRefused(_NOT_REDIS) from exc
        server = self._connection.server
        assert server is not None
        return StoreFacts(
            address=server.address,
            server=server.name,
            version=server.version,
            incarnation=self._incarnation,
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
        batch = _Batch()
        for i, delta in enumerate(deltas):
            for script, words in self._calls(delta):
                if script is not batch.script or batch.size >= PIPELINE_BYTES:
                    await self._write(batch, results)
                    batch = _Batch(script)
                batch.add(words, i)
        await self._write(batch, results)
        return results

    def _calls(self, delta: Delta) -> Iterator[tuple[Script, tuple[Word, ...]]]:
        if is_pool_stream(delta.stream_id):
            for words in pool_calls(delta, incarnation=self._incarnation):
                yield scripts.WRITE, words
        else:
            yield (
                scripts.APPEND,
                append_words(delta, incarnation=self._incarnation, router=self._router),
            )

    async def _write(self, batch: _Batch, results: list[Written]) -> None:
        if not batch.words:
            return
        replies = await self._scripts.run_all(batch.script, batch.words)
        for i, value in zip(batch.places, replies, strict=True):
            if isinstance(value, Exception):
                if not is_out_of_memory(value):
                    raise await self._connection.refusal(value)
                result = Written.NO_ROOM
            else:
                code, num_skipped = value if isinstance(value, list) else (value, 0)
                self._num_garbage += num_skipped
                if code == _LOST:
                    raise StoreUnavailable(EMPTIED)
                result = _RESULTS[code]
            if results[i] is Written.OK:
                results[i] = result

    async def read_logs(
        self, readers: Mapping[StreamId, LogReader], *, timeout_s: float | None = None
    ) -> dict[StreamId, LogPart]:
        """Read on in some streams' logs, in one round trip."""
        parts = await read_logs(self._scripts, readers, timeout_s=timeout_s)
        self._num_garbage += sum(part.num_garbage for part in parts.values())
        return parts

    async def heads(self) -> dict[StreamId, StreamHead]:
        """Read the head of every stream."""
        heads, num_garbage = read_heads(await self._connection.ask("HGETALL", self._key("feeds")))
        self._num_garbage += num_garbage
        return heads

    async def pool_snapshot(self, stream_ids: Collection[StreamId]) -> PoolSnapshot:
        """Begin a snapshot of the given pools."""
        return await begin_snapshot(self._connection, self._scripts, self._base, stream_ids)

    # -- notes -------------------------------------------------------------------------------

    async def publish(self, notes: Sequence[Note]) -> None:
        """Send notes to all routers that are subscribed, this one among them."""
        packed = encode(Notes(self._router, tuple(notes)))
        await self._connection.ask("PUBLISH", self._channel, packed)

    async def subscribe(self) -> Subscription:
        """Receive what is published from here on, our own notes among it."""
        return await self._connection.subscribe(self._channel)

    # -- leases, load ------------------------------------------------------------------------

    async def hold(self, wanted: Sequence[StreamId]) -> frozenset[StreamId]:
        """Renew our leases among the wanted and take free ones; return those that are ours now."""
        held = await self._scripts.run(scripts.HOLD, self._router, self._lease_ms, *wanted)
        return frozenset(id_ for id_, is_ours in zip(wanted, held, strict=True) if is_ours)

    async def leave(self, stream_ids: Iterable[StreamId] = ()) -> None:
        """Release leases, and end as a living router."""
        await self._scripts.run(scripts.RELEASE, self._router, *stream_ids)

    async def beat(self, load: bytes) -> Beat:
        """Send a heartbeat, with what this router has in flight."""
        return await self._look(self._router, load)

    async def _look(self, router: str, load: bytes) -> Beat:
        schema, incarnation, routers = await self._scripts.run(
            scripts.BEAT, SCHEMA, uuid.uuid4().hex, router, load, self._lease_ms
        )
        if schema != str(SCHEMA).encode():
            raise _other_schema(schema, self._base, self._config.namespace)
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
        """Remove dead bits, old streams and old sessions; see router.cluster.redis_store."""
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


async def _check_memory(connection: RedisConnection) -> None:
    """Ask what happens when memory is full; refuse to be evicted."""
    (reply,) = await connection.ask_all([("INFO", "memory")])
    if not isinstance(reply, bytes):  # the ACL user may not ask
        return
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    info: dict[str, Any] = {name: value for name, _, value in lines}
    max_bytes, policy = int(info.get("maxmemory", 0)), info.get("maxmemory_policy", "")
    if max_bytes and policy.startswith("allkeys"):
        raise StoreRefused(
            f"maxmemory-policy {policy} may evict the table of holders, and blocks would "
            "be credited to others: set it to noeviction, or use a Redis of its own"
        )


def _other_schema(found: bytes, base: str, namespace: str) -> StoreRefused:
    """Return the error for a namespace of another schema, with what to do about it."""
    text = found.decode(errors="replace")
    if text.isdigit() and int(text) < SCHEMA:
        advice = f"stop the older routers and delete the keys {base}*, or choose another"
    elif text.isdigit():
        advice = "update this router, or choose another"
    else:
        advice = "another program uses the key: choose another"
    return StoreRefused(
        f"namespace {namespace!r} in Redis has schema {text}, this router has {SCHEMA}: "
        f"{advice} redis.namespace"
    )


class _Batch:
    """Calls of one script that go to Redis together."""

    def __init__(self, script: Script = scripts.APPEND) -> None:
        self.script = script
        self.words: list[tuple[Word, ...]] = []
        self.places: list[int] = []  # the number of each call's delta
        self.size = 0  # bytes, about

    def add(self, words: tuple[Word, ...], place: int) -> None:
        self.words.append(words)
        self.places.append(place)
        self.size += sum(len(word) for word in words if isinstance(word, bytes))


_RESULTS: Final = (Written.OK, Written.FENCED)
_LOST: Final = 2  # the incarnation is another one
