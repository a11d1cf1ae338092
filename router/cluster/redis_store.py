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

import asyncio
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

import msgspec
from msgspec import Struct

from router.cluster import redis_scripts as scripts
from router.cluster.redis_connection import RedisConnection, Word
from router.cluster.redis_errors import is_out_of_memory
from router.cluster.redis_log import KEEP_MS, Cursor, NewEntries, calls, read_entries, read_heads
from router.cluster.redis_log import stream_entries as _entries
from router.cluster.redis_scripts import Scripts
from router.cluster.redis_server import Mode
from router.cluster.redis_snapshot import NUM_BUCKETS, IndexSnapshot, begin_snapshot
from router.config import RedisConfig
from router.errors import StoreRefused
from router.experiments.state import State, decode_state, encode_state
from router.messages import (
    MAX_RECORDS,
    SCHEMA,
    Delta,
    Note,
    Notes,
    ReplicaRecord,
    SessionState,
    SharedTier,
    StreamHead,
    StreamId,
    decode_record,
    decode_session,
    encode,
)
from router.replicas.response_owners import ResponseKey

_NOT_REDIS: Final = "what answers there does not answer as Redis does"

_PIPELINE_BYTES: Final = 256 * 1024
_READ_ENTRIES: Final = 256
_SWEPT_BLOCKS: Final = 1_000  # a call: about a millisecond of the server's time
_SESSIONS_A_CALL: Final = 500
_MAX_IDENTITY: Final = 1_024


class Written(Enum):
    """What became of a delta; after anything but OK the stream's later ones fail, too."""

    OK = "ok"
    FENCED = "fenced"  # the lease is not ours
    LOST = "lost"  # Redis lost the deltas before it, or another router wrote
    NO_ROOM = "no_room"  # Redis is full; what only removes is written all the same


class StoreFacts(Struct, frozen=True, kw_only=True):
    """What was found at `open`. None: Redis does not say."""

    address: str
    server: str  # redis, valkey
    version: str
    mode: Mode
    incarnation: str  # another one: Redis was emptied in between
    used_bytes: int | None
    max_bytes: int | None  # 0: no bound
    warnings: tuple[str, ...] = ()


class Beat(Struct, frozen=True):
    """What a heartbeat brought back."""

    incarnation: str
    log_number: int
    routers: frozenset[str]  # that live, this one included


