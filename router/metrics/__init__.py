"""Every metric warmroute exports, its unit and its labels; nothing else names a metric.

    instruments   counters and histograms, pushed by the request and event paths   `Metrics`
    counting      what these add to: a step, no lock                            `Count`, …
    families      gauges and counters of a state, read at scrape time, never stale  `Family`
    states        what they are read from                                            `PoolState`, …

Labels come from small closed sets: replica names, states, tiers, reasons.
`docs/reference/metrics.md` is generated from these tables.
"""

from router.metrics.instruments import Metrics
from router.metrics.states import (
    ExperimentState,
    PoolState,
    SharingState,
    SourceState,
    StateSource,
)

__all__ = [
    "ExperimentState",
    "Metrics",
    "PoolState",
    "SharingState",
    "SourceState",
    "StateSource",
]
