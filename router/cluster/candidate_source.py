"""One candidate's event stream: what the replica says of it, and how to open it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from policies.view import CandidateId
from router.addresses import reachable_endpoint
from router.contracts import BlockKey
from router.errors import ConfigError
from router.index.block_index import BlockIndex
from router.index.counters import StreamCounters
from router.kv_events.stream import RankStream
from router.kv_events.subscriber import EngineEvents, EventSource

_DEFAULT_BLOCK_SIZE: Final = 16
_DEFAULT_CAPACITY: Final = 8192  # blocks guessed for a replica that does not say


class CandidateSource:
    """Creates one candidate's stream, and opens its events.

    Args:
        candidate: The candidate's name.
        index: Where its blocks are put.
        url: The replica's; hosts that an endpoint leaves out are taken from it.
        endpoint: Its event publisher; None: it has none.
        replay_timeout_s: Longest wait for the next replay reply.
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
        "_endpoint",
        "_index",
        "_lora_paths",
        "_pool_stored",
        "_replay_timeout_s",
        "_seeds",
        "_url",
        "candidate",
    )

    def __init__(
        self,
        candidate: CandidateId,
        index: BlockIndex,
        *,
        url: str,
        endpoint: EventSource | None,
        replay_timeout_s: float,
        block_size: int | None,
        capacity_blocks: int | None,
        seeds: Sequence[str] = (),
        lora_paths: Mapping[str, str] | None = None,
        pool_stored: Callable[[Sequence[BlockKey]], None] | None = None,
    ) -> None:
        self.candidate = candidate
        self._index = index
        self._url = url
        self._endpoint = endpoint
        self._replay_timeout_s = replay_timeout_s
        self._block_size = block_size or _DEFAULT_BLOCK_SIZE
        self._capacity_blocks = capacity_blocks or _DEFAULT_CAPACITY
        self._seeds = seeds
        self._lora_paths = lora_paths
        self._pool_stored = pool_stored
        self._counters = StreamCounters()  # one for all streams of the candidate's life

    @property
    def has_events(self) -> bool:
        """Whether there is anything to follow."""
        return self._endpoint is not None

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
        assert self._endpoint is not None
        replay = self._endpoint.replay_endpoint
        try:
            endpoint = reachable_endpoint(self._endpoint.endpoint, self._url)
            replay_endpoint = reachable_endpoint(replay, self._url) if replay else None
        except ValueError as exc:
            raise ConfigError(str(exc)) from exc
        return EngineEvents(
            endpoint,
            replay_endpoint,
            topic=self._endpoint.topic,
            replay_timeout_s=self._replay_timeout_s,
            connects=self._endpoint.connects,
        )
