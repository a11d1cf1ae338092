"""What a turn takes of its replicas: GPU seconds, and money where an hour has a price.

    prompt    the time to compute its uncached tokens, by the learned cost model, with the attention
              to cached ones; and the time to read tokens from CPU memory or a pool
    answer    its share of the time that its replica decodes
    saved     the time to compute the whole prompt, less what its prompt took; the same model, and
              as much less where the prompt would exceed its time

The ledger of a replica divides the time that passes there (`Ledger._divide`). A prompt takes at
most what is its there. A second is one of the whole replica, whatever the number of its GPUs. A
token that is cached on the GPU costs nothing but the attention to it. The latency of every first
token (`base_ms`) is no work. Time in which a replica is idle is charged to no request.
"""

from __future__ import annotations

from msgspec import Struct

from router.request.observer import Facts
from router.request.plan import Placement

_MS_PER_HOUR = 3_600_000.0


class Spending(Struct, frozen=True, kw_only=True):
    """What one turn took. Times in milliseconds; cost in the currency of `cost_per_hour`.

    cost, cost_saved: None: a replica of it has no price.
    """

    prompt_ms: float
    answer_ms: float
    saved_ms: float
    cost: float | None
    cost_saved: float | None


def spending_of(
    facts: Facts,
    placement: Placement,
    *,
    num_tokens: int,
    num_cached: int,
    sources: tuple[int, int, int],
) -> Spending:
    """Return what an answered request took.

    Args:
        facts: What became of it.
        placement: Where it was answered.
        num_tokens: Of its prompt.
        num_cached: Of these, that its engine did not compute.
        sources: Where these came from: GPU, CPU memory, pool.
    """
    computed_at, helped = placement, facts.tries.helped
    if placement.helper is not None and helped is not None and helped.result == "remote":
        computed_at = placement.helper
        num_cached = min(num_tokens, helped.num_reported_cached_tokens or 0)
    own, cost = placement.plan.view.cost, computed_at.plan.view.cost
    _, num_cpu, num_pool = sources
    num_on_disk = min(num_pool, placement.lease.booking.num_disk_tokens)
    read_ms = own.fetch_ms(num_cpu, from_pool=False)
    read_ms += own.fetch_ms(num_pool, from_pool=True, num_on_disk=num_on_disk)
    prefill_ms = cost.prefill_ms(max(0, num_tokens - num_cached), num_cached)
    compute_ms = prefill_ms - cost.base_ms
    saved_ms = max(0.0, cost.prefill_ms(num_tokens, 0) - prefill_ms - read_ms)
    most_ms = 1e3 * computed_at.lease.spent.prompt_s
    if computed_at is not placement:
        most_ms += 1e3 * placement.lease.spent.prompt_s
    if compute_ms + read_ms > most_ms:  # the model is still to be learned, or is wrong here
        ratio = most_ms / (compute_ms + read_ms)
        compute_ms, read_ms, saved_ms = ratio * compute_ms, ratio * read_ms, ratio * saved_ms
    answer_ms = 1e3 * placement.lease.spent.answer_s
    price = placement.candidate.replica.cost_per_hour
    prefill_price = computed_at.candidate.replica.cost_per_hour
    spent = saved = None
    if price is not None and prefill_price is not None:
        spent = (compute_ms * prefill_price + (read_ms + answer_ms) * price) / _MS_PER_HOUR
        saved = saved_ms * prefill_price / _MS_PER_HOUR
    return Spending(
        prompt_ms=compute_ms + read_ms,
        answer_ms=answer_ms,
        saved_ms=saved_ms,
        cost=spent,
        cost_saved=saved,
    )
