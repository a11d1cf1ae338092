"""The metrics of experiments: what is counted, and how the experiment stands at scrape time."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Struct

from router.metrics.counting import Counter, Histogram
from router.metrics.families import Family
from router.metrics.instruments import TTFT_BUCKETS, Instruments, Spec


class ExperimentMetrics(Instruments):
    """Requests by variant."""

    # fmt: off
    arm_requests: Annotated[Counter, Spec("warmroute_arm_requests", "experiment arm outcome",
        "Requests of a variant that count for the experiment, by outcome")]
    arm_not_counted: Annotated[Counter, Spec("warmroute_arm_not_counted", "experiment arm reason",
        "Requests of a variant that do not count, by reason: wash_out")]
    arm_ttft: Annotated[Histogram, Spec("warmroute_arm_ttft_seconds", "experiment arm",
        "Time from arrival to the first byte of a stream, by variant", TTFT_BUCKETS)]
    arm_tokens: Annotated[Counter, Spec("warmroute_arm_tokens", "experiment arm kind",
        "Prompt tokens by variant and kind: prompt, recomputed (as reported, or else predicted)")]
    # fmt: on


class ExperimentState(Struct, frozen=True, kw_only=True):
    """How an experiment stands at scrape time."""

    name: str
    design: str
    shares: dict[str, float]  # variant -> of the traffic in scope


# fmt: off
EXPERIMENT: Final[list[Family[ExperimentState]]] = [
    Family("warmroute_experiment_running", "experiment design",
        "1 while an experiment takes requests",
        lambda e: [((e.name, e.design), 1.0)]),
    Family("warmroute_experiment_share_ratio", "experiment arm",
        "Share of the experiment's traffic that a variant gets",
        lambda e: [((e.name, arm), share) for arm, share in e.shares.items()]),
]
# fmt: on
