"""What a check has seen, as data: between those who look and those who judge.

None means throughout: it was not said, or there was no time to find out.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from router.check.ports import Reach
from router.messages import FeedId


class ModelSeen(Struct, frozen=True, kw_only=True):
    """One base model of a replica, and how its prompts become tokens."""

    id: str
    source: str  # where tokenizer and template come from
    max_model_len: int | None = None
    num_adapters: int = 0
    is_loaded: bool = False  # False: there was no time
    engine_only: str | None = None  # why it cannot be tokenized here; None: it can
    # Whether the engine tokenizes a sample chat to the same ids; None: it did not say.
    is_same: bool | None = None


class RankSeen(Struct, frozen=True, kw_only=True):
    """One rank's event stream."""

    rank: int
    told: str  # the endpoint as the engine or the configuration has it
    endpoint: str  # to connect to
    reach: Reach
    has_handshake: bool = False  # what listens there speaks ZeroMQ
    replay_endpoint: str | None = None  # None: there is none
    replay_reach: Reach | None = None
    has_replay: bool | None = None  # whether it answered
    state: Literal["exact", "degraded", "blind"] = "blind"
    reason: str = ""
    algorithm: str = ""
    seed: str = ""
    block_size: int = 0
    is_verified: bool = False  # the contract was found in its events, not guessed
    num_batches: int = 0  # of history
    num_blocks: int = 0  # that it holds by them
    num_pooled: int = 0  # blocks that it told to have written to the pool


class Publisher(Struct, frozen=True):
    """What an engine says about one rank's events but does not do: they are off."""

    enabled: bool
    publisher: str | None


class ReplicaSeen(Struct, frozen=True, kw_only=True):
    """One replica. `error` says why nothing else is known; None: it answered."""

    name: str
    identity: str  # what routers call it among themselves
    url: str
    is_added: bool = False  # by an operator, at some router's admin API
    order: Literal["none", "drain", "remove"] = "none"  # what an operator ordered
    error: str | None = None
    version: str | None = None
    block_size: int | None = None
    num_blocks: int | None = None  # per rank
    prefix_caching: bool | None = None
    started_s: float | None = None
    num_ranks: int = 1
    models: tuple[ModelSeen, ...] = ()
    wants_events: bool = True  # events.enabled
    has_source_route: bool | None = None  # whether it answers /kv_event_sources
    silent_publishers: tuple[Publisher, ...] = ()  # configured at the engine, but off
    events_configured: bool = False  # the endpoints are the configuration's
    ranks: tuple[RankSeen, ...] = ()
    reads_pool: bool | None = None  # as configured
    has_pool_connector: bool = False  # it says so; False: or it does not say


class FeedSeen(Struct, frozen=True, kw_only=True):
    """One feed in Redis."""

    id: FeedId
    number: int
    sequence: int | None  # the engine's last batch in it
    state: str | None
    reason: str | None
    leader: str | None  # the router that holds its lease; None: nobody does


class RedisSeen(Struct, frozen=True, kw_only=True):
    """The shared store. `error` says why nothing else is known."""

    address: str
    namespace: str
    error: str | None = None
    is_refused: bool = False  # it answers, but will not do as it is
    server: str | None = None
    version: str | None = None
    mode: str | None = None
    round_trip_ms: float | None = None
    schema: str | None = None  # None: the namespace is new
    used_bytes: int | None = None
    max_bytes: int | None = None  # 0: no bound
    policy: str | None = None
    save_error: bool = False  # it refuses writes because it cannot save
    routers: tuple[str, ...] = ()  # that live
    feeds: tuple[FeedSeen, ...] = ()
    pool_lister: str | None = None  # the router that lists the pool's keys for all
    num_log_entries: int | None = None
    num_sessions: int | None = None
    refused: tuple[str, ...] = ()  # orders about replicas that no router follows, and why


class PatternSeen(Struct, frozen=True, kw_only=True):
    """What a model's objects in the pool are called."""

    model: str
    text: str | None  # None: not learned
    num_ranks: int = 0
    num_blocks: int = 0
    bytes_per_token: float | None = None


class PoolSeen(Struct, frozen=True, kw_only=True):
    """The Mooncake master. `error` says why nothing else is known."""

    url: str
    error: str | None = None
    num_objects: int | None = None
    used_bytes: int | None = None
    max_bytes: int | None = None
    num_evicted: int | None = None
    num_segments: int | None = None
    publishes_events: bool | None = None
    events_configured: bool = False
    events_reach: Reach | None = None
    is_listed: bool = False  # its keys could be listed
    list_error: str | None = None
    num_unknown_keys: int = 0
    models: tuple[PatternSeen, ...] = ()


class FileSeen(Struct, frozen=True):
    """A file that the configuration names; `error` None: it will do."""

    key: str
    path: str
    error: str | None


class PortSeen(Struct, frozen=True, kw_only=True):
    """A port that the router wants to listen on."""

    key: str  # listen, admin
    host: str
    port: int
    error: str | None  # None: it is free
    is_router: bool = False  # a warmroute listens there


class RouterSeen(Struct, frozen=True, kw_only=True):
    """This machine, and what a router that runs here already says."""

    ports: tuple[PortSeen, ...] = ()
    files: tuple[FileSeen, ...] = ()
    num_answered: int | None = None  # requests of the running router with a usage
    num_audited: int | None = None  # of them those that said what was cached
