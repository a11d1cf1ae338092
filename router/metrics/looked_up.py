"""Instruments with their labels set: each request counts with them."""

from __future__ import annotations

from router.metrics.instruments import Metrics


class StageInstruments:
    """The stages' histograms, looked up once."""

    __slots__ = ("place", "tokenize", "total")

    def __init__(self, metrics: Metrics) -> None:
        self.tokenize = metrics.stage.labels("tokenize")
        self.place = metrics.stage.labels("place")
        self.total = metrics.stage.labels("total")


class CandidateInstruments:
    """One candidate's instruments, looked up once."""

    __slots__ = (
        "audit",
        "audit_error",
        "cpu_tokens",
        "pool_tokens",
        "predicted_tokens",
        "prompt_tokens",
        "reported_tokens",
        "ttft",
        "ttft_error",
    )

    def __init__(self, metrics: Metrics, name: str) -> None:
        self.ttft = metrics.ttft.labels(name)
        self.ttft_error = metrics.ttft_error.labels(name)
        self.prompt_tokens = metrics.tokens.labels(name, "prompt")
        self.predicted_tokens = metrics.tokens.labels(name, "predicted_cached")
        self.cpu_tokens = metrics.tokens.labels(name, "predicted_cpu")
        self.pool_tokens = metrics.tokens.labels(name, "predicted_pool")
        self.reported_tokens = metrics.tokens.labels(name, "reported_cached")
        self.audit_error = metrics.audit_error.labels(name)
        self.audit = {
            result: metrics.audit.labels(name, result)
            for result in ("exact", "over", "under", "evicted", "partial")
        }


class CandidateTable(dict[str, CandidateInstruments]):
    """The instruments of all candidates by name, each made when it is first asked for."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._metrics = metrics
        metrics.on_dropped.append(lambda name: self.pop(name, None))

    def __missing__(self, name: str) -> CandidateInstruments:
        found = self[name] = CandidateInstruments(self._metrics, name)
        return found
