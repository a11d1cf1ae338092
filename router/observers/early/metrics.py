"""The metrics of next prompts that are computed early."""

from __future__ import annotations

from typing import Annotated

from router.metrics.counting import Counter
from router.metrics.instruments import Instruments, Spec


class EarlyMetrics(Instruments):
    """Next prompts."""

    # fmt: off
    early: Annotated[Counter, Spec("warmroute_early", "result",
        "Next prompts to be computed early, by result: computed, cached (nothing to do), cut (by "
        "a request), busy (429, 503), no_room, lost (from the cache), unknown, refused, failed")]
    early_tokens: Annotated[Counter, Spec("warmroute_early_tokens", "kind",
        "Tokens of next prompts: sent to be computed early, then used or wasted")]
    # fmt: on
