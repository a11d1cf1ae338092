"""What a check saw of a replica: the router's own structs, and what only a check asks."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from router.base.engines import Role
from router.base.messages import StreamStatus
from router.check.reach import Reach
from router.discovery.engine_facts import EngineFacts
from router.discovery.engine_pages import ServerInfo
from router.kv_events.subscriber import EventSource
from router.replicas.replica import Entry, ServedModel
from router.tokens.trust import Difference

Failure = Literal["api key", "unknown host", "no answer", "other"]


class RankSeen(Struct, frozen=True, kw_only=True):
    """One rank's event stream. None: not known."""

    rank: int
    source: EventSource
    endpoint: str  # to connect to
    reach: Reach
    why_no_address: str = ""
    is_publisher: bool = False  # what listens at the endpoint speaks ZeroMQ
    replay_endpoint: str | None = None  # None: there is none
    replay_reach: Reach | None = None
    has_replay: bool | None = None  # whether it answered
    status: StreamStatus | None = None  # None: it was not followed
    num_batches: int = 0  # of history
    num_blocks: int = 0  # in its cache, by these
    num_unknown_tier: int = 0  # blocks that it stored on a tier which is not followed
    num_pooled: int = 0  # blocks that it reported as written to the pool
    foreign: str | None = None  # why its endpoint is another replica's; None: it is not

    @property
    def state(self) -> str:
        """The state of the stream: exact, degraded or blind."""
        return self.status.state if self.status is not None else "blind"

    @property
    def reason(self) -> str:
        """Why it is not exact."""
        return self.status.reason if self.status is not None else ""


class ModelSeen(Struct, frozen=True, kw_only=True):
    """One base model of a replica, and how its prompts become tokens."""

    served: ServedModel
    source: str  # of tokenizer and template
    is_loaded: bool = False  # False: there was no time
    engine_only: str | None = None  # why it cannot be tokenized here; None: it can
    is_compared: bool = False  # its token ids of samples, with the engine's
    difference: Difference | None = None  # between them; None: there is none
    joins_system: bool = False  # /v1/messages joins later system messages to the first

    @property
    def id(self) -> str:
        """The model's name."""
        return self.served.id


class ReplicaSeen(Struct, frozen=True, kw_only=True):
    """One replica. `error` says why it has no facts."""

    entry: Entry
    pool: str | None = None  # the Mooncake pool that it is in; "": the only one; None: none
    error: str | None = None
    failure: Failure | None = None  # None: it answered, or was not asked
    facts: EngineFacts | None = None
    num_engines: int = 1  # that answered at its address
    info: ServerInfo | None = ServerInfo()  # None: its /server_info did not answer in time
    publishers: tuple[EventSource, ...] | None = None  # None: it has no /kv_event_sources
    models: tuple[ModelSeen, ...] = ()
    takes_tools: bool | None = None  # whether a chat may offer tools
    ranks: tuple[RankSeen, ...] = ()
    bootstrap: str | None = None  # where its bootstrap server should be; None: it needs none
    has_bootstrap: bool = False  # it answers there

    @property
    def name(self) -> str:
        """Its name in this router."""
        return self.entry.name

    @property
    def url(self) -> str:
        """Its base URL."""
        return self.entry.replica.url.rstrip("/")

    @property
    def identity(self) -> str:
        """Its name among routers."""
        return self.entry.identity

    @property
    def num_ranks(self) -> int:
        """How many data-parallel ranks it has."""
        return self.facts.num_ranks if self.facts is not None else 1

    @property
    def seems(self) -> Role | None:
        """The role that it shows; None: it shows none."""
        said = self.info.role if self.info is not None else None
        return said or (self.facts.seems if self.facts is not None else None)
