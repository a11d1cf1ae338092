"""Every metric warmroute exports, its unit and its labels; nothing else names a metric.

Counters and histograms are pushed by the two ways (pipeline, ingest); gauges about replicas are
pulled at scrape time from a `StateSource`, so that they cannot go stale. Labels come from small
closed sets: replica names, states, tiers, reasons. `docs/metrics.md` is made from this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_STAGE_BUCKETS = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.25, 1)
_TOKEN_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


class RankState(Struct, frozen=True, kw_only=True):
    """What one candidate looks like at scrape time."""

    replica: str  # candidate id: `r1`, `r1#2`
    state: str  # exact | degraded | blind
    healthy: bool
    num_requests: int
    num_queued_tokens: int
    queue_ms: float
    num_blocks: dict[str, int]  # tier -> blocks in the index
    events: dict[str, int]  # counter name -> value, since the router started
    cost_error_ms: float
    trust: float  # share of recent audited predictions that were right, 1.0 before the first


class StateSource(Protocol):
    """Whoever knows the replicas: the lifecycle."""

    def rank_states(self) -> Iterable[RankState]:
        """Describe every candidate now; called at scrape time, on the event loop."""
        ...


class Metrics:
    """The router's instruments, on a registry of its own (several routers fit in one process)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "warmroute_requests",
            "Requests answered, by API, replica that answered and outcome",
            ["api", "replica", "outcome"],
            registry=r,
        )
        self.decisions = Counter(
            "warmroute_decisions",
            "Decisions, by policy and by how well the chosen replica's cache was known",
            ["policy", "state"],
            registry=r,
        )
        self.failovers = Counter(
            "warmroute_failovers",
            "Tries that failed before the first byte and were moved on, by replica and reason",
            ["replica", "reason"],
            registry=r,
        )
        self.refused = Counter(
            "warmroute_refused",
            "Requests answered with an error by the router itself, by code",
            ["code"],
            registry=r,
        )
        self.ttft = Histogram(
            "warmroute_ttft_seconds",
            "From a request's arrival to the first byte of its answer",
            ["replica"],
            buckets=_TTFT_BUCKETS,
            registry=r,
        )
        self.ttft_error = Histogram(
            "warmroute_ttft_prediction_error_seconds",
            "Absolute difference of predicted and observed time to first token",
            ["replica"],
            buckets=_TTFT_BUCKETS,
            registry=r,
        )
        self.stage = Histogram(
            "warmroute_stage_seconds",
            "Time spent in the router, by stage of a request",
            ["stage"],
            buckets=_STAGE_BUCKETS,
            registry=r,
        )
        self.tokens = Counter(
            "warmroute_tokens",
            "Prompt tokens, by replica and kind: prompt, predicted_cached, reported_cached",
            ["replica", "kind"],
            registry=r,
        )
        self.audit = Counter(
            "warmroute_audited",
            "Predictions of cached tokens held against the engine's usage: exact, over, under",
            ["replica", "result"],
            registry=r,
        )
        self.audit_error = Histogram(
            "warmroute_audit_error_tokens",
            "Absolute difference of predicted and reported cached tokens",
            ["replica"],
            buckets=_TOKEN_BUCKETS,
            registry=r,
        )
        self.tokenized = Counter(
            "warmroute_tokenized_requests",
            "Prompts turned into tokens, by way: local, engine, unknown",
            ["way"],
            registry=r,
        )
        self.token_mismatches = Counter(
            "warmroute_token_mismatches",
            "Prompts whose local tokens were not the engine's (usage, template) or a full encode's",
            ["model", "against"],
            registry=r,
        )
        self.loop_lag = Histogram(
            "warmroute_loop_lag_seconds",
            "How late the event loop woke a timer: anything that blocked it",
            buckets=_STAGE_BUCKETS,
            registry=r,
        )
        self.records_dropped = Counter(
            "warmroute_decision_records_dropped",
            "Decision records lost because their writer was behind",
            registry=r,
        )

    def watch(self, source: StateSource) -> None:
        """Pull replica gauges from `source` at every scrape."""
        self.registry.register(_StateCollector(source))

    def render(self) -> bytes:
        """Render the text exposition format."""
        return generate_latest(self.registry)


class _StateCollector(Collector):
    def __init__(self, source: StateSource) -> None:
        self._source = source

    def describe(self) -> list[Metric]:
        return []  # nothing to check for duplicates before the first scrape

    def collect(self) -> Iterator[Metric]:
        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"warmroute_{name}", text, labels=["replica", *labels])

        state = gauge("replica_state", "1 for the state the replica's cache view is in", "state")
        healthy = gauge("replica_healthy", "1 while the replica may be chosen")
        requests = gauge("inflight_requests", "Requests in flight")
        queued = gauge("inflight_uncached_tokens", "Uncached tokens before their first token")
        queue = gauge("queue_seconds", "Predicted time until the prefills in flight are done")
        blocks = gauge("index_blocks", "Blocks the index credits to the replica", "tier")
        error = gauge("cost_model_error_seconds", "Mean absolute error of recent TTFT predictions")
        trust = gauge("trust_ratio", "Share of recent audited predictions that were right")
        events = CounterMetricFamily(
            "warmroute_kv_events",
            "KV events of the replica by what became of them",
            labels=["replica", "kind"],
        )
        for rank in self._source.rank_states():
            for name in ("exact", "degraded", "blind"):
                state.add_metric([rank.replica, name], float(rank.state == name))
            healthy.add_metric([rank.replica], float(rank.healthy))
            requests.add_metric([rank.replica], rank.num_requests)
            queued.add_metric([rank.replica], rank.num_queued_tokens)
            queue.add_metric([rank.replica], rank.queue_ms / 1000)
            error.add_metric([rank.replica], rank.cost_error_ms / 1000)
            trust.add_metric([rank.replica], rank.trust)
            for tier, count in rank.num_blocks.items():
                blocks.add_metric([rank.replica, tier], count)
            for kind, count in rank.events.items():
                events.add_metric([rank.replica, kind], count)
        yield from (state, healthy, requests, queued, queue, blocks, error, trust, events)
