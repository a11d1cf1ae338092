"""The metrics that warmroute exports; those of one observer alone are in its folder.

    instruments   counters and histograms, pushed by the request and event paths   `Metrics`
    counting      what these add to: a step, no lock                            `Count`, …
    families      gauges and counters of a state, read at scrape time, never stale  `Family`

Labels come from small closed sets: replica names, states, tiers, reasons.
`docs/reference/every-metric.md` is generated from these tables.
"""

from router.metrics.instruments import Metrics

__all__ = ["Metrics"]
