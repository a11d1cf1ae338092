"""What a replica reports about itself, read from its pages: facts of a process, and its load.

What must live here: which page says what, and in which terms. What must not: I/O.

Everything that a replica reports is optional: what is missing is None, and the router does without.
A replica without `/kv_event_sources` is routed to approximately.

Ranks are numbered twice. Metrics (label `engine`), event sources and events have *global* numbers.
The header that names a rank counts a server's own ranks, from 0. They differ if each server has
some ranks of a larger group (vLLM 0.32 --data-parallel-external-lb, -hybrid-lb; v1/engine/
core_client.py `engine_ranks_managed`, input_processor.py `num_ranks`). A server's global numbers
are consecutive, so the lowest is its own 0. Outside of this file ranks have local numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from router.base.engines import V0_32, Role, is_at_least
from router.config import EventsConfig, ReplicaConfig
from router.discovery import engine_pages as engine_metrics
from router.discovery.engine_pages import EngineMetrics, SleepState
from router.kv_events.subscriber import EventSource
from router.replicas.candidate_state import EngineLoad
from router.replicas.health import Figures
from router.replicas.replica import EventPorts, ServedModel

_POOL_METRIC: Final = "vllm:mooncake_store_"  # of the connector (0.32.0), only if it is on
_FETCH_METRIC: Final = "vllm:num_requests_kv_fetch_by_stage"  # of what can load KV (0.32.0)
_DRAFTS_METRIC: Final = "vllm:spec_decode_num_drafts"  # only with speculative decoding (0.32.0)
_RUNNING: Final = "vllm:num_requests_running"
_PROGRESS: Final = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:kv_cache_usage_perc",
)


class EngineFacts(Struct, frozen=True, kw_only=True):
    """What a replica reports about itself. None: it does not report it."""

    models: tuple[ServedModel, ...]
    version: str | None
    block_size: int | None
    num_gpu_blocks: int | None  # per rank
    num_cache_tokens: int | None = None  # per rank, all KV groups counted
    prefix_caching: bool | None
    kv_dtype: str | None = None  # as its flag names it; `auto`: the model's own
    cache_shapes: frozenset[tuple[str, ...]] = frozenset()  # others: another process; empty: unsaid
    started_s: float | None  # unix seconds: another value means another process
    num_ranks: int
    event_sources: dict[int, EventSource]  # local rank -> publisher; empty: no events
    rank_numbers: tuple[int, ...] = ()  # global; empty: it does not say
    names_sources: bool = False  # it lists event sources, on or off: all its ranks are there
    has_pool_connector: bool = False  # it has Mooncake metrics; False: it has none, or no metrics
    sleep: SleepState = "awake"
    shows_pause: bool = False  # it has the route that says whether it is paused: it is in dev mode
    loads_kv: bool = False  # it has metrics of loading KV; False: it has none, or is too old
    speculates: bool = False  # it has metrics of speculative decoding; False: or no metrics

    @property
    def seems(self) -> Role | None:
        """The role that its metrics show; None: they do not.

        A connector that loads nothing is a producer's. A connector that loads is a consumer's, or
        both's. Source: vllm/v1/metrics/loggers.py, 0.32.0.
        """
        if self.has_pool_connector and not self.loads_kv and is_at_least(self.version, V0_32):
            return "prefill"
        return None

    def endpoints(self, config: EventsConfig, replica: ReplicaConfig) -> dict[int, EventSource]:
        """Choose each rank's event endpoints: configured ones, else those the replica reports."""
        if not config.enabled:
            return {}
        if not replica.events:
            return self.event_sources
        replay = replica.replay or (None,) * len(replica.events)
        return {
            rank: EventSource(endpoint=endpoint, replay_endpoint=replay[rank], is_configured=True)
            for rank, endpoint in enumerate(replica.events)
        }

    def event_ports(self, name: str, config: EventsConfig, replica: ReplicaConfig) -> EventPorts:
        """Pair the endpoints that are used with those that the replica reports."""
        used, reported = (
            {rank: (each.endpoint, each.replay_endpoint) for rank, each in sources.items()}
            for sources in (self.endpoints(config, replica), self.event_sources)
        )
        return EventPorts.of(name, replica.url, used, reported)


class RankLoads(Struct, frozen=True, kw_only=True):
    """The load of each rank, as the replica reports it."""

    started_s: float | None
    ranks: dict[int, EngineLoad]  # by local rank
    figures: Figures | None = None  # of its work, all ranks together; None: it shows none
    sleep: SleepState | None  # None: not known: it did not say whether it is paused
    rank_numbers: tuple[int, ...] = ()  # global; empty: it does not say
    cache_shapes: frozenset[tuple[str, ...]] = frozenset()  # as of EngineFacts


