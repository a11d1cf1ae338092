"""What the shadow policies would have done, from the records of live decisions.

All times are predictions, made the same way for the live choice and the shadow's. A shadow decides
single requests on the live policy's caches and queues. Its regret is the gain there, and says
little about a fleet under that policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from loadtest.experiments.records import Records, Request
from router.records.record import ShadowDecision

QUANTILES: Final = (0.1, 0.5, 0.9, 0.99)


class WhatIf(Struct, frozen=True, kw_only=True):
    """Another policy on the live one's snapshots; means per request, times in milliseconds.

    `regret_ms` is the live choice's predicted first-token time less the other's. It is positive if
    the other is faster.
    """

    policy: str
    num_decisions: int
    agreement: float
    ttft_ms: float
    live_ttft_ms: float
    uncached_tokens: float
    live_uncached_tokens: float
    fetched_tokens: float
    live_fetched_tokens: float
    regret_ms: float
    regret_quantiles: dict[str, float]  # p10, p50, p90, p99


class ShadowSummary(WhatIf, frozen=True, kw_only=True):
    """A shadow beside one live policy. Its mean regret is `gained_ms` less `lost_ms`."""

    live: str
    gained_ms: float
    lost_ms: float


def summarize(records: Records) -> tuple[ShadowSummary, ...]:
    """Return the summary of every shadow under each live policy."""
    found: dict[tuple[str, str], list[tuple[ShadowDecision, Request]]] = {}
    for request in records.requests:
        live = request.policy.partition(":")[0].partition(" ")[0]
        for shadow in request.shadows:
            found.setdefault((shadow.policy, live), []).append((shadow, request))
    return tuple(_summary(policy, live, found[policy, live]) for policy, live in sorted(found))


def named(quantiles: Iterable[float]) -> dict[str, float]:
    """Name the values of `QUANTILES`."""
    return {f"p{round(100 * q)}": value for q, value in zip(QUANTILES, quantiles, strict=True)}


def _summary(
    policy: str, live: str, pairs: Sequence[tuple[ShadowDecision, Request]]
) -> ShadowSummary:
    import numpy as np

    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    regrets = np.array([shadow.regret_ms for shadow, _ in pairs])
    return ShadowSummary(
        policy=policy,
        live=live,
        num_decisions=len(pairs),
        agreement=mean(shadow.agrees for shadow, _ in pairs),
        ttft_ms=mean(shadow.ttft_ms for shadow, _ in pairs),
        live_ttft_ms=mean(shadow.ttft_ms + shadow.regret_ms for shadow, _ in pairs),
        uncached_tokens=mean(shadow.num_uncached_tokens for shadow, _ in pairs),
        live_uncached_tokens=mean((r.prompt or 0) - (r.predicted or 0) for _, r in pairs),
        fetched_tokens=mean(shadow.num_fetched_tokens for shadow, _ in pairs),
        live_fetched_tokens=mean(max(0, (r.predicted or 0) - r.num_gpu_tokens) for _, r in pairs),
        regret_ms=float(regrets.mean()),
        regret_quantiles=named(np.quantile(regrets, QUANTILES).tolist()),
        gained_ms=float(np.maximum(regrets, 0).mean()),
        lost_ms=float(np.maximum(-regrets, 0).mean()),
    )
