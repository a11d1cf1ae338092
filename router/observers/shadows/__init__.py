"""Shadow policies: the choices that other policies would have made on a request's snapshot.

Shadows are asked when a request is over, from its record, so no request waits for them. Records
wait in a queue. The event loop processes them in slices with pauses between, at most 20 % of its
time, but at least one record each time (3 shadows, 64 replicas: 0.2 ms). A record that
finds the queue full is written without shadows, and counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from msgspec.structs import replace

from policies.cost import candidate_costs
from policies.hashing import draw
from policies.naming import label_of
from policies.policy import Policy
from policies.view import CandidateCost, CandidateId, Snapshot
from router.base.bounded import Backlog
from router.observers.shadows.metrics import ShadowMetrics
from router.records.record import DecisionRecord, ShadowDecision
from router.request.observer import Observer

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 1_000  # records: 20 kB each with 64 replicas

_SLICE_S: Final = 0.0005
_PAUSE_S: Final = 0.002
_ROUND: Final = 0x5AD0  # of the draw that selects requests; policies use small rounds

Write = Callable[[DecisionRecord], None]


def shadow_decisions(
    shadows: Sequence[tuple[str, Policy]], record: DecisionRecord
) -> tuple[tuple[ShadowDecision, ...], CandidateCost]:
    """Return each policy's choice on a record's snapshot, and the live choice with its price.

    With prefill and decode apart it is the prompt's placement.
    """
    assert record.by_policy is not None
    snapshot, decision = record.by_policy
    costs = {cost.id: cost for cost in candidate_costs(snapshot)}
    live = costs[decision.candidate]
    return tuple([_asked(label, policy, snapshot, costs, live) for label, policy in shadows]), live


def _asked(
    label: str,
    policy: Policy,
    snapshot: Snapshot,
    costs: dict[CandidateId, CandidateCost],
    live: CandidateCost,
) -> ShadowDecision:
    chosen = costs[policy.decide(snapshot).candidate]
    return ShadowDecision(
        policy=label,
        candidate=chosen.id,
        agrees=chosen.id == live.id,
        ttft_ms=chosen.ttft_ms,
        num_uncached_tokens=chosen.num_uncached_tokens,
        num_fetched_tokens=chosen.num_fetched_tokens,
        regret_ms=live.ttft_ms - chosen.ttft_ms,
    )


class Shadows(Observer):
    """The policies, and the records that wait for them.

    Args:
        share: Share of the decisions that shadows are asked about.
        max_waiting: Maximum number of records that wait.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        *,
        share: float,
        metrics: ShadowMetrics,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._policies = [(label_of(policy), policy) for policy in policies]
        self._bound = int(share * (1 << 64))
        self._metrics = metrics
        self._by_shadow = {label: _ByShadow(metrics, label) for label, _ in self._policies}
        self._waiting: Backlog[tuple[DecisionRecord, Write]] = Backlog(max_waiting)
        self._timer: asyncio.TimerHandle | None = None

    def put(self, record: DecisionRecord, write: Write) -> None:
        """Queue a record; `write` gets it later, with the shadows' choices or without."""
        snapshot = record.snapshot
        if record.by_policy is None:
            write(record)
        elif draw(snapshot.seed, snapshot.number, _ROUND) >= self._bound:
            write(record)
        elif not self._waiting.offer((record, write)):
            self._metrics.shadows_dropped.inc()
            write(record)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._slice)

    def close(self) -> None:
        """Process all records that wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            self._next()

    def _slice(self) -> None:
        self._timer = None
        until_s = time.monotonic() + _SLICE_S
        while self._waiting:
            self._next()
            if time.monotonic() >= until_s:
                break
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._slice)

    def _next(self) -> None:
        record, write = self._waiting.popleft()
        try:
            decisions, live = shadow_decisions(self._policies, record)
        except Exception as exc:  # a shadow's bug must not lose the record
            logger.error("a shadow policy failed", extra={"reason": type(exc).__name__})
            self._metrics.shadows_dropped.inc()
            write(record)
            return
        for decision in decisions:
            self._by_shadow[decision.policy].count(decision, live)
        write(replace(record, shadows=decisions))


class _ByShadow:
    """One shadow's instruments, looked up once."""

    __slots__ = ("_agreed", "_differed", "_pairs", "_regret")

    def __init__(self, metrics: ShadowMetrics, label: str) -> None:
        self._agreed = metrics.shadow_decisions.labels(label, "yes")
        self._differed = metrics.shadow_decisions.labels(label, "no")
        self._regret = metrics.shadow_regret.labels(label)
        self._pairs = {
            choice: (
                metrics.shadow_ttft.labels(label, choice),
                metrics.shadow_tokens.labels(label, choice, "recomputed"),
                metrics.shadow_tokens.labels(label, choice, "fetched"),
            )
            for choice in ("shadow", "live")
        }

    def count(self, decision: ShadowDecision, live: CandidateCost) -> None:
        (self._agreed if decision.agrees else self._differed).inc()
        self._regret.observe(decision.regret_ms / 1000)
        for choice, priced in (("shadow", decision), ("live", live)):
            ttft, recomputed, fetched = self._pairs[choice]
            ttft.inc(priced.ttft_ms / 1000)
            recomputed.inc(priced.num_uncached_tokens)
            fetched.inc(priced.num_fetched_tokens)
