"""Turns of a session, as the ledger keeps them, their sums, and what they take of replicas.

That is GPU seconds, and money where an hour has a price:

    prompt    the time to compute its uncached tokens, by the learned cost model, with the attention
              to cached ones; and the time to read tokens from CPU memory or a pool
    answer    its share of the time that its replica decodes
    saved     the time to compute the whole prompt, less what its prompt took; the same model, and
              as much less where the prompt would exceed its time

The ledger of a replica divides the time that passes there (`Ledger._divide`). A prompt takes at
most what is its there. A second is one of the whole replica, whatever the number of its GPUs. A
token that is cached on the GPU costs nothing but the attention to it. The latency of every first
token (`base_ms`) is no work. Time in which a replica is idle is charged to no request.

The metrics of these sums are read at scrape time.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from policies.view import CandidateId
from router.base.decoding import Count, Seconds, strict
from router.metrics.families import Family
from router.records.record import Computed
from router.request.observer import Facts
from router.request.results import Placement, Prompt

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


# fmt: on


_MOST_TOKENS: Final = 1 << 40

Milliseconds = Annotated[float, Meta(ge=-1e15, le=1e15)]
"""No NaN is in them."""

Money = Annotated[float, Meta(ge=0, le=1e15)]


class Turn(Struct, frozen=True, array_like=True, kw_only=True):
    """One turn of a session. Times in milliseconds.

    at: When the request arrived, unix seconds.
    num_cached: As the engine reports; None: it does not.
    num_gpu, num_cpu, num_pool: Where these came from.
    engine_ms, decode_ms, saved_ms, cost, cost_saved: What it took; see `spending`.
    """

    request_id: str
    at: Seconds
    candidate: CandidateId
    model: str
    outcome: str
    num_tokens: Count
    num_cached: Count | None = None
    num_gpu: Count = 0
    num_cpu: Count = 0
    num_pool: Count = 0
    num_output: Count | None = None
    computed: Computed | None = None
    router_ms: Milliseconds = 0.0
    waited_ms: Milliseconds = 0.0
    ttft_ms: Milliseconds | None = None
    total_ms: Milliseconds = 0.0
    engine_ms: Milliseconds = 0.0
    saved_ms: Milliseconds = 0.0
    prefill_at: CandidateId | None = None
    waited_for: str | None = None
    decode_ms: Milliseconds = 0.0
    cost: Money | None = None
    cost_saved: Money | None = None


encode_turn = msgspec.msgpack.Encoder().encode
decode_turn = strict(msgspec.msgpack.Decoder(Turn).decode)


def turn_of(facts: Facts, prompt: Prompt, placement: Placement) -> Turn:
    """Describe the turn that a request was, without its causes."""
    usage, wait = facts.usage, facts.tries.wait
    num_tokens = _sane(usage.prompt_tokens if usage is not None else None)
    num_tokens = prompt.num_tokens if num_tokens is None else num_tokens
    reported = _sane(facts.num_reported_cached_tokens)
    num_cached = facts.num_predicted_cached_tokens if reported is None else reported
    num_gpu, num_cpu, num_pool = placement.predicted.sources(num_cached)
    spending = spending_of(
        facts,
        placement,
        num_tokens=num_tokens,
        num_cached=num_cached,
        sources=(num_gpu, num_cpu, num_pool),
    )
    return Turn(
        request_id=prompt.read.request_id,
        at=facts.at - facts.total_ms / 1000,
        candidate=placement.lease.candidate,
        model=prompt.read.model or "",
        outcome=facts.outcome.value,
        num_tokens=num_tokens,
        num_cached=reported,
        num_gpu=num_gpu,
        num_cpu=num_cpu,
        num_pool=num_pool,
        num_output=_sane(usage.completion_tokens if usage is not None else None),
        router_ms=facts.router_ms,
        waited_ms=wait.waited_ms,
        ttft_ms=facts.ttft_ms,
        total_ms=facts.total_ms,
        engine_ms=spending.prompt_ms,
        decode_ms=spending.answer_ms,
        saved_ms=spending.saved_ms,
        cost=spending.cost,
        cost_saved=spending.cost_saved,
        prefill_at=placement.helper.lease.candidate if placement.helper is not None else None,
        waited_for=wait.held_by,
    )


def _sane(num_reported: int | None) -> int | None:
    """Pass on what an engine reports, if it can be a number of tokens."""
    if num_reported is None or not 0 <= num_reported <= _MOST_TOKENS:
        return None
    return num_reported


class Totals(Struct):
    """Sums over a session's turns. `by_cause` has `cached`, too, where the engine reports."""

    num_turns: int = 0
    num_tokens: int = 0
    num_output: int = 0
    num_gpu: int = 0
    num_cpu: int = 0
    num_pool: int = 0
    by_cause: dict[str, int] = msgspec.field(default_factory=dict)
    num_moves: int = 0
    waited_s: float = 0.0
    engine_s: float = 0.0
    saved_s: float = 0.0
    decode_s: float = 0.0
    cost: float | None = None  # None: no turn has a price
    cost_saved: float | None = None

    @property
    def gpu_s(self) -> float:
        """The time that the turns took of replicas."""
        return self.engine_s + self.decode_s

    @property
    def spent(self) -> tuple[float, float]:
        """Sessions are sorted by the cost, where there are prices, then by the GPU seconds."""
        return self.cost or 0.0, self.gpu_s

    def add(self, turn: Turn) -> None:
        """Count a turn."""
        self.num_turns += 1
        self.num_tokens += turn.num_tokens
        self.num_output += turn.num_output or 0
        self.num_gpu += turn.num_gpu
        self.num_cpu += turn.num_cpu
        self.num_pool += turn.num_pool
        self.waited_s += turn.waited_ms / 1000
        self.engine_s += turn.engine_ms / 1000
        self.saved_s += turn.saved_ms / 1000
        self.decode_s += turn.decode_ms / 1000
        if turn.cost is not None:
            self.cost = (self.cost or 0.0) + turn.cost
        if turn.cost_saved is not None:
            self.cost_saved = (self.cost_saved or 0.0) + turn.cost_saved
        by_cause, computed = self.by_cause, turn.computed
        if turn.num_cached is not None:
            by_cause["cached"] = by_cause.get("cached", 0) + turn.num_cached
        if computed is not None:
            self.num_moves += computed.move is not None
            for cause, num_tokens in computed.tokens.items():
                by_cause[cause] = by_cause.get(cause, 0) + num_tokens

    def include(self, other: Totals) -> None:
        """Add other sums."""
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for cause, num_tokens in other.by_cause.items():
            self.by_cause[cause] = self.by_cause.get(cause, 0) + num_tokens
        for name in ("cost", "cost_saved"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if theirs is not None:
                setattr(self, name, (mine or 0.0) + theirs)


_ADDED: Final = [
    name for name in Totals.__struct_fields__ if name not in ("by_cause", "cost", "cost_saved")
]


# fmt: off
SPENDING: Final[list[Family[Totals]]] = [
    Family("warmroute_gpu_seconds_total", "model kind",
        "GPU seconds of sessions' turns, by kind: prompt, answer, saved (by caches)",
        lambda sums: {"prompt": sums.engine_s, "answer": sums.decode_s, "saved": sums.saved_s}),
    Family("warmroute_cost_total", "model kind",
        "Cost of sessions' turns in the currency of cost_per_hour, by kind: spent, saved (by "
        "caches)",
        lambda sums: None if sums.cost is None else
            {"spent": sums.cost, "saved": sums.cost_saved or 0.0}),
]
# fmt: on
