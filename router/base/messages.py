"""What routers share through Redis: the structs, and how they are packed.

Redis has the *index*, which blocks each candidate holds. Every router follows every engine itself;
the router that holds a stream's lease writes what changed, as deltas. Redis also has a channel for
*notes*: what each router has in flight, so that load, claims and sessions count everywhere.

Deltas are absolute (these blocks are held now, of this one there are n copies now), never relative:
a delta that is written twice does no harm.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Annotated, Literal, NewType

import msgspec
from msgspec import Meta, Struct

from policies.view import CandidateId
from router.base.contracts import MAX_BLOCK_SIZE, BlockKey, HashContract
from router.base.decoding import Count, Keys, Number, Seconds, Text, decoder
from router.base.engines import Role, Transfer

MAX_ORDERS = 4_096
"""Orders that are read."""

MAX_GROUPS = 256
"""KV groups of a model; real ones have ten at most."""

MAX_UNKNOWN = 256
"""Kinds of prompts whose extra keys are not understood: adapters, mostly."""

SCHEMA = 3
"""The schema in Redis. A router upgrades data of schemas 1 and 2, and refuses any other."""

UPGRADED = ("1", "2")
"""Schemas that it upgrades."""

StreamId = NewType("StreamId", str)
"""What routers call a candidate's stream among themselves: its replica's name or else its base URL,
and `#rank`. Two routers may number their replicas differently."""

SharedId = Annotated[StreamId, Meta(max_length=2_048)]
"""A stream's name as other routers send it."""

POOL = CandidateId("pool")
"""Stands for the pool where a candidate is asked for; no replica may have this name."""


def pool_lister(pool: str) -> StreamId:
    """Name the lease of the router that lists a pool's keys; "": the only one's."""
    return StreamId(f"pool@{pool}" if pool else "pool")


def pool_stream(model: str, pool: str = "") -> StreamId:
    """Name the stream of what a pool holds of a base model's blocks."""
    return StreamId(f"{pool_lister(pool)}/{model}")


def is_pool_stream(stream_id: StreamId) -> bool:
    """Return whether a stream is a pool's: names of replicas have no `/` and no `@`."""
    return stream_id.startswith(("pool/", "pool@"))


# -- keys ----------------------------------------------------------------------------------------


def pack_keys(keys: Iterable[int]) -> bytes:
    """Pack block keys, 8 bytes each, little-endian (0.02 us a key)."""
    packed = array("Q", keys)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tobytes()


def unpack_keys(packed: bytes) -> list[BlockKey]:
    """Undo `pack_keys`.

    Raises:
        ValueError: the length is no multiple of 8.
    """
    return unpack_words(packed).tolist()  # type: ignore[return-value]


def unpack_words(packed: bytes) -> array[int]:
    """Undo `pack_keys`, of keys or of other 8-byte items.

    Raises:
        ValueError: the length is no multiple of 8.
    """
    words = array("Q")
    words.frombytes(packed)
    if sys.byteorder == "big":  # pragma: no cover
        words.byteswap()
    return words


# -- the index: which blocks are held ------------------------------------------------------------

SharedTier = Literal["gpu", "cpu", "pool"]


class Position(Struct, frozen=True, array_like=True):
    """The last batch of an engine's event stream that went into a state.

    `mark` distinguishes it from another engine's batch of that number; see
    router.kv_events.sequence.
    """

    sequence: Number
    mark: Annotated[bytes, Meta(max_length=64)]


class KvGroup(Struct, frozen=True, array_like=True, gc=False):
    """One KV group of a model that has several: layers whose caches are of one kind.

    `kind` and `window` (tokens) are the engine's words; a window it does not tell is None.
    Source: KVCacheSpecKind in vllm/v1/kv_cache_interface.py, 0.32.0.
    """

    index: Annotated[int, Meta(ge=0, lt=1 << 16)]
    kind: Text
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)]
    window: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None


class StreamStatus(Struct, frozen=True, array_like=True):
    """How much of a candidate's blocks the router that writes them knows.

    `state` and `reason` are for people; the rest is what a router needs to start from the blocks.
    """

    state: Literal["exact", "degraded", "blind"]
    reason: Text
    contract: HashContract
    capacity_blocks: Count
    is_verified: bool = True  # the contract was found in the engine's events, not guessed
    is_suspect: bool = False  # matches do not count until history is read again
    lacks: Text = ""  # what the index has missed, until the next epoch
    unused_is_proven: bool = True  # of schema 1
    groups: Annotated[tuple[KvGroup, ...], Meta(max_length=MAX_GROUPS)] = ()
    """The groups of a model with several, or one without full attention; in the order seen."""
    unknown: Annotated[tuple[Text, ...], Meta(max_length=MAX_UNKNOWN)] = ()
    """Kinds of prompts with extra keys of an unknown form (router.kv_events.translation)."""


class TierChange(Struct, frozen=True, array_like=True):
    """What became of blocks on one tier; keys packed, each in one of the two at most."""

    tier: SharedTier
    stored: Keys = b""  # held now
    removed: Keys = b""  # not held now
    copies: tuple[tuple[BlockKey, int], ...] = ()  # held, in so many copies: n > 1, or 1 again


