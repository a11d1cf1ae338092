"""What the ledger of sessions keeps of an answered request."""

from __future__ import annotations

import time
from typing import Final

from router.api.usage import Usage
from router.observers.sessions.turns import Turn
from router.records.outcome import Outcome
from router.request.plan import Placement
from router.request.results import Prompt, Tries

_MOST_TOKENS: Final = 1 << 40


def turn_of(
    prompt: Prompt,
    tries: Tries,
    placement: Placement,
    outcome: Outcome,
    usage: Usage | None,
    ttft_ms: float | None,
    now_s: float,
) -> Turn:
    """Describe the turn that a request was, without its causes."""
    inbound, predicted, wait = prompt.read.inbound, placement.predicted, tries.wait
    num_tokens = _sane(usage.prompt_tokens if usage is not None else None)
    num_tokens = prompt.num_tokens if num_tokens is None else num_tokens
    reported = _sane(usage.num_cached_tokens if usage is not None else None)
    num_cached = predicted.num_cached_tokens if reported is None else reported
    num_gpu, num_cpu, num_pool = predicted.sources(num_cached)
    cost, total_ms = placement.plan.view.cost, (now_s - inbound.arrived_s) * 1000
    engine_ms = cost.prefill_ms(max(0, num_tokens - num_cached), num_cached)
    return Turn(
        request_id=prompt.read.request_id,
        at=time.time() - total_ms / 1000,
        candidate=placement.lease.candidate,
        model=prompt.read.model or "",
        outcome=outcome.value,
        num_tokens=num_tokens,
        num_cached=reported,
        num_gpu=num_gpu,
        num_cpu=num_cpu,
        num_pool=num_pool,
        num_output=_sane(usage.completion_tokens if usage is not None else None),
        router_ms=(placement.placed_s - inbound.arrived_s) * 1000 - wait.waited_ms,
        waited_ms=wait.waited_ms,
        ttft_ms=ttft_ms,
        total_ms=total_ms,
        engine_ms=engine_ms,
        saved_ms=max(0.0, cost.prefill_ms(num_tokens, 0) - engine_ms),
        prefill_at=placement.helper.lease.candidate if placement.helper is not None else None,
        waited_for=wait.held_by,
    )


def _sane(num_reported: int | None) -> int | None:
    """Pass on what an engine reports, if it can be a number of tokens."""
    if num_reported is None or not 0 <= num_reported <= _MOST_TOKENS:
        return None
    return num_reported
