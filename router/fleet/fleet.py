"""The fleet: all replicas with their load, health and speed, in one place.

What must live here: who can take a request for a model now, and how each candidate stands. What
must not: which one to take (policies), what is cached (router.index), any I/O or clock. Every
state change is one synchronous call; `now_s` comes from the caller's monotonic clock.

Load has two sources. The ledger knows at once what this router sent. The engine's own `/metrics`,
read now and then, also counts what others sent: what exceeds the ledger at that moment counts as
foreign load until the next reading, or until the reading is too old. It is a correction, not a
measurement: readings lag by a request or two, and a foreign prompt is taken to be as long as
the ones this router sends there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from policies.view import CandidateId, CostModel, ReplicaView
from router.errors import NoReplicaAvailable, UnknownModel
from router.fleet.cost_fit import PRIOR, CostFit
from router.fleet.health import Health, HealthRules, Outcome, ProbeFailure
from router.fleet.ledger import NO_FOREIGN, Foreign, Lease, Ledger
from router.fleet.replica import Candidate, Replica, ServedModel, candidates_of

_MEAN_DECAY = 0.9
_MAX_RETRY_AFTER_S = 30.0


class Match(NamedTuple):
    """Leading tokens a candidate holds: on its GPU, and on GPU or cpu tier (>= GPU's)."""

    num_gpu_tokens: int
    num_cpu_tokens: int


NO_MATCH = Match(0, 0)


class EngineLoad(Struct, frozen=True, kw_only=True, gc=False):
    """What an engine's own `/metrics` said about one rank.

    Source: vllm:num_requests_running, vllm:num_requests_waiting. Not vllm:kv_cache_usage_perc: it
    counts blocks of running requests only and says nothing about what is cached.
    """

    num_running: int
    num_waiting: int
    at_s: float


class CandidateStatus(Struct, frozen=True, kw_only=True):
    """One candidate for people: `/admin/replicas`, `/metrics`."""

    id: CandidateId
    replica: str
    rank: int | None
    url: str
    state: str
    reason: str
    draining: bool
    num_requests: int
    num_waiting: int
    num_queued_tokens: int
    queue_ms: float
    engine_load: EngineLoad | None
    cost: CostModel
    num_observations: int


class _Slot:
    """The moving state of one candidate."""

    __slots__ = (
        "candidate",
        "engine_load",
        "fit",
        "foreign",
        "foreign_until_s",
        "health",
        "ledger",
        "mean_tokens",
    )

    def __init__(self, candidate: Candidate, health: Health, fit: CostFit) -> None:
        self.candidate = candidate
        self.health = health
        self.fit = fit
        self.ledger = Ledger()
        self.engine_load: EngineLoad | None = None
        self.foreign = NO_FOREIGN
        self.foreign_until_s = 0.0
        self.mean_tokens = 0.0  # uncached tokens of a request here, recent ones first

    def foreign_at(self, now_s: float) -> Foreign:
        """Tell the load others put on this candidate; none if the reading is too old."""
        return self.foreign if now_s < self.foreign_until_s else NO_FOREIGN


class Fleet:
    """Replicas by name; see the module's charter.

    The way of a request: `candidates` -> `views` -> (policy) -> `begin` -> `first_token` ->
    `end`, the last in every case, any number of times.
    """

    __slots__ = (
        "_by_model",
        "_engine_load_max_age_s",
        "_fits",
        "_health",
        "_num_leases",
        "_order",
        "_prior",
        "_replicas",
        "_rules",
        "_slots",
        "_unsettled",
    )

    def __init__(
        self,
        *,
        rules: HealthRules | None = None,
        prior: CostModel = PRIOR,
        engine_load_max_age_s: float = 15.0,
        order: Sequence[str] = (),
    ) -> None:
        self._rules = rules or HealthRules()
        self._prior = prior
        self._engine_load_max_age_s = engine_load_max_age_s
        self._replicas: dict[str, Replica] = {}
        self._health: dict[str, Health] = {}
        self._slots: dict[CandidateId, _Slot] = {}
        self._fits: dict[tuple[str, str], CostFit] = {}
        self._by_model: dict[str | None, tuple[Candidate, ...]] = {}
        self._unsettled: set[str] = set()  # replicas whose health restricts them
        self._num_leases = 0
        self._order = {name: position for position, name in enumerate(order)}

    # Membership

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All replicas: those of `order` in that order, then others as they were added."""
        return tuple(self._replicas.values())

    def replica(self, name: str) -> Replica:
        """Find a replica; KeyError if there is none of that name."""
        return self._replicas[name]

    def add(self, replica: Replica) -> None:
        """Add a replica, or put a newer description in place of the one of that name.

        Load and health stay with the name, unless the address is another.
        """
        known = self._replicas.get(replica.name)
        if known is None or known.url != replica.url:
            self.remove(replica.name)
            self._health[replica.name] = Health(self._rules)
        self._replicas[replica.name] = replica
        if self._order:
            self._replicas = dict(sorted(self._replicas.items(), key=self._position))
        health, fit = self._health[replica.name], self._fit_of(replica)
        candidates = {candidate.id: candidate for candidate in candidates_of(replica)}
        for slot in self._slots_of(replica.name):
            if slot.candidate.id not in candidates:
                del self._slots[slot.candidate.id]
        for id_, candidate in candidates.items():
            if id_ in self._slots:
                self._slots[id_].candidate, self._slots[id_].fit = candidate, fit
            else:
                self._slots[id_] = _Slot(candidate, health, fit)
        self._by_model.clear()

    def remove(self, name: str) -> bool:
        """Forget a replica; its open leases end without effect. False if it was unknown."""
        if self._replicas.pop(name, None) is None:
            return False
        del self._health[name]
        self._unsettled.discard(name)
        for slot in self._slots_of(name):
            del self._slots[slot.candidate.id]
        self._by_model.clear()
        return True

    def drain(self, name: str, *, draining: bool = True) -> None:
        """Offer a replica no more (or again); what runs there goes on. KeyError if unknown."""
        self.add(replace(self._replicas[name], draining=draining))

    def model(self, name: str) -> ServedModel | None:
        """Find a served model or adapter by name."""
        for replica in self._replicas.values():
            for served in replica.models:
                if served.id == name:
                    return served
        return None

    def is_up(self, name: str, now_s: float) -> bool:
        """Say whether requests may be sent to a replica, as far as its health goes."""
        health = self._health.get(name)
        return health is not None and health.can_accept(now_s)

    def is_idle(self, name: str) -> bool:
        """Say whether nothing is in flight at a replica: it was drained, or has no work."""
        return not any(slot.ledger.num_requests for slot in self._slots_of(name))

    def models(self) -> list[dict[str, Any]]:
        """List the union of served models as entries of `/v1/models`, without duplicates."""
        union: dict[str, ServedModel] = {}
        for replica in self._replicas.values():
            for model in replica.models:
                union.setdefault(model.id, model)
        return [
            {
                "id": model.id,
                "object": "model",
                "created": 0,
                "owned_by": "vllm",
                "root": model.root,
                "parent": model.parent,
                "max_model_len": model.max_model_len,
            }
            for model in union.values()
        ]

    # A request's way

    def candidates(
        self, model: str | None, now_s: float, *, exclude: Collection[str] = ()
    ) -> tuple[Candidate, ...]:
        """List who can take a request for `model` now, in the order of configuration.

        Args:
            model: Model or adapter id; None: any model will do (routes without one).
            now_s: Now.
            exclude: Names of replicas that were tried already.

        Raises:
            UnknownModel: No replica serves it.
            NoReplicaAvailable: Some serve it, but all are out, draining or excluded.
        """
        serving = self._serving(model)
        if not exclude and not self._unsettled:
            eligible = serving
        else:
            eligible = self._eligible(serving, now_s, exclude)
        if not eligible:
            raise self._none_available(model, now_s)
        return eligible

    def views(
        self,
        candidates: Sequence[Candidate],
        matches: Mapping[CandidateId, Match],
        now_s: float,
    ) -> tuple[ReplicaView, ...]:
        """Show each candidate to the policy; shape (num_candidates,), same order.

        Args:
            candidates: As `candidates` returned them, with no state change in between.
            matches: Reusable leading tokens; candidates without any may be absent.
            now_s: Now.
        """
        slots = self._slots
        views = []
        for candidate in candidates:
            id_ = candidate.id
            slot = slots[id_]
            ledger, cost = slot.ledger, slot.fit.model
            queue_ms = ledger.queue_ms(cost, now_s)  # first: it may presume first tokens
            num_gpu_tokens, num_cpu_tokens = matches.get(id_, NO_MATCH)
            view = ReplicaView(
                id=id_,
                num_gpu_tokens=num_gpu_tokens,
                num_cpu_tokens=num_cpu_tokens,
                num_requests=ledger.num_requests,
                num_waiting=ledger.num_waiting,
                num_queued_tokens=ledger.num_queued_tokens,
                queue_ms=queue_ms,
                cost=cost,
            )
            if now_s < slot.foreign_until_s:
                view = _with_foreign(view, slot.foreign)
            views.append(view)
        return tuple(views)

    def begin(
        self,
        candidate: CandidateId,
        *,
        num_uncached_tokens: int,
        num_cached_tokens: int,
        num_fetched_tokens: int = 0,
        streams: bool = True,
        now_s: float,
    ) -> Lease:
        """Book a request that is being sent to `candidate`.

        Args:
            candidate: One of those offered, with no state change in between.
            num_uncached_tokens: Prompt tokens the candidate must compute.
            num_cached_tokens: The prompt's other tokens, the fetched ones included.
            num_fetched_tokens: Of these, tokens read from the cpu tier or the pool.
            streams: Whether the first token will be seen apart from the end.
            now_s: Now.
        """
        slot = self._slots[candidate]
        self._num_leases += 1
        lease = slot.ledger.begin(
            self._num_leases,
            candidate,
            slot.fit.model,
            num_uncached_tokens=num_uncached_tokens,
            num_cached_tokens=num_cached_tokens,
            num_fetched_tokens=num_fetched_tokens,
            streams=streams,
            foreign=slot.foreign_at(now_s),
            now_s=now_s,
        )
        slot.mean_tokens += (1.0 - _MEAN_DECAY) * (num_uncached_tokens - slot.mean_tokens)
        slot.health.began(lease.number, now_s)
        return lease

    def first_token(self, lease: Lease, now_s: float) -> None:
        """Note a request's first token, and learn from its time; later calls do nothing."""
        slot = self._slots.get(lease.candidate)
        if slot is None or not slot.ledger.first_token(lease, now_s):
            return
        if slot.candidate.replica.name in self._unsettled:
            slot.health.answered(lease.number, now_s)
        if lease.streams:
            slot.fit.observe(lease.work, (now_s - lease.begun_s) * 1000.0, lease.predicted_ms)

    def end(self, lease: Lease, now_s: float, outcome: Outcome, *, jitter: float = 0.5) -> bool:
        """Give a lease back and learn from the outcome.

        `jitter` is uniform in [0, 1), drawn by the caller: it spreads retries of a failed
        replica. Idempotent: False, and no effect, if the lease was given back before or its
        replica is gone.
        """
        slot = self._slots.get(lease.candidate)
        if slot is None or not slot.ledger.end(lease, now_s):
            return False
        slot.health.ended(lease.number, outcome, now_s, jitter)
        self._watch(slot.candidate.replica.name)
        return True

    # What probes and readings say

    def probe_ok(self, name: str, now_s: float) -> None:
        """Note that a replica answered a health probe; ignored if it is gone."""
        if (health := self._health.get(name)) is not None:
            health.probe_ok(now_s)
            self._watch(name)

    def probe_failed(
        self, name: str, failure: ProbeFailure, now_s: float, *, jitter: float = 0.5
    ) -> None:
        """Note that a replica failed a health probe; ignored if it is gone."""
        if (health := self._health.get(name)) is not None:
            health.probe_failed(failure, now_s, jitter)
            self._watch(name)

    def note_engine_load(self, candidate: CandidateId, load: EngineLoad) -> None:
        """Take over a reading of the engine's own `/metrics`; ignored if the candidate is gone."""
        slot = self._slots.get(candidate)
        if slot is None:
            return
        slot.engine_load = load
        num_total = load.num_running + load.num_waiting
        num_foreign = max(0, num_total - slot.ledger.num_requests)
        # The engine calls a request running while it is still prefilled; the ledger, waiting.
        num_waiting = min(num_foreign, max(0, load.num_waiting - slot.ledger.num_waiting))
        slot.foreign = Foreign(
            num_requests=num_foreign,
            num_waiting=num_waiting,
            num_queued_tokens=round(num_waiting * slot.mean_tokens),
        )
        slot.foreign_until_s = load.at_s + self._engine_load_max_age_s if num_foreign else 0.0

    def status(self, now_s: float) -> tuple[CandidateStatus, ...]:
        """Show all candidates to people, out or in, in the order of configuration."""
        return tuple(
            _status(slot, now_s) for name in self._replicas for slot in self._slots_of(name)
        )

    # Private

    def _position(self, item: tuple[str, Replica]) -> int:
        return self._order.get(item[0], len(self._order))

    def _watch(self, name: str) -> None:
        """Keep apart the replicas that `candidates` must look at one by one: mostly none."""
        if self._health[name].is_settled:
            self._unsettled.discard(name)
        else:
            self._unsettled.add(name)

    def _fit_of(self, replica: Replica) -> CostFit:
        """Find the cost model of a replica's class; it outlives the replicas."""
        key = (replica.base_model, replica.cost_class)
        if key not in self._fits:
            self._fits[key] = CostFit(self._prior)
        return self._fits[key]

    def _slots_of(self, name: str) -> list[_Slot]:
        return [slot for slot in self._slots.values() if slot.candidate.replica.name == name]

    def _serving(self, model: str | None) -> tuple[Candidate, ...]:
        """List a model's candidates but draining ones; UnknownModel if nobody ever had it."""
        serving = self._by_model.get(model)
        if serving is None:
            replicas = [
                replica
                for replica in self._replicas.values()
                if model is None or any(served.id == model for served in replica.models)
            ]
            if model is not None and not replicas and self._replicas:
                known = ", ".join(entry["id"] for entry in self.models()) or "none yet"
                message = f"The model `{model}` does not exist (served: {known})."
                raise UnknownModel(message, param="model")
            serving = self._by_model[model] = tuple(
                self._slots[candidate.id].candidate
                for replica in replicas
                if not replica.draining
                for candidate in candidates_of(replica)
            )
        return serving

    def _eligible(
        self, serving: Sequence[Candidate], now_s: float, exclude: Collection[str]
    ) -> tuple[Candidate, ...]:
        """Leave out what is broken or tried, and recovering candidates with their share of load.

        In a panic (more than half out) a breaker is more likely wrong than right, and the few
        left would drown: all that listen are offered.
        """
        slots = [self._slots[c.id] for c in serving if c.replica.name not in exclude]
        for name in list(self._unsettled):
            self._health[name].weight(now_s)  # a slow start that is over settles here
            self._watch(name)
        usable = [slot for slot in slots if slot.health.can_accept(now_s)]
        if len(usable) < self._rules.panic_ratio * len(slots):
            usable = [slot for slot in slots if slot.health.can_accept_in_panic(now_s)]
        if not usable:
            return ()
        mean = sum([slot.ledger.num_requests for slot in usable]) / len(usable)
        ramped = [
            slot.candidate
            for slot in usable
            if (weight := slot.health.weight(now_s)) >= 1.0
            or slot.ledger.num_requests < max(1.0, weight * mean)
        ]
        return tuple(ramped) or tuple(slot.candidate for slot in usable)

    def _none_available(self, model: str | None, now_s: float) -> NoReplicaAvailable:
        """Say that nobody is there, and when it makes sense to ask again."""
        waits_s = [
            self._slots[candidate.id].health.retry_at_s - now_s
            for candidate in self._serving(model)
        ]
        retry_after_s = min(_MAX_RETRY_AFTER_S, max(1.0, min(waits_s, default=1.0)))
        what = "replica" if model is None else f"replica of `{model}`"
        return NoReplicaAvailable(f"No {what} can take a request now.", retry_after_s=retry_after_s)


def _with_foreign(view: ReplicaView, foreign: Foreign) -> ReplicaView:
    """Add what others sent to what the ledger shows."""
    return replace(
        view,
        num_requests=view.num_requests + foreign.num_requests,
        num_waiting=view.num_waiting + foreign.num_waiting,
        num_queued_tokens=view.num_queued_tokens + foreign.num_queued_tokens,
        queue_ms=view.queue_ms + view.cost.ms_per_token * foreign.num_queued_tokens,
    )


def _status(slot: _Slot, now_s: float) -> CandidateStatus:
    candidate, ledger, cost = slot.candidate, slot.ledger, slot.fit.model
    return CandidateStatus(
        id=candidate.id,
        replica=candidate.replica.name,
        rank=candidate.rank,
        url=candidate.replica.url,
        state=slot.health.state(now_s).value,
        reason=slot.health.reason,
        draining=candidate.replica.draining,
        num_requests=ledger.num_requests,
        num_waiting=ledger.num_waiting,
        num_queued_tokens=ledger.num_queued_tokens,
        queue_ms=ledger.queue_ms(cost, now_s),
        engine_load=slot.engine_load,
        cost=cost,
        num_observations=slot.fit.num_observations,
    )
