"""`/metrics` under the engine's own names, labels and buckets.

Source: `/metrics` of vLLM 0.32.0. Metrics of hardware or of features without a counterpart here
(flops, multimodal cache) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry

from loadtest.emulator.bounds import LATENCY_S, TTFT_S
from loadtest.emulator.engine import Engine
from loadtest.emulator.options import EmulatorOptions
from router.metrics.counting import Distribution

CONTENT_TYPE: Final = "text/plain; version=1.0.0; charset=utf-8"


class RankStats:
    """Counts of the HTTP side for one rank."""

    __slots__ = ("e2e_s", "finished", "queue_and_prefill_s")

    def __init__(self) -> None:
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.queue_and_prefill_s = Distribution(TTFT_S)
        self.e2e_s = Distribution(LATENCY_S)


class EngineMetrics(Collector):
    """Reads all ranks when asked; costs the requests nothing."""

    def __init__(
        self,
        options: EmulatorOptions,
        ranks: Sequence[tuple[Engine, RankStats]],
        *,
        sleep_level: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._options = options
        self._sleep_level = sleep_level
        self._ranks = ranks
        self._model = options.served_model_names[0]
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for name, text, gauge in _GAUGES:
            yield self._family(
                GaugeMetricFamily, name, text, [gauge(engine) for engine, _ in self._ranks]
            )
        for name, text in _COUNTERS.items():
            totals = [getattr(engine.scheduler.stats, f"num_{name}") for engine, _ in self._ranks]
            yield self._family(CounterMetricFamily, _NAMES.get(name, name), text, totals)
        if self._options.eagle or self._options.lookahead:  # here nothing is ever drafted
            text = "Number of spec decoding drafts."
            none = [0] * len(self._ranks)
            yield self._family(CounterMetricFamily, "spec_decode_num_drafts", text, none)
        for name, text, distribution in _HISTOGRAMS:
            yield self._histogram(name, text, [distribution(*rank) for rank in self._ranks])
        yield self._labelled(
            CounterMetricFamily,
            "request_success",
            "Count of successfully processed requests.",
            "finished_reason",
            lambda stats: stats.finished,
        )
        yield self._sleep_state()
        yield from self._pool()
        yield self._cache_config()

    def _sleep_state(self) -> Metric:
        level = self._sleep_level()
        states = {
            "awake": level is None,
            "weights_offloaded": level == 1,
            "discard_all": level == 2,
        }
        return self._labelled(
            GaugeMetricFamily,
            "engine_sleep_state",
            "Engine sleep state; awake = 0 means engine is sleeping.",
            "sleep_state",
            lambda _: states,
        )

    def _pool(self) -> Iterator[Metric]:
        """Yield what a connector to a pool adds; routers look for the names."""
        if self._options.pool is None:
            return
        store = CounterMetricFamily(
            "vllm:mooncake_store_operation",
            "Number of Mooncake store operations.",
            labels=("engine", "model_name", "operation", "status"),
        )
        for rank in range(len(self._ranks)):
            store.add_metric((str(rank), self._model, "put", "ok"), 0)
        yield store
        if self._options.kv_role != "producer":
            yield self._labelled(
                GaugeMetricFamily,
                "num_requests_kv_fetch_by_stage",
                "Number of waiting requests by async KV load stage.",
                "stage",
                lambda _: {"in_progress": 0},
            )

    def _family(self, kind: Any, name: str, text: str, values: Iterable[float]) -> Metric:
        family: Metric = kind(f"vllm:{name}", text, labels=("engine", "model_name"))
        for rank, value in enumerate(values, self._options.first_rank):
            family.add_metric((str(rank), self._model), value)  # type: ignore[attr-defined]
        return family

    def _labelled(
        self,
        kind: Any,
        name: str,
        text: str,
        label: str,
        values: Callable[[RankStats], dict[str, Any]],
    ) -> Metric:
        """Write a family with one more label, by its values."""
        labels = sorted(("engine", "model_name", label))
        family: Metric = kind(f"vllm:{name}", text, labels=labels)
        for rank, (_, stats) in enumerate(self._ranks, self._options.first_rank):
            for value, number in values(stats).items():
                given = {"engine": str(rank), "model_name": self._model, label: value}
                family.add_metric([given[each] for each in labels], int(number))  # type: ignore[attr-defined]
        return family

    def _histogram(self, name: str, text: str, values: Iterable[Distribution]) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=("engine", "model_name"))
        for rank, value in enumerate(values, self._options.first_rank):
            family.add_metric((str(rank), self._model), value.buckets(), value.sum)
        return family

    def _cache_config(self) -> Metric:
        options = self._options
        labels = {
            "block_size": options.block_size,
            "cache_dtype": options.kv_cache_dtype,
            "enable_prefix_caching": options.enable_prefix_caching,
            "gpu_memory_utilization": 0.9,
            "kv_cache_size_tokens": options.num_cache_tokens(),
            "num_cpu_blocks": None,
            "num_gpu_blocks": options.num_gpu_blocks * len(self._ranks),  # as vLLM sums them
            "num_gpu_blocks_override": None,
            "prefix_caching_hash_algo": options.hash_algorithm,
            "sliding_window": None,
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=("engine", *labels),
        )
        for rank, _ in enumerate(self._ranks, options.first_rank):
            family.add_metric((str(rank), *map(str, labels.values())), 1)
        return family


_GAUGES: Final[Sequence[tuple[str, str, Callable[[Engine], float]]]] = (
    (
        "num_requests_running",
        "Number of requests in model execution batches.",
        lambda engine: len(engine.scheduler.running),
    ),
    (
        "num_requests_waiting",
        "Number of requests waiting to be processed.",
        lambda engine: len(engine.scheduler.waiting),
    ),
    (
        "kv_cache_usage_perc",
        "KV-cache usage. 1 means 100 percent usage.",
        lambda engine: engine.blocks.usage,
    ),
)
_COUNTERS: Final = {
    "cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "preemptions": "Cumulative number of preemption from the engine.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "generation_tokens": "Number of generation tokens processed.",
}
"""Counters of the scheduler, by their name there without `num_`."""
_NAMES: Final = {
    "cache_queries": "prefix_cache_queries",
    "cache_hits": "prefix_cache_hits",
    "preemptions": "num_preemptions",
}
_HISTOGRAMS: Final[Sequence[tuple[str, str, Callable[[Engine, RankStats], Distribution]]]] = (
    (
        "time_to_first_token_seconds",
        "Histogram of time to first token in seconds.",
        lambda _, stats: stats.queue_and_prefill_s,
    ),
    (
        "inter_token_latency_seconds",
        "Histogram of inter-token latency in seconds.",
        lambda engine, _: engine.between_tokens_s,
    ),
    (
        "e2e_request_latency_seconds",
        "Histogram of e2e request latency in seconds.",
        lambda _, stats: stats.e2e_s,
    ),
)
