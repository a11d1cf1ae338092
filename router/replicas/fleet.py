"""The fleet: all replicas with their load, health and speed, in one place.

What must live here: which candidates can take a request, and the state of each. What must not:
which one to take (policies), what is cached (router.index), any I/O or clock. Every state change is
one synchronous call; `now_s` comes from the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from policies.view import NOTHING_HELD, CandidateId, CostModel, Holding, ReplicaView
from router.base.errors import NoReplicaAvailable, RouterError
from router.base.messages import Evacuation
from router.base.releases import in_order
from router.index.footprint import capacity_tokens
from router.index.hit_length import KvLayout
from router.records.outcome import Outcome
from router.replicas.candidate_state import (
    CandidateState,
    CandidateStatus,
    EngineLoad,
)
from router.replicas.conversations import Conversations
from router.replicas.cost_classes import CostClasses, Speed
from router.replicas.cost_fit import PRIOR
from router.replicas.eligibility import eligible
from router.replicas.health import Health, HealthRules, HealthState, ProbeFailure
from router.replicas.ledger import NOTHING, Booking, InFront, Lease
from router.replicas.lengths import Lengths
from router.replicas.member import Member
from router.replicas.refusals import (
    check_roles,
    no_replica,
    none_available,
    states_of,
    unknown_model,
)
from router.replicas.replica import Candidate, Replica, ServedModel, candidates_of, model_entries
from router.replicas.signs import Signs

__all__ = ["CandidateStatus", "EngineLoad", "Fleet"]

_NUM_KNOWN = 32  # observations before predictions can be held against an engine


def _ignore(*_: object) -> None:
    """Do nothing about a change."""


def _no_layout(_: CandidateId) -> None:
    """Know no KV groups."""


class _Serving(Struct, frozen=True):
    """The candidates that may be offered for a model."""

    candidates: tuple[Candidate, ...]
    lengths: Lengths | None  # None: of any model


class Fleet:
    """Replicas by name; see the module's charter.

    The life of a request: `candidates` -> `views` -> (policy) -> `admit` -> `first_token` -> `end`.
    `end` is called in every case; calling it again does nothing.
    """

    __slots__ = (
        "_classes",
        "_members",
        "_num_leases",
        "_order",
        "_restricted",
        "_rules",
        "_serving",
        "_states",
        "absent",
        "conversations",
        "evacuations",
        "is_split",
        "lacking",
        "layout_of",
        "on_change",
        "on_down",
        "on_restart",
    )

    def __init__(
        self,
        *,
        rules: HealthRules | None = None,
        prior: CostModel = PRIOR,
        order: Sequence[str] = (),
        conversations: Conversations | None = None,
    ) -> None:
        self._rules = rules or HealthRules()
        self._members: dict[str, Member] = {}
        self._states: dict[CandidateId, CandidateState] = {}
        self._classes = CostClasses(prior)
        self._serving: dict[str | None, _Serving] = {}
        self._restricted: set[str] = set()  # replicas whose health or weight restricts them
        self._num_leases = 0
        self.is_split = False  # whether some replica has a role: prefill or decode
        self._order = {name: position for position, name in enumerate(order)}
        self.conversations = Conversations() if conversations is None else conversations
        self.evacuations: dict[str, Evacuation] = {}
        """Replicas that drain, and whose live conversations may stay there."""
        self.lacking: dict[str, set[str]] = {}
        """Routes of engines that some replicas lack, with the names of these."""
        self.layout_of: Callable[[CandidateId], KvLayout | None] = _no_layout
        """A candidate's KV groups; None: it has one, or they are not known."""
        self.absent: Callable[[], str] = str
        """Lists the replicas that have not answered yet, for clients; empty: all have."""
        self.on_change: Callable[[], None] = _ignore
        """Called when a candidate may have room that it did not have before."""
        self.on_down: Callable[[str, float], None] = _ignore
        """Called with a replica that is dead or hangs, unless it was draining, and now."""
        self.on_restart: Callable[[str, float], None] = _ignore
        """Called with a replica for which another process answers, and now."""

    # -- membership --------------------------------------------------------------------------

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All replicas: those of `order` in that order, then others as they were added."""
        return tuple(member.replica for member in self._members.values())

    def replica(self, name: str) -> Replica:
        """Find a replica; KeyError if there is none of that name."""
        return self._members[name].replica

    def add(self, replica: Replica) -> None:
        """Add a replica, or replace the description of the one of that name.

        Load, health, draining, sleep and pause stay with the name, unless the address is another.
        Then it is another server, and leases of the old one end without effect.
        """
        member = self._members.get(replica.name)
        if member is not None and member.replica.url == replica.url:
            known = member.replica
            replica = replace(
                replica,
                draining=replica.draining or known.draining,
                asleep=replica.asleep or known.asleep,
                paused=replica.paused or known.paused,
            )
        else:
            self.remove(replica.name)
            speed = Speed(replica.name, self._classes.of(replica.base_model, replica.cost_class))
            self._members[replica.name] = Member(replica, Health(self._rules), speed)
            if self._order:
                self._members = dict(sorted(self._members.items(), key=self._position))
        self._forget_lacking(replica.name)  # it may be another release now
        self._describe(replica)

    def remove(self, name: str) -> bool:
        """Remove a replica; its open leases end without effect. False if it was unknown."""
        member = self._members.pop(name, None)
        if member is None:
            return False
        member.speed.leave()
        self._forget_lacking(name)
        self._restricted.discard(name)
        for candidate in member.states:
            self._remove(candidate)
        self._membership_changed()
        return True

    def drain(self, name: str, *, draining: bool = True) -> None:
        """Stop (or resume) offering a replica; what runs there goes on. KeyError if unknown."""
        self._describe(replace(self.replica(name), draining=draining))

    def set_sleep(self, name: str, *, asleep: bool, paused: bool) -> None:
        """Stop (or resume) offering a replica that sleeps or is paused. KeyError if unknown."""
        self._describe(replace(self.replica(name), asleep=asleep, paused=paused))

    def set_models(self, name: str, models: tuple[ServedModel, ...]) -> None:
        """Record that a replica loaded or unloaded adapters. KeyError if unknown."""
        self._describe(replace(self.replica(name), models=models))

    def lacks(self, name: str, route: str) -> bool:
        """Record that a replica lacks a route; True: it was not known. Ignored if it is gone."""
        names = self.lacking.setdefault(route, set()) if name in self._members else {name}
        if name in names:
            return False
        names.add(name)
        return True

    def all_lack(self, model: str | None, route: str) -> bool:
        """Return whether there are replicas that serve a model, and all of them lack a route."""
        serving = {
            member.replica.name
            for member in self._members.values()
            if member.replica.role != "prefill"
            if model is None or member.replica.serves(model)
        }
        return bool(serving) and serving <= self.lacking.get(route, set())

    def version(self) -> str | None:
        """Return the oldest release among the replicas; None: none says its own."""
        versions = [each.version for each in self.replicas if each.version is not None]
        return min(versions, key=in_order, default=None)

    def model(self, name: str) -> ServedModel | None:
        """Find a served model or adapter by name."""
        for member in self._members.values():  # plain loops: every request asks
            for served in member.replica.models:
                if served.id == name:
                    return served
        return None

    def models(self) -> list[dict[str, Any]]:
        """List the union of served models as entries of `/v1/models`, without duplicates."""
        return model_entries(self.replicas)

    def unserved(self, now_s: float) -> Iterator[tuple[str, str]]:
        """Yield the models and adapters that no replica takes requests for now, and why."""
        replicas = self.replicas
        served = {
            model.id
            for each in replicas
            if each.is_offered and each.role == "both" and each.name not in self._restricted
            for model in each.models
        }
        models = (model.id for each in replicas for model in each.models)
        for name in dict.fromkeys(model for model in models if model not in served):
            try:
                self._serving_of(name)
            except RouterError as error:  # by their roles
                yield name, error.message
                continue
            try:
                self.candidates(name, now_s)
            except NoReplicaAvailable:
                yield name, states_of(name, self._members.values(), now_s)

    def available(self, now_s: float) -> Iterator[tuple[str, int]]:
        """Yield each base model, and how many replicas take requests for it now."""
        bases = (m.id for each in self.replicas for m in each.models if m.parent is None)
        for name in dict.fromkeys(bases):
            try:
                yield name, len({each.replica.name for each in self.candidates(name, now_s)})
            except RouterError:
                yield name, 0

    def longest(self, model: str) -> int | None:
        """Return the tokens of the longest request that a replica takes for a model.

        None: some may take any, as far as is known.
        """
        try:
            lengths = self._serving_of(model).lengths
        except RouterError:
            return None
        return lengths.longest if lengths is not None else None

    def is_up(self, name: str, now_s: float) -> bool:
        """Return whether a replica's health lets requests be sent to it."""
        member = self._members.get(name)
        return member is not None and member.health.can_accept(now_s)

    def listens(self, name: str, now_s: float) -> bool:
        """Return whether a server may answer at a replica, in whatever health."""
        member = self._members.get(name)
        return member is not None and member.health.state(now_s) is not HealthState.DOWN

    def is_down(self, name: str) -> bool:
        """Return whether a replica is dead, hangs, or is gone."""
        member = self._members.get(name)
        return member is None or member.health.is_down

    def is_idle(self, name: str) -> bool:
        """Return whether this router has nothing in flight at a replica."""
        return all(state.is_idle for state in self._states_of(name))

    def signs(self, name: str) -> Signs:
        """Return the signs of a replica's work; a replica that is gone has none."""
        member = self._members.get(name)
        return member.signs if member is not None else Signs()

    def num_sent(self, name: str) -> int:
        """Count the requests that routers have in flight at a replica."""
        return sum(state.ledger.num_requests for state in self._states_of(name))

    def has(self, candidate: CandidateId) -> bool:
        """Return whether a candidate is known."""
        return candidate in self._states

    # -- the life of a request ---------------------------------------------------------------

    def candidates(
        self,
        model: str | None,
        now_s: float,
        *,
        exclude: Collection[str] = (),
        num_tokens: int = 0,
    ) -> tuple[Candidate, ...]:
        """List the candidates that can take a request for `model` now, in the order configured.

        Args:
            model: Model or adapter id; None: any model (routes without one).
            now_s: Now.
            exclude: Names of replicas that were tried already.
            num_tokens: Of prompt and answer. Replicas that are too short are left out. If all are
                too short, the longest remain, and their engine refuses the request.

        Raises:
            UnknownModel: No replica serves it.
            NoReplicaAvailable: Some serve it, but all are out, draining or excluded.
        """
        serving = self._serving_of(model)
        offered, lengths = serving.candidates, serving.lengths
        if num_tokens and lengths is not None and not lengths.are_equal:
            offered = lengths.fitting(offered, num_tokens)
        if exclude or self._restricted:
            offered = self._eligible(offered, now_s, exclude)
        if not offered:
            raise self._none_available(model, now_s)
        return offered

    def prefillers(
        self, model: str | None, reader: Replica | None, now_s: float
    ) -> tuple[Candidate, ...]:
        """List the candidates that can compute a prompt for others now, in the order configured.

        None that has stalled: the replica that decodes can compute the prompt, too.

        `reader`: the replica that will read the prompt's KV. Both need the same transfer, and the
        same pool if it goes through one. None: any.
        """
        if not self.is_split:
            return ()
        offered = tuple(
            state.candidate
            for member in self._members.values()
            if member.replica.role == "prefill" and member.replica.is_offered
            if member.health.can_accept(now_s) or not member.health.can_accept_at_last()
            if any(served.id == model for served in member.replica.models)
            if reader is None or _can_meet(member.replica, reader)
            for state in member.states.values()
        )
        return self._eligible(offered, now_s, ()) if self._restricted else offered

    def draining(
        self, model: str | None, now_s: float, *, exclude: Collection[str] = ()
    ) -> tuple[Candidate, ...]:
        """List the candidates that get no new work, but may have what they were asked before."""
        return tuple(
            candidate
            for member in self._members.values()
            if member.replica.draining and member.replica.name not in exclude
            if not (member.replica.asleep or member.replica.paused)
            if model is None or member.replica.serves(model)
            if self.listens(member.replica.name, now_s)
            for candidate in candidates_of(member.replica)
        )

    def candidates_at(
        self, name: str, model: str | None, now_s: float, *, exclude: Collection[str] = ()
    ) -> tuple[Candidate, ...]:
        """List the candidates of one replica, draining or not, in whatever health.

        Raises:
            NoReplicaAvailable: it is excluded, or gone.
        """
        member = self._members.get(name) if name not in exclude else None
        if member is None:
            raise self._none_available(model, now_s)
        return candidates_of(member.replica)

    def views(
        self,
        candidates: Sequence[Candidate],
        held: Mapping[CandidateId, Holding],
        now_s: float,
        in_front_ms: InFront = NOTHING,
    ) -> tuple[ReplicaView, ...]:
        """Describe each candidate to the policy; shape (num_candidates,), same order.

        Args:
            candidates: As `candidates` returned them, with no state change in between.
            held: Reusable leading tokens; candidates without any may be absent.
            now_s: Now.
            in_front_ms: Compute that goes to a candidate before the request, not sent yet.
        """
        states, held_by = self._states, held.get
        views = [states[c.id].view(held_by(c.id, NOTHING_HELD), now_s) for c in candidates]
        if in_front_ms:
            waits = in_front_ms.get
            views = [replace(v, queue_ms=v.queue_ms + waits(v.id, 0.0)) for v in views]
        return tuple(views)

    def admit(self, candidate: CandidateId, booking: Booking, now_s: float) -> Lease:
        """Book a request that is sent to `candidate`, by this router or by another.

        A request of another router counts as ours does, except for the replica's health. KeyError
        if the candidate is not known.
        """
        state = self._states[candidate]
        self._num_leases += 1
        if booking.session_hash is not None:
            num_cached_tokens = booking.num_cached_tokens
            self.conversations.begin(
                booking.session_hash,
                candidate,
                booking.num_uncached_tokens + num_cached_tokens,
                num_cached_tokens,
                now_s,
                is_batch=booking.is_batch,
            )
        return state.admit(self._num_leases, booking, now_s)

    def first_token(self, lease: Lease, now_s: float, ttft_ms: float | None = None) -> None:
        """Record a request's first token and learn from its time; later calls do nothing.

        `ttft_ms`: how long it took another router's request; None: not known. The features are
        what this ledger showed when the note came. That differs from the sender's by some
        milliseconds of work, which the fit takes for noise.
        """
        state = self._states.get(lease.candidate)
        if state is not None:
            if lease.booking.is_ours:
                ttft_ms = (now_s - lease.begun_s) * 1000.0
            state.first_token(lease, now_s, ttft_ms)
            self.on_change()

    def end(
        self, lease: Lease, now_s: float, outcome: Outcome | None, *, jitter: float = 0.5
    ) -> bool:
        """Give a lease back and learn from the outcome; None: it was another router's.

        `jitter` is uniform in [0, 1), drawn by the caller: it spreads retries of a failed
        replica. Idempotent: False, and no effect, if the lease was given back before or its
        replica is gone.
        """
        state = self._states.get(lease.candidate)
        was_down = state is not None and state.health.is_down
        if state is None or not state.end(lease, now_s, outcome, jitter):
            return False
        self._health_changed(state.candidate.replica.name, was_down, now_s)
        if lease.booking.session_hash is not None:
            self.conversations.end(lease.booking.session_hash, now_s)
        return True

    def absolve(self, lease: Lease) -> None:
        """Take back what the failure of an ended lease did to its replica's health."""
        state = self._states.get(lease.candidate)
        if state is not None:
            state.health.absolve(lease.number)
            self._restrict(state.candidate.replica.name)

    # -- questions about one candidate -------------------------------------------------------

    def num_ready(self, candidate: CandidateId, now_s: float) -> int:
        """Count requests before their first token that routers sent there, without lost ones."""
        state = self._states.get(candidate)
        return state.ledger.num_timely(now_s) if state is not None else 0

    def queue_at_pace_ms(self, candidate: CandidateId) -> float:
        """Return how long the queue there takes at the recent pace; 0.0: not known."""
        state = self._states.get(candidate)
        return state.ledger.queue_at_pace_ms() if state is not None else 0.0

    def has_idle_time(self, candidate: CandidateId, price_ms: float, now_s: float) -> bool:
        """Return whether a candidate was idle for so long; False: it is not known."""
        state = self._states.get(candidate)
        return state is not None and state.ledger.idle.saved_ms(now_s) >= price_ms

    def spend_idle_time(self, candidate: CandidateId, price_ms: float, now_s: float) -> None:
        """Send a prompt for so much idle time."""
        state = self._states.get(candidate)
        if state is not None:
            state.ledger.idle.spend(price_ms, now_s)

    def capacity_tokens(self, candidate: CandidateId) -> int | None:
        """Return how many tokens a candidate's cache holds; None: not known.

        With several KV groups: how many tokens its live conversations may have.
        """
        state = self._states.get(candidate)
        if state is None:
            return None
        layout, num_blocks = self.layout_of(candidate), state.candidate.replica.num_blocks
        if layout is None or num_blocks is None:
            return state.candidate.capacity_tokens
        return capacity_tokens(layout, num_blocks, self.conversations.at(candidate).num_sessions)

    def overdue_s(self, lease: Lease, *, ratio: float, floor_s: float) -> float | None:
        """Return after how long a first token is overdue; None: too little is known.

        A multiple of the predicted time and of the error of predictions, at least `floor_s`.
        """
        state = self._states.get(lease.candidate)
        if state is None or not lease.booking.streams or state.fit.num_observations < _NUM_KNOWN:
            return None
        model = state.fit.model
        reads = lease.booking.is_from_pool
        error_ms = max(model.error_ms, model.fetch_error_ms) if reads else model.error_ms
        return max(floor_s, (ratio * lease.predicted_ms + 4 * error_ms) / 1000.0)

    def longest_wait_s(self, candidate: CandidateId, now_s: float) -> float:
        """Return how long the oldest request without a first token has waited there."""
        state = self._states.get(candidate)
        begun = [lease.begun_s for lease in state.ledger.waiting] if state is not None else []
        return now_s - min(begun, default=now_s)

    def tbt_ms(self, candidate: CandidateId, num_tokens: int, now_s: float) -> float | None:
        """Predict the inter-token latency of an answer once its prompt has been computed.

        None: the candidate has nothing in flight, or too little is known of it.
        """
        state = self._states.get(candidate)
        return state.tbt_ms(num_tokens, now_s) if state is not None else None

    def status(self, now_s: float) -> tuple[CandidateStatus, ...]:
        """Describe all candidates for people, eligible or not, in the order configured."""
        members = self._members.values()
        return tuple(state.status(now_s) for each in members for state in each.states.values())

    # -- probes and readings -----------------------------------------------------------------

    def probe_ok(self, name: str, now_s: float) -> None:
        """Record that a replica answered a health probe; ignored if it is gone."""
        if (member := self._members.get(name)) is not None:
            member.health.probe_ok(now_s)
            self._health_changed(name, True, now_s)

    def probe_failed(
        self, name: str, failure: ProbeFailure, now_s: float, *, jitter: float = 0.5
    ) -> None:
        """Record that a replica failed a health probe; ignored if it is gone."""
        if (member := self._members.get(name)) is not None:
            was_down = member.health.is_down
            member.health.probe_failed(failure, now_s, jitter)
            self._health_changed(name, was_down, now_s)

    def probe_excused(self, name: str) -> None:
        """Record that a probe got no answer from a replica that is active otherwise."""
        if (member := self._members.get(name)) is not None:
            member.health.probe_excused()

    def note_signs(self, name: str, is_stalled: bool, now_s: float) -> bool:
        """Record whether signs show that a replica has stalled; return whether that is new."""
        member = self._members.get(name)
        if member is None or not (is_stalled or member.health.is_stalled):
            return False
        was_stalled = member.health.is_stalled
        if is_stalled:
            member.health.stalled(member.signs.quiet_s(now_s), now_s)
        else:
            member.health.moves(now_s)
        self._health_changed(name, True, now_s)
        return was_stalled != member.health.is_stalled

    def note_engine_load(self, candidate: CandidateId, load: EngineLoad) -> None:
        """Take over a reading of the engine's own `/metrics`; ignored if the candidate is gone."""
        state = self._states.get(candidate)
        if state is not None:
            state.note_engine_load(load)
            self.on_change()

    def set_early(self, candidate: CandidateId, num_requests: int) -> None:
        """Say how many requests an engine has that yield to all others; they are no load."""
        state = self._states.get(candidate)
        if state is not None:
            state.num_early = num_requests

    # -- private: membership -----------------------------------------------------------------

    def _describe(self, replica: Replica) -> None:
        """Put the description of a known replica in place, and its candidates."""
        member = self._members[replica.name]
        member.replica = replica
        classes = self._classes.of(replica.base_model, replica.cost_class)
        if member.speed.classes is not classes:
            member.speed.leave()
            member.speed = Speed(replica.name, classes)
        candidates = {candidate.id: candidate for candidate in candidates_of(replica)}
        for gone in member.states.keys() - candidates.keys():
            del member.states[gone]
            self._remove(gone)
        for id_, candidate in candidates.items():
            state = member.states.get(id_)
            if state is None:
                state = CandidateState(candidate, member.health, member.speed)
                self._states[id_] = member.states[id_] = state
            state.candidate, state.speed = candidate, member.speed
        self._restrict(replica.name)
        self._membership_changed()

    def _membership_changed(self) -> None:
        self._serving.clear()
        self.is_split = any(replica.role != "both" for replica in self.replicas)
        self.on_change()

    def _forget_lacking(self, name: str) -> None:
        for names in self.lacking.values():
            names.discard(name)

    def _remove(self, candidate: CandidateId) -> None:
        del self._states[candidate]
        self.conversations.remove(candidate)

    def _position(self, item: tuple[str, Member]) -> int:
        return self._order.get(item[0], len(self._order))

    def _states_of(self, name: str) -> Collection[CandidateState]:
        member = self._members.get(name)
        return member.states.values() if member is not None else ()

    # -- private: health ---------------------------------------------------------------------

    def _restrict(self, name: str) -> None:
        """Keep the set of replicas that `candidates` must examine: mostly none."""
        member = self._members[name]
        if member.health.is_unrestricted and member.replica.weight >= 1.0:
            self._restricted.discard(name)
        else:
            self._restricted.add(name)

    def _health_changed(self, name: str, was_down: bool, now_s: float) -> None:
        member = self._members[name]
        self._restrict(name)
        if member.health.is_down and not member.replica.is_awake:
            self.set_sleep(name, asleep=False, paused=False)  # it will say so when it is back
        if member.health.is_down and not was_down and not member.replica.draining:
            self.on_down(name, now_s)
        self.on_change()

    def _eligible(
        self, serving: Sequence[Candidate], now_s: float, exclude: Collection[str]
    ) -> tuple[Candidate, ...]:
        """Leave out candidates that were tried, and those whose health forbids it."""
        states = [self._states[c.id] for c in serving if c.replica.name not in exclude]
        offered = tuple(
            state.candidate for state in eligible(states, self._rules, now_s, self._restricted)
        )
        for name in list(self._restricted):
            self._members[name].health.weight(now_s)  # a slow start that is over ends here
            self._restrict(name)
        return offered

    # -- private: who serves a model, and errors ---------------------------------------------

    def _serving_of(self, model: str | None) -> _Serving:
        """List a model's candidates that may be offered.

        Raises:
            UnknownModel: no replica has it, and the models of all replicas are known.
            NoReplicaAvailable: those that have it cannot answer, by their roles.
        """
        known = self._serving.get(model)
        if known is not None:
            return known
        replicas = [each for each in self.replicas if model is None or each.serves(model)]
        if not replicas:
            if model is not None and all(replica.models for replica in self.replicas):
                raise self._unknown_model(model)
            return _Serving((), None)  # not kept: clients may ask for any name
        check_roles(replicas, is_split=self.is_split)
        serving = self._serving[model] = _Serving(
            tuple(
                state.candidate
                for replica in replicas
                if replica.is_offered and replica.role != "prefill"
                for state in self._members[replica.name].states.values()
            ),
            Lengths.of(model, replicas) if model is not None else None,
        )
        return serving

    def no_replica(self) -> NoReplicaAvailable:
        """Make the error for a fleet without any replica."""
        return no_replica(self.absent())

    def _unknown_model(self, model: str) -> RouterError:
        if not self._members:
            return self.no_replica()
        return unknown_model(model, [entry["id"] for entry in self.models()], self.absent())

    def _none_available(self, model: str | None, now_s: float) -> NoReplicaAvailable:
        """Make the error for "no replica", with the time after which to try again."""
        if not self._members:
            return self.no_replica()
        waits_s = [
            self._states[candidate.id].health.retry_at_s - now_s
            for candidate in self._serving_of(model).candidates
        ]
        return none_available(model, self._members.values(), waits_s, now_s)


def _can_meet(prefill: Replica, decode: Replica) -> bool:
    """Return whether one replica can read the KV that the other computes."""
    if prefill.transfer != decode.transfer:
        return False
    return prefill.transfer != "store" or prefill.pool == decode.pool
