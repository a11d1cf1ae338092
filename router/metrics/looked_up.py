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


class CandidateTable:
    """The instruments of all candidates, each made when it is first asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._by_name: dict[str, CandidateInstruments] = {}
        metrics.on_dropped.append(lambda name: self._by_name.pop(name, None))

    def of(self, name: str) -> CandidateInstruments:
        """Return the instruments of a candidate."""
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = CandidateInstruments(self._metrics, name)
        return found
