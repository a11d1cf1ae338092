"""The metrics: each is a sum over requests divided by a sum over requests.

A value is None if a request has no such outcome (no usage reported, not streamed, failed before).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from loadtest.experiments.records import Request

Value = Callable[[Request], float | None]

_FAILED: Final = ("replica_failed", "replica_unreachable")


def _less(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _tbt(request: Request) -> float | None:
    """Return the time from the first token to the end of an answer."""
    if request.outcome != "ok" or request.ttft_ms is None or (request.completion or 0) <= 1:
        return None
    return max(0.0, request.total_ms - (request.router_ms or 0.0) - request.ttft_ms)


def _pooled(request: Request) -> float | None:
    return None if request.predicted is None else max(0, request.predicted - request.held)


def _distance(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else abs(one - other)


class Metric(Struct, frozen=True, kw_only=True):
    """A metric. Relative ones are compared by their ratio, the others by their difference."""

    name: str
    title: str
    unit: str  # "ms", "tokens", "%": a share
    numerator: Value
    denominator: Value = lambda request: 1.0
    is_relative: bool = True
    is_lower_better: bool = True
    better: str = "lower"
    worse: str = "higher"
    has_percentiles: bool = False


_CACHED: Final = Metric(
    name="cached",
    title="cached share of the prompt (reported)",
    unit="%",
    numerator=lambda request: request.reported,
    denominator=lambda request: request.prompt,
    is_relative=False,
    is_lower_better=False,
    better="higher",
    worse="lower",
)

METRICS: Final = {
    metric.name: metric
    for metric in (
        Metric(
            name="ttft",
            title="time to first token",
            unit="ms",
            numerator=lambda request: request.ttft_ms,
            better="faster",
            worse="slower",
            has_percentiles=True,
        ),
        Metric(
            name="tbt",
            title="inter-token latency (estimate)",
            unit="ms",
            numerator=_tbt,
            denominator=lambda request: (request.completion or 0) - 1,
            better="faster",
            worse="slower",
        ),
        Metric(
            name="total",
            title="total time",
            unit="ms",
            numerator=lambda request: request.total_ms if request.outcome == "ok" else None,
            better="faster",
            worse="slower",
        ),
        Metric(
            name="computed",
            title="computed tokens per request",
            unit="tokens",
            numerator=lambda request: _less(request.prompt, request.reported),
        ),
        Metric(
            name="computed_predicted",
            title="computed tokens per request (predicted)",
            unit="tokens",
            numerator=lambda request: _less(request.prompt, request.predicted),
        ),
        _CACHED,
        replace(
            _CACHED,
            name="cached_predicted",
            title="cached share of the prompt (predicted)",
            numerator=lambda request: request.predicted,
        ),
        Metric(
            name="pool",
            title="share of the prompt fetched from the pool (predicted)",
            unit="%",
            numerator=_pooled,
            denominator=lambda request: request.prompt,
            is_relative=False,
        ),
        Metric(
            name="errors",
            title="error rate (no answer, 5xx, broken off)",
            unit="%",
            numerator=lambda request: float(request.outcome in _FAILED),
            is_relative=False,
        ),
        Metric(
            name="gone",
            title="clients that left before the end",
            unit="%",
            numerator=lambda request: float(request.outcome == "client_gone"),
            is_relative=False,
        ),
        Metric(
            name="router",
            title="time in the router",
            unit="ms",
            numerator=lambda request: request.router_ms,
        ),
        Metric(
            name="ttft_error",
            title="error of the predicted first token (absolute)",
            unit="ms",
            numerator=lambda request: _distance(request.predicted_ttft_ms, request.ttft_ms),
        ),
        Metric(
            name="cached_error",
            title="error of the predicted cached tokens (absolute)",
            unit="tokens",
            numerator=lambda request: _distance(request.predicted, request.reported),
        ),
    )
}
"""All metrics, in the order of a report."""

VERDICT_METRICS: Final = tuple(
    name for name in METRICS if not name.endswith(("_predicted", "_error"))
)
"""The metrics that can decide an experiment."""

_PARTS: Final = {"split": "session", "switchback": "slot"}


def unit_noun(design: str, num: int = 1) -> str:
    """Return the word for what was randomised."""
    noun = _PARTS.get(design, "unit")
    return noun if num == 1 else f"{noun}s"
