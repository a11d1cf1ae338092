"""The metrics of requests that have ended: outcomes, times, tokens."""

from __future__ import annotations

from router.metrics import Metrics
from router.metrics.instruments import CandidateTable, StageInstruments
from router.request.observer import Facts, Observer
from router.request.results import Placement, Read


class RequestCounts(Observer):
    """Counts requests."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._stages = StageInstruments(metrics)
        self._instruments = CandidateTable(metrics)

    def counted(self, read: Read, num_tokens: int) -> None:
        self._metrics.counted.labels("router").inc()

    def ended(self, facts: Facts) -> None:
        waited_s = facts.tries.wait.waited_ms / 1000
        label = facts.read.inbound.caller.label
        if label is not None:
            self._count_caller(facts, label, waited_s)
        if facts.placement is not None:
            self._count(facts, facts.placement, waited_s)

    def _count_caller(self, facts: Facts, label: str, waited_s: float) -> None:
        metrics = self._metrics
        metrics.tenant_requests.labels(label, facts.outcome.value).inc()
        if facts.placement is not None:
            num_tokens, num_cached = facts.prompt.num_tokens, facts.num_reported_cached_tokens
            if num_cached is None:
                num_cached = facts.num_predicted_cached_tokens
            metrics.tenant_tokens.labels(label, "prompt").inc(num_tokens)
            if facts.is_answered:
                num_uncached = max(num_tokens - num_cached, 0)
                metrics.tenant_tokens.labels(label, "uncached").inc(num_uncached)
        if waited_s or facts.placement is None:
            metrics.tenant_waits.labels(label).inc(waited_s)

    def _count(self, facts: Facts, placement: Placement, waited_s: float) -> None:
        prompt, inbound = facts.prompt, facts.read.inbound
        name, arrived_s = placement.lease.candidate, inbound.arrived_s
        metrics, stages = self._instruments[name], self._stages
        if inbound.api.counts:
            self._metrics.counted.labels("engine").inc()
        self._metrics.requests.labels(inbound.api.name, name, facts.outcome.value).inc()
        if facts.first_s is not None:
            metrics.ttft.observe(facts.first_s - arrived_s)
        stages.tokenize.observe(prompt.tokenized_s - arrived_s)
        stages.place.observe(placement.placed_s - prompt.tokenized_s - waited_s)
        stages.total.observe(placement.placed_s - arrived_s - waited_s)
        held = placement.predicted
        metrics.prompt_tokens.inc(prompt.num_tokens)
        metrics.predicted_tokens.inc(facts.num_predicted_cached_tokens)
        metrics.cpu_tokens.inc(held.num_cpu_only_tokens)
        metrics.pool_tokens.inc(held.num_fetched_tokens)
        if facts.ttft_ms is not None:
            error_ms = abs(facts.ttft_ms - placement.predicted_ttft_ms)
            metrics.ttft_error.observe(error_ms / 1000)