def read_facts(
    models: tuple[ServedModel, ...],
    metrics: EngineMetrics,
    sources: Mapping[int, EventSource] | None,
    *,
    version: str | None,
    is_paused: bool | None,
) -> EngineFacts:
    """Collect the facts of a process.

    Args:
        models: That it serves.
        metrics: Its page; an empty one if it has none.
        sources: By global rank; None: it lists none.
        version: None: it does not say.
        is_paused: None: it does not say.
    """
    info, sources = metrics.cache_config(), sources or {}
    ranks = metrics.by_rank(_RUNNING)
    numbers, sleep = _numbers(sources, ranks), metrics.sleep()
    return EngineFacts(
        models=models,
        version=version,
        block_size=engine_metrics.block_size(info.get("block_size")),
        num_gpu_blocks=_of_one_rank(engine_metrics.count(info.get("num_gpu_blocks")), ranks),
        num_cache_tokens=engine_metrics.count(info.get("kv_cache_size_tokens")) or None,
        prefix_caching=engine_metrics.flag(info.get("enable_prefix_caching")),
        kv_dtype=info.get("cache_dtype"),
        cache_shapes=metrics.cache_shapes(),
        started_s=metrics.started_s(),
        num_ranks=max(len(numbers), 1),
        event_sources={
            numbers.index(rank): source
            for rank, source in sources.items()
            if source.enable_kv_cache_events and source.publisher in ("zmq", None)
        },
        rank_numbers=numbers,
        names_sources=bool(sources),
        has_pool_connector=metrics.mentions(_POOL_METRIC),
        sleep="paused" if is_paused and sleep == "awake" else sleep,
        shows_pause=is_paused is not None,
        loads_kv=metrics.mentions(_FETCH_METRIC),
        speculates=metrics.mentions(_DRAFTS_METRIC),
    )


def read_loads(
    metrics: EngineMetrics,
    sources: Mapping[int, EventSource] | None,
    *,
    sleep: SleepState | None,
    now_s: float,
) -> RankLoads:
    """Collect the load of each rank.

    `sources`: by global rank, if it was asked for them; None: it did not answer.
    """
    running = metrics.by_rank(_RUNNING)
    waiting = metrics.by_rank("vllm:num_requests_waiting")
    usage = metrics.sums_by_rank("vllm:kv_cache_usage_perc")
    token_s = metrics.sums_by_rank("vllm:inter_token_latency_seconds_sum")
    num_tokens = metrics.by_rank("vllm:inter_token_latency_seconds_count")
    return RankLoads(
        started_s=metrics.started_s(),
        ranks={
            local: EngineLoad(
                num_running=running[rank],
                num_waiting=waiting.get(rank, 0),
                at_s=now_s,
                kv_usage=usage.get(rank),
                token_s=token_s.get(rank, 0.0),
                num_tokens=num_tokens.get(rank, 0),
            )
            for local, rank in enumerate(_numbers({}, running))
        },
        rank_numbers=_numbers(sources, running) if sources is not None else (),
        sleep=sleep,
        cache_shapes=metrics.cache_shapes(),
        figures=_figures(metrics, sum(running.values()) + sum(waiting.values()))
        if running
        else None,
    )


def _figures(metrics: EngineMetrics, num_requests: int) -> Figures:
    """Read what shows that an engine works: tokens computed, and the cache in use.

    A long prompt counts when it has been computed; meanwhile it takes blocks. Source: vLLM 0.32
    v1/metrics/loggers.py, set after each step.
    """
    totals = [metrics.sums_by_rank(name) for name in _PROGRESS]
    return Figures(
        num_requests=num_requests, progress=tuple(sum(ranks.values()) for ranks in totals)
    )


def _numbers(sources: Mapping[int, EventSource], ranks: Mapping[int, int]) -> tuple[int, ...]:
    """List a replica's ranks, global numbers: those with event sources, else those with metrics."""
    return tuple(sorted(sources or ranks)[: engine_metrics.MAX_RANKS])


def _of_one_rank(num_blocks: int | None, ranks: Mapping[int, int]) -> int | None:
    """Return the blocks of one rank: vLLM sums them over a server's ranks, in every line.

    Metrics also show ranks that were scaled away, and so does the sum (vLLM 0.32
    v1/engine/core_client.py `_apply_ready_response`).
    """
    return num_blocks // max(1, len(ranks)) if num_blocks is not None else None
