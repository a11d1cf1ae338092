"""Overdue: leave a replica whose first token is late, if another one would be sooner.

The other replica must be predicted to be sooner than this one is late already. Then waiting and
leaving together cost at most twice the better of both. If requests wait there for half as long as
this one has waited, the fleet is loaded, and leaving would only add load.

A request that reads from the pool is overdue sooner: such reads hang, for a minute over TCP. Its
candidate's reads are suspect at once, whether it leaves or not, so no other request counts on one.
"""

from __future__ import annotations

from time import monotonic
from typing import Final

from policies.cost import candidate_costs
from router.config import ForwardConfig
from router.errors import Overdue, RouterError
from router.metrics import Metrics
from router.replicas.fleet import Fleet
from router.request.place import Place
from router.request.plan import Placement
from router.request.results import Prompt, Tries
from router.request.retry import Retries
from router.request.verify import PoolVerifier

_LOOK_AGAIN_S: Final = 1.0  # at an overdue request that was not left
_FETCH_FLOOR_S: Final = 2.0  # no read from the pool is overdue before this time


class Patience:
    """Decides how long to wait for a first token."""

    def __init__(
        self,
        config: ForwardConfig,
        *,
        fleet: Fleet,
        place: Place,
        retries: Retries,
        pool: PoolVerifier | None,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._place = place
        self._retries = retries
        self._pool = pool
        self._metrics = metrics

    def overdue_s(self, placement: Placement) -> float | None:
        """Return after how long a first token is overdue; None: never."""
        config = self._config
        if not config.overdue_ratio:
            return None
        floor_s = config.overdue_floor_s
        if placement.may_fetch:
            floor_s = min(floor_s, _FETCH_FLOOR_S)
        return self._fleet.overdue_s(placement.lease, ratio=config.overdue_ratio, floor_s=floor_s)

    def wait_s(self, prompt: Prompt, tries: Tries, placement: Placement) -> float | None:
        """Return how long to wait on for an overdue first token; None: leave now."""
        self._suspect_read(placement)
        objection = self._retries.objection(prompt, tries, placement, Overdue.code)
        if objection is not None:
            self._metrics.overdue.labels(objection).inc()
            return _LOOK_AGAIN_S
        now_s = monotonic()
        try:
            plan = self._place.plan(prompt, tries)
        except RouterError:
            return _LOOK_AGAIN_S
        costs = candidate_costs(plan.snapshot)
        [ttft_ms] = [cost.ttft_ms for cost in costs if cost.id == plan.candidate.id]
        waited_s = now_s - placement.lease.begun_s
        late_ms = waited_s * 1000.0 - placement.lease.predicted_ms
        is_late = self._fleet.longest_wait_s(plan.candidate.id, now_s) >= waited_s / 2
        if is_late or ttft_ms >= late_ms:
            self._metrics.overdue.labels("late_elsewhere").inc()
            return _LOOK_AGAIN_S
        self._metrics.overdue.labels("left").inc()
        return None

    def _suspect_read(self, placement: Placement) -> None:
        """Suspect a candidate's reads, unless an older request waits there: that is a queue."""
        if self._pool is None or not placement.may_fetch:
            return
        lease, now_s = placement.lease, monotonic()
        if self._fleet.longest_wait_s(lease.candidate, now_s) <= now_s - lease.begun_s:
            self._pool.fetch_failed(lease.candidate, lease.begun_s)
