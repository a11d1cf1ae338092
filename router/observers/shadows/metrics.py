"""The metrics of shadow policies."""

from __future__ import annotations

from typing import Annotated

from router.metrics.counting import Counter, Histogram
from router.metrics.instruments import Instruments, Spec

_REGRET_BUCKETS = (-10, -1, -0.1, -0.01, 0, 0.01, 0.1, 1, 10)


class ShadowMetrics(Instruments):
    """Decisions of shadow policies."""

    # fmt: off
    shadow_decisions: Annotated[Counter, Spec("warmroute_shadow_decisions", "shadow agrees",
        "Decisions of a shadow policy, by whether it agrees with the live policy")]
    shadow_ttft: Annotated[Counter, Spec("warmroute_shadow_ttft_seconds", "shadow choice",
        "Sums of predicted times to first token, of the shadow's choice and of the live choice; "
        "live minus shadow is the regret")]
    shadow_regret: Annotated[Histogram, Spec("warmroute_shadow_regret_seconds", "shadow",
        "Predicted time to first token of the live choice minus the shadow's; positive if the "
        "shadow would be faster", _REGRET_BUCKETS)]
    shadow_tokens: Annotated[Counter, Spec("warmroute_shadow_tokens", "shadow choice kind",
        "Predicted tokens of the shadow's choice and of the live choice: recomputed, fetched")]
    shadows_dropped: Annotated[Counter, Spec("warmroute_shadow_dropped", "",
        "Decisions that shadow policies skipped because they are too slow")]
    # fmt: on
