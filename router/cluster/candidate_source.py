"""One candidate's event stream: what the replica says of it, and how to open it.

Names among routers: two routers may number their replicas differently: `r1` here is `r2` there. So
a stream's id is the replica's identity and the rank: `east#0`, `http://10.0.0.5:8000#2`. The
identity is the replica's name, or else its base URL. The rank is always part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from policies.view import CandidateId
from router.base.addresses import reachable_endpoint
from router.base.contracts import BlockKey
from router.base.errors import ConfigError
from router.base.host_names import Names
from router.base.messages import StreamId
from router.index.block_index import BlockIndex
from router.index.candidate_stream import StreamCounters
from router.kv_events.stream import RankStream
from router.kv_events.subscriber import EngineEvents, EventSource
from router.replicas.fleet import Fleet
from router.replicas.registry import Registry
from router.replicas.replica import candidate_id

_DEFAULT_BLOCK_SIZE: Final = 16
_DEFAULT_CAPACITY: Final = 8192  # blocks guessed for a replica that does not say


class Publisher(NamedTuple):
    """Where a candidate's events are published.

    url: The replica's; hosts that the endpoints leave out are taken from it.
    names: The addresses of hosts.
    """

    source: EventSource
    url: str
    names: Names

    def open(self) -> EngineEvents:
        """Open the event stream.

        Raises:
            ConfigError: an endpoint is not valid.
        """
        replay = self.source.replay_endpoint
        try:
            endpoint = reachable_endpoint(self.source.endpoint, self.url)
            replay_endpoint = reachable_endpoint(replay, self.url) if replay else None
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        return EngineEvents(
            endpoint,
            replay_endpoint,
            topic=self.source.topic,
            connects=self.source.connects,
            names=self.names,
        )


class CandidateSource:
    """Creates one candidate's stream, and opens its events.

    Args:
        candidate: The candidate's name.
        index: Where its blocks are put.
        publisher: Of its events; None: it has none.
        block_size: None: the replica does not say.
        capacity_blocks: None: the replica does not say.
        seeds: Texts to try as the engine's seed before the defaults.
        lora_paths: Adapter name to path.
        pool_stored: Takes what its connector wrote to the shared pool; None: it has none.
    """

    __slots__ = (
        "_block_size",
        "_capacity_blocks",
        "_counters",
        "_index",
        "_lora_paths",
        "_pool_stored",
        "_publisher",
        "_seeds",
        "candidate",
    )

    def __init__(
        self,
        candidate: CandidateId,
        index: BlockIndex,
        *,
        publisher: Publisher | None,
        block_size: int | None,
        capacity_blocks: int | None,
        seeds: Sequence[str] = (),
        lora_paths: Mapping[str, str] | None = None,
        pool_stored: Callable[[Sequence[BlockKey]], None] | None = None,
    ) -> None:
        self.candidate = candidate
        self._index = index
        self._publisher = publisher
        self._block_size = block_size or _DEFAULT_BLOCK_SIZE
        self._capacity_blocks = capacity_blocks or _DEFAULT_CAPACITY
        self._seeds = seeds
        self._lora_paths = lora_paths
        self._pool_stored = pool_stored
        self._counters = StreamCounters()  # one for all streams of the candidate's life

    @property
    def has_events(self) -> bool:
        """Whether there is anything to follow."""
        return self._publisher is not None

    def rank_stream(self) -> RankStream:
        """Create a stream that knows nothing yet."""
        return RankStream(
            self.candidate,
            self._index,
            block_size=self._block_size,
            capacity_blocks=self._capacity_blocks,
            seeds=self._seeds,
            lora_paths=self._lora_paths,
            pool_stored=self._pool_stored,
            counters=self._counters,
        )

    def events(self) -> EngineEvents:
        """Open the event stream.

        Raises:
            ConfigError: the endpoint is not valid.
        """
        assert self._publisher is not None
        return self._publisher.open()


class CandidateNames:
    """Translates both ways, as the registry and the fleet are at the moment."""

    __slots__ = ("_fleet", "_registry")

    def __init__(self, registry: Registry, fleet: Fleet) -> None:
        self._registry = registry
        self._fleet = fleet

    def stream_id_of(self, candidate: CandidateId) -> StreamId | None:
        """Find a candidate's stream id; None: its replica is not in the registry (any more)."""
        name, _, rank = candidate.partition("#")
        entry = self._registry.find(name)
        return StreamId(f"{entry.identity}#{rank or 0}") if entry is not None else None

    def candidate_of(self, stream_id: StreamId) -> CandidateId | None:
        """Find a stream's candidate; None: there is none here (yet)."""
        identity, _, rank = stream_id.rpartition("#")
        entry = self._registry.of_identity(identity)
        if entry is None:
            return None
        ranked = candidate_id(entry.name, int(rank)) if rank.isascii() and rank.isdigit() else None
        if ranked is not None and ranked in self._fleet.members.states:
            return ranked
        alone = candidate_id(entry.name, None)
        return alone if rank == "0" and alone in self._fleet.members.states else None