class Delta(Struct, frozen=True, kw_only=True):
    """What changed in one stream since the last delta.

    After it the blocks contain all of the engine's batches up to `position`, and none behind
    `newest`. The two differ while a large change is written in several deltas.
    """

    stream_id: StreamId
    cleared: bool = False  # the blocks on gpu and cpu tier are forgotten first
    changes: tuple[TierChange, ...] = ()
    position: Position | None = None  # None: as before; after a clear there is none
    newest: Position | None = None  # None: as before
    status: StreamStatus | None = None  # None: as before


class StreamHead(Struct, frozen=True, kw_only=True):
    """The state of one stream in Redis; see `Delta`."""

    position: Position | None
    newest: Position | None = None
    status: StreamStatus | None = None
    writer: str | None = None  # the router that wrote last


# -- notes: what is in flight --------------------------------------------------------------------


class Began(Struct, frozen=True, array_like=True, tag="began"):
    """A request was sent to a candidate; its lease and its claim count from here.

    `claimed` packs the keys that will be computed there. `held` packs those before them, of BLIND
    candidates alone: what is guessed there is the whole chain.
    """

    number: Number  # of the lease, unique in its router's life
    stream_id: SharedId
    num_uncached_tokens: Count
    num_cached_tokens: Count  # the fetched ones included
    num_fetched_tokens: Count
    streams: bool
    claimed: Keys = b""
    num_held: Count = 0  # not read; its place is kept for routers of other releases
    session_hash: int | None = None
    held: Keys = b""
    is_from_pool: bool = False  # where the fetched tokens are read
    num_disk_tokens: Count = 0  # of these, so many from SSD
    is_batch: bool = False  # its class
    is_visit: bool = False  # its conversation has no room after it


class Answered(Struct, frozen=True, array_like=True, tag="answered"):
    """A request's first token came, after so long; None: it is not known when."""

    number: Number
    ttft_ms: Seconds | None = None


class Ended(Struct, frozen=True, array_like=True, tag="ended"):
    """A request's lease ended; `computed`: its blocks are there, their events may still come."""

    number: Number
    computed: bool


class Alive(Struct, frozen=True, array_like=True, tag="alive"):
    """A heartbeat: the router lives, and of the leases up to number `last` these are open.

    All others of it up to there are over. What began after the heartbeat was made has a higher
    number, so it is safe from a heartbeat that comes late, twice, or after newer `OpenLeases`.
    """

    open: tuple[Number, ...] = ()
    last: Number = 0


class Registered(Struct, frozen=True, array_like=True, tag="registered"):
    """The registry of replicas changed: read it again."""


class Left(Struct, frozen=True, array_like=True, tag="left"):
    """The router has ended, its requests before it. The last thing that it says."""


class PoolChanged(Struct, frozen=True, array_like=True, tag="pool"):
    """The router learned what became of blocks in a shared pool."""

    stream_id: SharedId
    change: TierChange


Note = Struct
"""A note of any kind: one of those here, or what its owner registers (router.cluster.peers)."""


class Notes(Struct, frozen=True, array_like=True):
    """The notes that a router publishes together."""

    router: Text  # unique to the process
    notes: tuple[Note, ...]


class OpenLease(Struct, frozen=True, array_like=True):
    """A lease that was open when a router was asked; answered ones claim nothing any more."""

    began: Began
    age_s: Seconds
    is_answered: bool


class OpenLeases(Struct, frozen=True, array_like=True):
    """All that one router has in flight, for one that joins: leases up to number `last`."""

    last: Number
    open: tuple[OpenLease, ...]


class SessionState(Struct, frozen=True, array_like=True):
    """A session's last turn, as routers share it."""

    stream_id: SharedId
    unused_turns: Count = 1  # routers of version 0.2 and before read both
    unused_gap_s: Seconds | None = None
    num_tokens: Count = 0  # of its last prompt


class Evacuation(Struct, frozen=True, array_like=True):
    """When live conversations of a replica may stay there though it drains, in unix seconds."""

    begun: Annotated[float, Meta(ge=0, le=1e11)]
    until: Annotated[float, Meta(ge=0, le=1e11)]


class ReplicaRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A replica in the registry, by name. `removed`: it must go from wherever it is configured."""

    url: Text
    events: Annotated[tuple[Text, ...], Meta(max_length=256)] = ()
    replay: Annotated[tuple[Text, ...], Meta(max_length=256)] = ()
    draining: bool = False
    evacuation: Evacuation | None = None  # older routers drain it
    removed: bool = False
    role: Role = "both"
    transfer: Transfer | None = None
    bootstrap: Text | None = None
    hardware: Annotated[str, Meta(max_length=64)] | None = None
    weight: Annotated[float, Meta(gt=0, le=1)] = 1.0
    eagle: bool | None = None
    pool: bool | Annotated[str, Meta(max_length=64)] | None = None
    cost_per_hour: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    discovered: bool = False  # each router finds it itself: the record adds it nowhere


encode = msgspec.msgpack.Encoder().encode
decode_position = decoder(Position, "msgpack")
decode_status = decoder(StreamStatus, "msgpack")
decode_load = decoder(OpenLeases, "msgpack")
decode_session = decoder(SessionState, "msgpack")
decode_record = decoder(ReplicaRecord, "msgpack")
