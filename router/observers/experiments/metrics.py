"""The metrics of experiments: what is counted, and how the experiment stands at scrape time."""

from __future__ import annotations

from typing import Annotated, Final

from router.config.experiments import Experiment
from router.metrics.counting import Counter, Histogram
from router.metrics.families import Family
from router.metrics.instruments import TTFT_BUCKETS, Instruments, Spec


class ExperimentMetrics(Instruments):
    """Requests by variant."""

    # fmt: off
    variant_requests: Annotated[Counter, Spec("warmroute_variant_requests",
        "experiment variant outcome",
        "Requests of a variant that count for the experiment, by outcome")]
    variant_not_counted: Annotated[Counter, Spec("warmroute_variant_not_counted",
        "experiment variant reason",
        "Requests of a variant that do not count, by reason: wash_out")]
    variant_ttft: Annotated[Histogram, Spec("warmroute_variant_ttft_seconds", "experiment variant",
        "Time from arrival to the first byte of a stream, by variant", TTFT_BUCKETS)]
    variant_tokens: Annotated[Counter, Spec("warmroute_variant_tokens", "experiment variant kind",
        "Prompt tokens by variant and kind: prompt, recomputed (as reported, or else predicted)")]
    # fmt: on


# fmt: off
EXPERIMENT: Final[list[Family[Experiment]]] = [
    Family("warmroute_experiment_running", "experiment design",
        "1 while an experiment takes requests",
        lambda e: {e.design: 1}),
    Family("warmroute_experiment_share_ratio", "experiment variant",
        "Share of the experiment's traffic that a variant gets",
        lambda e: e.shares()),
]
# fmt: on
