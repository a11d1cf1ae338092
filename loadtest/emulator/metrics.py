"""`/metrics` under the engine's own names, labels and buckets.

Source: `/metrics` of vLLM 0.32.0. Those that describe hardware or features without a counterpart
here (flops, multimodal cache) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

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
    """What the HTTP side counts for one rank."""

    __slots__ = ("e2e_s", "finished", "queue_and_prefill_s")

    def __init__(self) -> None:
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.queue_and_prefill_s = Distribution(TTFT_S)
        self.e2e_s = Distribution(LATENCY_S)


class EngineMetrics(Collector):
    """Reads all ranks when asked; costs the data path nothing."""

    def __init__(
        self,
        options: EmulatorOptions,
        engines: list[Engine],
        stats: list[RankStats],
        *,
        sleep_level: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._options = options
        self._sleep_level = sleep_level
        self._ranks = list(zip(engines, stats, strict=True))
        self._model = options.served_model_names[0]
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield self._cache_config()

    def _gauges(self) -> Iterator[Metric]:
        yield self._gauge(
            "num_requests_running",
            "Number of requests in model execution batches.",
            [len(engine.scheduler.running) for engine, _ in self._ranks],
        )
        yield self._gauge(
            "num_requests_waiting",
            "Number of requests waiting to be processed.",
            [len(engine.scheduler.waiting) for engine, _ in self._ranks],
        )
        yield self._gauge(
            "kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            [engine.blocks.usage for engine, _ in self._ranks],
        )

        yield self._sleep_state()
        if self._options.pool is not None:
            store = CounterMetricFamily(
                "vllm:mooncake_store_operation",
                "Number of Mooncake store operations.",
                labels=("engine", "model_name", "operation", "status"),
            )
            for rank in range(len(self._ranks)):
                store.add_metric((str(rank), self._model, "put", "ok"), 0)
            yield store
        if self._options.pool is not None and self._options.kv_role != "producer":
            family = GaugeMetricFamily(
                "vllm:num_requests_kv_fetch_by_stage",
                "Number of waiting requests by async KV load stage.",
                labels=("engine", "model_name", "stage"),
            )
            for rank in range(len(self._ranks)):
                family.add_metric((str(rank), self._model, "in_progress"), 0)
            yield family

    def _sleep_state(self) -> Metric:
        family = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "Engine sleep state; awake = 0 means engine is sleeping.",
            labels=("engine", "model_name", "sleep_state"),
        )
        level = self._sleep_level()
        for rank in range(len(self._ranks)):
            for name, value in (
                ("awake", level is None),
                ("weights_offloaded", level == 1),
                ("discard_all", level == 2),
            ):
                family.add_metric((str(rank), self._model, name), int(value))
        return family

    def _counters(self) -> Iterator[Metric]:
        totals = [engine.scheduler.stats for engine, _ in self._ranks]
        for name, text, values in (
            (
                "prefix_cache_queries",
                "Prefix cache queries, in terms of number of queried tokens.",
                [total.num_cache_queries for total in totals],
            ),
            (
                "prefix_cache_hits",
                "Prefix cache hits, in terms of number of cached tokens.",
                [total.num_cache_hits for total in totals],
            ),
            (
                "num_preemptions",
                "Cumulative number of preemption from the engine.",
                [total.num_preemptions for total in totals],
            ),
            (
                "prompt_tokens",
                "Number of prefill tokens processed.",
                [total.num_prompt_tokens for total in totals],
            ),
            (
                "generation_tokens",
                "Number of generation tokens processed.",
                [total.num_generation_tokens for total in totals],
            ),
            *self._drafts(),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=("engine", "model_name"))
            for rank, value in enumerate(values, self._options.first_rank):
                family.add_metric((str(rank), self._model), value)
            yield family
        finished = CounterMetricFamily(
            "vllm:request_success",
            "Count of successfully processed requests.",
            labels=("engine", "finished_reason", "model_name"),
        )
        for rank, (_, stats) in enumerate(self._ranks, self._options.first_rank):
            for reason, count in stats.finished.items():
                finished.add_metric((str(rank), reason, self._model), count)
        yield finished

    def _histograms(self) -> Iterator[Metric]:
        yield self._histogram(
            "time_to_first_token_seconds",
            "Histogram of time to first token in seconds.",
            [stats.queue_and_prefill_s for _, stats in self._ranks],
        )
        yield self._histogram(
            "inter_token_latency_seconds",
            "Histogram of inter-token latency in seconds.",
            [engine.scheduler.stats.between_tokens_s for engine, _ in self._ranks],
        )
        yield self._histogram(
            "e2e_request_latency_seconds",
            "Histogram of e2e request latency in seconds.",
            [stats.e2e_s for _, stats in self._ranks],
        )

    def _drafts(self) -> list[tuple[str, str, list[int]]]:
        """List what vLLM has with speculative decoding alone; here nothing is ever drafted."""
        if not (self._options.eagle or self._options.lookahead):
            return []
        none = [0] * len(self._ranks)
        return [("spec_decode_num_drafts", "Number of spec decoding drafts.", none)]

    def _gauge(self, name: str, text: str, values: Iterable[float]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=("engine", "model_name"))
        for rank, value in enumerate(values, self._options.first_rank):
            family.add_metric((str(rank), self._model), value)
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