class Swept(Struct, frozen=True, kw_only=True):
    """What a sweep did; not ours: another router sweeps."""

    is_ours: bool
    num_changed: int = 0  # blocks that lost some holders
    num_dropped: int = 0  # blocks that lost all
    num_bits: int = 0  # freed
    num_streams: int = 0  # forgotten
    num_sessions: int = 0  # forgotten


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
        self.num_garbage = 0  # things under our keys that are not ours: counted, skipped

    async def open(self) -> StoreFacts:
        """Connect, check whether this Redis can be used, and create the namespace if it is new."""
        try:
            await self._scripts.load()
            used_bytes, max_bytes, policy = await self._memory()
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
                self.num_garbage += value[1]
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
        self.num_garbage += reading.num_garbage
        if int(log_number or 0) < reading.cursor.log_number:  # rolled back
            return msgspec.structs.replace(reading, is_gap=True)
        return reading

    async def heads(self) -> dict[StreamId, StreamHead]:
        """Read the head of every stream."""
        heads, num_garbage = read_heads(await self._connection.ask("HGETALL", self._key("feeds")))
        self.num_garbage += num_garbage
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
            if stream_id.startswith("pool/"):
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
            raise _other_schema(schema, self._base, self._config.namespace)
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

    # -- sessions, replicas ------------------------------------------------------------------

    async def put_sessions(self, sessions: Mapping[int, SessionState], ttl_s: float) -> None:
        """Write sessions; each is forgotten after `ttl_s` unless it is written again."""
        words: list[Word] = []
        for session, state in sessions.items():
            words += (session, encode(state))
        step = 2 * _SESSIONS_A_CALL
        for at in range(0, len(words), step):
            await self._scripts.run(scripts.REMEMBER, max(1, round(ttl_s)), *words[at : at + step])

    async def sessions(self) -> AsyncIterator[tuple[int, SessionState]]:
        """Yield all sessions, some perhaps twice."""
        position = b"0"
        while True:
            position, _, flat = await self._scripts.run(
                scripts.SESSIONS, position, _SESSIONS_A_CALL
            )
            for session, state in zip(flat[::2], flat[1::2], strict=True):
                try:
                    found = int(session[:24]), decode_session(state)
                except ValueError:
                    self.num_garbage += 1
                    continue
                yield found
            if position == b"0":
                return

    async def put_response_owners(self, owners: Mapping[ResponseKey, str], ttl_s: float) -> None:
        """Write which replicas issued responses, each for `ttl_s`."""
        ttl = max(1, round(ttl_s))
        commands = [("SET", self._response(key), owners[key], "EX", ttl) for key in owners]
        for value in (await self._connection.ask_all(commands)).values:
            if isinstance(value, Exception):
                raise await self._connection.refusal(value)

    async def response_owner(self, key: ResponseKey) -> str | None:
        """Read which replica issued a response."""
        timeout_s = self._config.lookup_timeout_s
        found = await self._connection.ask("GET", self._response(key), timeout_s=timeout_s)
        if found is None or not isinstance(found, bytes) or len(found) > _MAX_IDENTITY:
            return None
        return found.decode(errors="replace")

    async def replicas(self) -> dict[str, ReplicaRecord]:
        """Read the registry of replicas."""
        flat = await self._connection.ask("HGETALL", self._key("replicas"))
        records: dict[str, ReplicaRecord] = {}
        for name, record in zip(flat[::2], flat[1::2], strict=True):
            try:
                if len(records) >= MAX_RECORDS:
                    raise ValueError("too many records")
                records[name.decode()] = decode_record(record)
            except ValueError:
                self.num_garbage += 1
        return records

    async def put_replica(self, name: str, record: ReplicaRecord | None) -> None:
        """Write a replica into the registry; None takes it out."""
        key = self._key("replicas")
        if record is None:
            await self._connection.ask("HDEL", key, name)
        else:
            await self._connection.ask("HSET", key, name, encode(record))

    async def experiments(self) -> dict[str, State]:
        """Read the state of experiments, by name."""
        flat = await self._connection.ask("HGETALL", self._key("experiments"))
        states: dict[str, State] = {}
        for name, state in zip(flat[::2], flat[1::2], strict=True):
            try:
                if len(states) >= MAX_RECORDS:
                    raise ValueError("too many experiments")
                states[name.decode()] = decode_state(state)
            except ValueError:
                self.num_garbage += 1
        return states

    async def put_experiment(self, name: str, state: State) -> None:
        """Write the state of an experiment."""
        await self._connection.ask("HSET", self._key("experiments"), name, encode_state(state))

    # -- sweeping ----------------------------------------------------------------------------

    async def sweep(self, *, pause_s: float = 0.005, forget_after_s: float = 86_400.0) -> Swept:
        """Take dead bits out of the buckets, forget streams long without a lease, and old sessions.

        Args:
            pause_s: Between two calls, of about a millisecond each.
            forget_after_s: A stream without a leader for so long is forgotten.
        """
        lease_ms = 10 * self._lease_ms
        is_ours, num_streams, dead = await self._scripts.run(
            scripts.DEAD, self._router, lease_ms, round(forget_after_s * 1000)
        )
        if not is_ours:
            return Swept(is_ours=False)
        bucket, num_changed, num_dropped = (0 if dead else NUM_BUCKETS), 0, 0
        while bucket < NUM_BUCKETS:
            bucket, changed, dropped = await self._scripts.run(
                scripts.SWEEP, self._router, lease_ms, bucket, _SWEPT_BLOCKS
            )
            if bucket < 0:  # it took too long and another router began
                return Swept(is_ours=False, num_changed=num_changed, num_dropped=num_dropped)
            num_changed += changed
            num_dropped += dropped
            await asyncio.sleep(pause_s)
        num_sessions = await self._forget_sessions(pause_s)
        num_bits = await self._scripts.run(scripts.FREE, self._router, *dead)
        return Swept(
            is_ours=True,
            num_changed=num_changed,
            num_dropped=num_dropped,
            num_bits=num_bits,
            num_streams=num_streams,
            num_sessions=num_sessions,
        )

    async def _forget_sessions(self, pause_s: float) -> int:
        position, num_sessions = b"0", 0
        num_over: int
        while True:
            position, num_over, _ = await self._scripts.run(
                scripts.SESSIONS, position, _SESSIONS_A_CALL
            )
            num_sessions += num_over
            if position == b"0":
                return num_sessions
            await asyncio.sleep(pause_s)

    # -- inside ------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return self._base + name

    def _response(self, key: ResponseKey) -> str:
        return self._key(f"response:{key}")

    async def _memory(self) -> tuple[int | None, int | None, str]:
        """Ask for memory in use and allowed, and what happens beyond; refuse to be evicted."""
        (reply,) = (await self._connection.ask_all([("INFO", "memory")])).values
        if not isinstance(reply, bytes):  # the ACL user may not ask
            return None, None, ""
        lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
        info: dict[str, Any] = {name: value for name, _, value in lines}
        max_bytes, policy = int(info.get("maxmemory", 0)), info.get("maxmemory_policy", "")
        if max_bytes and policy.startswith("allkeys"):
            raise StoreRefused(
                f"maxmemory-policy {policy} may evict the table of holders, and blocks would "
                "be credited to others: set it to noeviction, or use a Redis of its own"
            )
        return int(info["used_memory"]), max_bytes, policy


_RESULTS: Final = (Written.OK, Written.FENCED, Written.LOST)


def _other_schema(found: bytes, base: str, namespace: str) -> StoreRefused:
    text = found.decode(errors="replace")
    if text.isdigit() and int(text) < SCHEMA:
        advice = f"stop the older routers and delete the keys {base}*, or choose another"
    elif text.isdigit():
        advice = "update this router, or choose another"
    else:
        advice = "the key is not ours: choose another"
    return StoreRefused(
        f"namespace {namespace!r} in Redis has schema {text}, this router has {SCHEMA}: "
        f"{advice} redis.namespace"
    )
