"""What the shadow policies would have done, from the records of live decisions.

All times are predictions, made the same way for the live choice and the shadow's. A shadow decides
single requests on the live policy's caches and queues. Its regret is the gain there, and says
little about a fleet under that policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from msgspec import Struct

from loadtest.experiments.records import Records

QUANTILES: Final = (0.1, 0.5, 0.9, 0.99)

_QUERY: Final = """
WITH choices AS (
  SELECT policy AS live, unnest(shadows, recursive := false) AS s, prompt - predicted AS uncached,
    greatest(0, predicted - coalesce(chosen.num_gpu_tokens, 0)) AS fetched
  FROM records WHERE len(shadows) > 0
)
SELECT s.policy, live, count(*), avg(CAST(s.agrees AS DOUBLE)), avg(s.ttft_ms),
  avg(s.ttft_ms + s.regret_ms), avg(s.num_uncached_tokens), avg(uncached),
  avg(s.num_fetched_tokens), avg(fetched), avg(s.regret_ms),
  quantile_cont(s.regret_ms, [{quantiles}]),
  avg(CASE WHEN s.regret_ms > 0 THEN s.regret_ms ELSE 0 END),
  avg(CASE WHEN s.regret_ms < 0 THEN -s.regret_ms ELSE 0 END)
FROM choices GROUP BY 1, 2 ORDER BY 1, 2
"""


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
    query = _QUERY.format(quantiles=", ".join(map(str, QUANTILES)))
    return tuple(_summary(row) for row in records.rows(query))


def named(quantiles: Iterable[float]) -> dict[str, float]:
    """Name the values of `QUANTILES`."""
    return {f"p{round(100 * q)}": value for q, value in zip(QUANTILES, quantiles, strict=True)}


def _summary(row: tuple[Any, ...]) -> ShadowSummary:
    return ShadowSummary(
        policy=row[0],
        live=row[1],
        num_decisions=row[2],
        agreement=row[3],
        ttft_ms=row[4],
        live_ttft_ms=row[5],
        uncached_tokens=row[6],
        live_uncached_tokens=row[7],
        fetched_tokens=row[8],
        live_fetched_tokens=row[9],
        regret_ms=row[10],
        regret_quantiles=named(row[11]),
        gained_ms=row[12],
        lost_ms=row[13],
    )
