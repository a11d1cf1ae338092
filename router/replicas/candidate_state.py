"""The moving state of one candidate: its load, speed, and load from elsewhere.

Load has two sources. The ledger has what this router sent, and within milliseconds what other
routers publish. The engine's own `/metrics` also counts requests of direct clients. Load beyond the
ledger counts as foreign until the next reading, or until the reading is too old. This is a
correction, not a measurement: readings lag by a request or two, and a foreign prompt is assumed to
be as long as those in the ledger.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from policies.view import NOTHING_HELD, CandidateId, CostModel, Holding, ReplicaView
from router.records.record import Outcome
from router.replicas.cost_fit import Speed, StepFit
from router.replicas.health import Health
from router.replicas.ledger import NO_FOREIGN, Booking, Foreign, Lease, Ledger
from router.replicas.replica import Candidate, Replica

_MEAN_DECAY = 0.9
ENGINE_LOAD_MAX_AGE_S = 15.0

_MIN_TOKENS = 20  # of a reading, to learn inter-token latency

ON_PURPOSE: Final = ("draining", "asleep", "paused")
"""States in which a replica gets no new requests, and nothing is wrong with it."""

_BUSY_KEPT_S = 0.1  # computing it each time would be a sixth of `Load.views`


class EngineLoad(Struct, frozen=True, kw_only=True, gc=False):
    """Load of one rank, from the engine's own `/metrics`.

    Source: vllm:num_requests_running, vllm:num_requests_waiting, vllm:kv_cache_usage_perc (of
    running requests only, not what is cached), vllm:inter_token_latency_seconds.
    """

    num_running: int
    num_waiting: int
    at_s: float
    kv_usage: float | None = None  # share of its blocks that running requests use; None: unsaid
    token_s: float = 0.0  # inter-token latencies since it started, summed
    num_tokens: int = 0  # how many latencies


class CandidateStatus(Struct, frozen=True, kw_only=True):
    """One candidate for people: `/admin/replicas`, `/metrics`."""

    id: CandidateId
    replica: str
    rank: int | None
    url: str
    state: str  # see `state_of`
    reason: str
    draining: bool
    num_requests: int
    num_elsewhere: int  # of these, sent by other routers
    num_waiting: int
    num_queued_tokens: int
    queue_ms: float
    busy_ratio: float
    engine_load: EngineLoad | None
    cost: CostModel
    cost_class: str  # of the replicas that share it
    num_observations: int


def state_of(replica: Replica, health: Health, now_s: float) -> str:
    """Return the one state of a replica that all views show.

    Its health, or why one that is well gets no new requests: draining, asleep, paused. A replica
    that is dead or hangs is nothing else.
    """
    state = health.state(now_s).value
    if health.is_down:
        return state
    if replica.draining:
        return "draining"
    return "asleep" if replica.asleep else "paused" if replica.paused else state


class CandidateState:
    """The moving state of one candidate."""

    __slots__ = (
        "_busy_ratio",
        "_busy_until_s",
        "_foreign",
        "_mean_tokens",
        "_num_elsewhere",
        "_num_tokens_read",
        "_view",
        "_view_held",
        "_view_until_s",
        "candidate",
        "engine_load",
        "health",
        "ledger",
        "num_early",
        "speed",
    )

    def __init__(self, candidate: Candidate, health: Health, speed: Speed) -> None:
        self.candidate = candidate
        self.health = health
        self.speed = speed
        self.ledger = Ledger()
        self.engine_load: EngineLoad | None = None
        self.num_early = 0  # requests of this router that yield to all others: no load
        self._num_tokens_read = 0  # in the ledger, as of the last reading
        self._foreign = NO_FOREIGN
        self._num_elsewhere = 0  # requests in the ledger that other routers sent
        self._mean_tokens = 0.0  # uncached tokens of a request here, recent ones first
        self._busy_ratio = 0.0  # kept for a moment
        self._busy_until_s = 0.0
        self._view: ReplicaView | None = None  # as last shown; None: something has changed since
        self._view_held = NOTHING_HELD  # for this holding
        self._view_until_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether this router has nothing in flight here."""
        return self.ledger.num_requests == self._num_elsewhere

    def view(self, held: Holding, now_s: float) -> ReplicaView:
        """Show the candidate to a policy.

        Most candidates have not changed since the last decision: their last view is reused.
        """
        view = self._view
        if (
            view is None
            or now_s >= self._view_until_s
            or held != self._view_held
            or view.cost is not self.speed.model
        ):
            view = self._describe(held, now_s)
            self._view = view if self.ledger.num_waiting == 0 else None  # a queue moves by itself
            self._view_held = held
            self._view_until_s = self._busy_until_s
            if now_s < self._foreign.until_s < self._view_until_s:
                self._view_until_s = self._foreign.until_s
        return view

    def _describe(self, held: Holding, now_s: float) -> ReplicaView:
        ledger, cost = self.ledger, self.speed.model
        queue_ms = ledger.queue_ms(cost, now_s)  # first: it may presume first tokens
        if now_s >= self._busy_until_s:
            self._busy_ratio = ledger.busy.at(now_s)
            self._busy_until_s = now_s + _BUSY_KEPT_S
        view = ReplicaView(
            id=self.candidate.id,
            num_gpu_tokens=held.num_gpu_tokens,
            num_cpu_tokens=held.num_cpu_tokens,
            num_pool_tokens=held.num_pool_tokens,
            num_disk_tokens=held.num_disk_tokens,
            reads_pool=held.reads_pool,
            num_requests=ledger.num_requests,
            num_waiting=ledger.num_waiting,
            num_queued_tokens=ledger.num_queued_tokens,
            queue_ms=queue_ms,
            busy_ratio=self._busy_ratio,
            cost=cost,
        )
        if now_s < self._foreign.until_s:
            view = _with_foreign(view, self._foreign)
        is_decoder = self.candidate.replica.role == "decode"
        return self._with_decoding(view, now_s) if is_decoder else view

    @property
    def _steps(self) -> StepFit:
        is_decoder = self.candidate.replica.role == "decode"
        return self.speed.fit.steps if is_decoder else self.speed.fit.mixed_steps

    def _step_ms(self, num_running: float, num_tokens: float) -> float | None:
        """Predict the inter-token latency of so many requests; None: too little is known."""
        step_ms = self._steps.predict_ms(num_running, num_tokens)
        return None if step_ms is None else self.speed.factor * step_ms

    def _with_decoding(self, view: ReplicaView, now_s: float) -> ReplicaView:
        """Add what only matters for replicas that decode: free KV and inter-token latency."""
        capacity, num_used = self.candidate.capacity_tokens, self._num_used_tokens(now_s)
        num_decoding = view.num_requests - view.num_waiting
        return replace(
            view,
            num_free_tokens=None
            if capacity is None
            else max(0, min(capacity, round(capacity - num_used))),
            tbt_ms=self._step_ms(num_decoding + 1, num_used),
        )

    def _num_used_tokens(self, now_s: float) -> float:
        """Return the tokens whose KV requests in flight use; 0.0 if the cache's size is unknown.

        The tokens of answers so far are in the engine's last reading.
        """
        capacity, reading = self.candidate.capacity_tokens, self.engine_load
        if capacity is None:
            return 0.0
        num_used: float = self.ledger.num_tokens
        if reading is not None and now_s < reading.at_s + ENGINE_LOAD_MAX_AGE_S:
            if reading.kv_usage is not None:
                num_used += reading.kv_usage * capacity - self._num_tokens_read
        return max(0.0, num_used)

    def tbt_ms(self, num_tokens: int, now_s: float) -> float | None:
        """Predict inter-token latency when a prompt of `num_tokens` has been computed.

        All requests in flight here will be decoding then. None: there are none, or too little is
        known.
        """
        num_requests = self.ledger.num_requests
        if now_s < self._foreign.until_s:
            num_requests += self._foreign.num_requests
        if not num_requests:
            return None
        num_used = self._num_used_tokens(now_s)
        return self._step_ms(num_requests + 1, num_used + num_tokens)

    def admit(self, number: int, booking: Booking, now_s: float) -> Lease:
        """Book a request, ours or another router's; see `Ledger.admit`.

        Another router's request does not count for health here: that router judges its outcome.
        """
        self._view = None
        if booking.is_ours:
            self.health.began(number, now_s)
        else:
            self._num_elsewhere += 1
        foreign = self._foreign if now_s < self._foreign.until_s else NO_FOREIGN
        lease = self.ledger.admit(
            number, self.candidate.id, booking, self.speed.model, foreign, now_s
        )
        num_uncached_tokens = booking.num_uncached_tokens
        self._mean_tokens += (1.0 - _MEAN_DECAY) * (num_uncached_tokens - self._mean_tokens)
        self._busy_until_s = now_s
        return lease

    def first_token(self, lease: Lease, now_s: float, ttft_ms: float | None) -> None:
        """Record a first token and learn from its time; later calls do nothing.

        `ttft_ms` None: it is not known how long it took.
        """
        if not self.ledger.first_token(lease, now_s):
            return
        self._view = None
        is_ours = lease.booking.is_ours
        if is_ours:
            self.health.answered(lease.number, now_s)
        if not lease.booking.streams or ttft_ms is None:
            return
        elsewhere_s = None if is_ours else now_s
        self.speed.observe(lease.work, ttft_ms, lease.predicted_ms, elsewhere_s)

    def end(self, lease: Lease, now_s: float, outcome: Outcome | None, jitter: float) -> bool:
        """End a lease, and record its outcome; False if it was ended before.

        `outcome` None: it was another router's.

        The first token of an answer without a stream is not seen. But if the answer ends before the
        token was due, it took less than predicted. So the router learns that a replica is faster
        than the prior even if no client streams.
        """
        if outcome is Outcome.OK and not lease.booking.streams:
            if self.ledger.is_early(lease, self.speed.model, now_s):
                took_ms = 1e3 * (now_s - lease.begun_s)
                self.speed.observe(lease.work, took_ms, lease.predicted_ms)
        if not self.ledger.end(lease, now_s):
            return False
        self._view = None
        if outcome is None:
            self._num_elsewhere -= 1
        else:
            self.health.ended(lease.number, outcome, now_s, jitter)
        return True

    def note_engine_load(self, load: EngineLoad) -> None:
        """Record a reading of the engine's own figures."""
        self._view = None
        self._observe_steps(load)
        self.engine_load = load
        num_ours = self.ledger.num_requests + self.num_early
        num_foreign = max(0, load.num_running + load.num_waiting - num_ours)
        # The engine calls a request running while it is still prefilled; the ledger, waiting.
        num_waiting = min(num_foreign, max(0, load.num_waiting - self.ledger.num_waiting))
        self._foreign = Foreign(
            num_requests=num_foreign,
            num_waiting=num_waiting,
            num_queued_tokens=round(num_waiting * self._mean_tokens),
            until_s=load.at_s + ENGINE_LOAD_MAX_AGE_S if num_foreign else 0.0,
        )

    def _observe_steps(self, load: EngineLoad) -> None:
        """Add the inter-token latency since the last reading to the fit."""
        last, self._num_tokens_read = self.engine_load, self.ledger.num_tokens
        if last is None or load.num_tokens - last.num_tokens < _MIN_TOKENS:
            return
        usage = ((last.kv_usage or 0.0) + (load.kv_usage or 0.0)) / 2
        self._steps.observe(
            (last.num_running + load.num_running) / 2,
            usage * (self.candidate.capacity_tokens or 0),
            1000.0
            * (load.token_s - last.token_s)
            / (load.num_tokens - last.num_tokens)
            / self.speed.factor,
        )

    def status(self, now_s: float) -> CandidateStatus:
        """Describe the candidate for people."""
        candidate, ledger, cost = self.candidate, self.ledger, self.speed.model
        return CandidateStatus(
            id=candidate.id,
            replica=candidate.replica.name,
            rank=candidate.rank,
            url=candidate.replica.url,
            state=state_of(candidate.replica, self.health, now_s),
            reason=self.health.reason,
            draining=candidate.replica.draining,
            queue_ms=ledger.queue_ms(cost, now_s),
            num_requests=ledger.num_requests,
            num_elsewhere=self._num_elsewhere,
            num_waiting=ledger.num_waiting,
            num_queued_tokens=ledger.num_queued_tokens,
            busy_ratio=ledger.busy.at(now_s),
            engine_load=self.engine_load,
            cost=cost,
            cost_class=self.candidate.replica.cost_class,
            num_observations=self.speed.fit.num_observations,
        )


def _with_foreign(view: ReplicaView, foreign: Foreign) -> ReplicaView:
    """Add foreign load to what the ledger shows."""
    return replace(
        view,
        num_requests=view.num_requests + foreign.num_requests,
        num_waiting=view.num_waiting + foreign.num_waiting,
        num_queued_tokens=view.num_queued_tokens + foreign.num_queued_tokens,
        queue_ms=view.queue_ms + view.cost.ms_per_token * foreign.num_queued_tokens,
    )
