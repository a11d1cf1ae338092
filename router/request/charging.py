"""What a request is charged of its caller's uncached tokens a minute.

charge   when it is placed: the tokens it is expected to have, or 429
settle   at its end: those it really had
"""

from __future__ import annotations

from time import monotonic
from typing import Final

from router.api.usage import Usage
from router.base.limits import Charge, Limits
from router.request.plan import Placement, Plan
from router.request.results import Prompt, Tries

_BYTES_PER_TOKEN: Final = 4  # where a prompt's tokens are not known


def charge(limits: Limits, prompt: Prompt, plan: Plan, now_s: float) -> Charge:
    """Charge a request for the uncached tokens of a plan.

    Raises:
        RateLimited: its caller has not so many left this minute.
    """
    if prompt.tokens is None:
        num_tokens = len(prompt.read.inbound.body or b"") // _BYTES_PER_TOKEN
    else:
        num_tokens = max(prompt.num_tokens - plan.view.num_cached_tokens, 0)
        num_tokens += prompt.num_more_tokens
    return limits.charge(num_tokens, now_s)


def settle(
    charge: Charge, tries: Tries, placement: Placement, status: int, usage: Usage | None
) -> None:
    """Correct a charge by what the engine reported; a refused request costs nothing."""
    now_s = monotonic()
    if status >= 400:
        charge.settle(0, now_s)
    elif usage is not None:
        num_cached = usage.num_cached_tokens
        if tries.helped is not None and tries.helped.result == "remote":
            num_cached = tries.helped.num_reported_cached_tokens or 0  # computed there
        if num_cached is None:
            num_cached = placement.predicted.num_cached_tokens
        charge.settle(max(usage.prompt_tokens - num_cached, 0), now_s)
