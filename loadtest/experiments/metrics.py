"""The metrics: each is a sum over requests divided by a sum over requests.

Expressions are SQL over the table of `records.py`. They are NULL if a request has no such outcome
(no usage reported, not streamed, failed before).
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

HELD: Final = "greatest(coalesce(chosen.num_gpu_tokens, 0), coalesce(chosen.num_cpu_tokens, 0))"
_IS_OK: Final = "outcome = 'ok'"


class Metric(Struct, frozen=True, kw_only=True):
    """A metric. Relative ones are compared by their ratio, the others by their difference."""

    name: str
    title: str
    unit: str  # "ms", "tokens", "%": a share
    numerator: str
    denominator: str = "1"
    is_relative: bool = True
    is_lower_better: bool = True
    better: str = "lower"
    worse: str = "higher"
    has_percentiles: bool = False


_CACHED: Final = Metric(
    name="cached",
    title="cached share of the prompt (reported)",
    unit="%",
    numerator="reported",
    denominator="prompt",
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
            numerator="ttft_ms",
            better="faster",
            worse="slower",
            has_percentiles=True,
        ),
        Metric(
            name="tbt",
            title="inter-token latency (estimate)",
            unit="ms",
            numerator=f"CASE WHEN {_IS_OK} AND completion > 1 AND ttft_ms IS NOT NULL "
            "THEN greatest(0, total_ms - router_ms - ttft_ms) END",
            denominator="completion - 1",
            better="faster",
            worse="slower",
        ),
        Metric(
            name="total",
            title="total time",
            unit="ms",
            numerator=f"CASE WHEN {_IS_OK} THEN total_ms END",
            better="faster",
            worse="slower",
        ),
        Metric(
            name="recomputed",
            title="recomputed tokens per request",
            unit="tokens",
            numerator="prompt - reported",
        ),
        Metric(
            name="recomputed_predicted",
            title="recomputed tokens per request (predicted)",
            unit="tokens",
            numerator="prompt - predicted",
        ),
        _CACHED,
        replace(
            _CACHED,
            name="cached_predicted",
            title="cached share of the prompt (predicted)",
            numerator="predicted",
        ),
        Metric(
            name="pool",
            title="share of the prompt fetched from the pool (predicted)",
            unit="%",
            numerator=f"CASE WHEN predicted IS NOT NULL THEN greatest(0, predicted - {HELD}) END",
            denominator="prompt",
            is_relative=False,
        ),
        Metric(
            name="errors",
            title="error rate (no answer, 5xx, broken off)",
            unit="%",
            numerator="CAST(outcome IN ('replica_failed', 'replica_unreachable') AS INTEGER)",
            is_relative=False,
        ),
        Metric(
            name="gone",
            title="clients that left before the end",
            unit="%",
            numerator="CAST(outcome = 'client_gone' AS INTEGER)",
            is_relative=False,
        ),
        Metric(name="router", title="time in the router", unit="ms", numerator="router_ms"),
        Metric(
            name="ttft_error",
            title="error of the predicted first token (absolute)",
            unit="ms",
            numerator="abs(predicted_ttft_ms - ttft_ms)",
        ),
        Metric(
            name="cached_error",
            title="error of the predicted cached tokens (absolute)",
            unit="tokens",
            numerator="abs(predicted - reported)",
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
