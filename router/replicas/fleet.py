"""The fleet: all replicas with their load, health and speed, in one place.

What must live here: which candidates can take a request, and the state of each. What
must not: which one to take (policies), what is cached (router.index), any I/O or clock. Every
state change is one synchronous call; `now_s` comes from the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from policies.view import CandidateId, CostModel, ReplicaView
from router.errors import NoReplicaAvailable, RouterError, UnknownModel
from router.index.footprint import capacity_tokens
from router.index.hit_length import KvLayout
from router.records.outcome import Outcome
from router.replicas.candidate_state import (
    NO_MATCH,
    CandidateState,
    CandidateStatus,
    EngineLoad,
    Match,
)
from router.replicas.cost_classes import CostClass, Speed
from router.replicas.cost_fit import PRIOR, CostFit
from router.replicas.eligibility import eligible
from router.replicas.health import Health, HealthRules, HealthState, ProbeFailure
from router.replicas.ledger import NOTHING, Booking, InFront, Lease
from router.replicas.lengths import Lengths
from router.replicas.replica import Candidate, Replica, ServedModel, candidates_of, model_entries
from router.replicas.signs import Signs
from router.replicas.working_sets import WorkingSets

__all__ = ["NO_MATCH", "CandidateStatus", "EngineLoad", "Fleet", "Match"]

_MAX_RETRY_AFTER_S = 30.0
_SHOWN = 3  # replicas that an error names
_NUM_KNOWN = 32  # observations before predictions can be held against an engine


def _ignore() -> None:
    """Do nothing about a change."""


def _ignore_name(name: str, now_s: float) -> None:
    """Do nothing about a replica that went down or restarted."""


def _no_layout(_: CandidateId) -> None:
    """Know no KV groups."""


class Fleet:
    """Replicas by name; see the module's charter.

    The life of a request: `candidates` -> `views` -> (policy) -> `admit` -> `first_token` ->
    `end`, the last in every case, any number of times.
    """

    __slots__ = (
        "_by_model",
        "_classes",
        "_health",
        "_lengths",
        "_mixed",
        "_num_leases",
        "_order",
        "_prefilling",
        "_prior",
        "_replicas",
        "_restricted",
        "_rules",
        "_signs",
        "_speeds",
        "_states",
        "absent",
        "is_split",
        "layout_of",
        "no_replica",
        "on_change",
        "on_down",
        "on_restart",
        "working_sets",
    )

    def __init__(
        self,
        *,
        rules: HealthRules | None = None,
        prior: CostModel = PRIOR,
        order: Sequence[str] = (),
    ) -> None:
        self._rules = rules or HealthRules()
        self._prior = prior
        self._replicas: dict[str, Replica] = {}
        self._health: dict[str, Health] = {}
        self._signs: dict[str, Signs] = {}
        self._states: dict[CandidateId, CandidateState] = {}
        self._classes: dict[tuple[str, str], list[CostClass]] = {}  # by model and label
        self._speeds: dict[str, Speed] = {}
        self._by_model: dict[str | None, tuple[Candidate, ...]] = {}
        self._lengths: dict[str, Lengths] = {}  # of those in `_by_model`
        self._mixed: set[str | None] = set()  # models whose replicas take different lengths
        self._prefilling: dict[str | None, tuple[Candidate, ...]] = {}
        self._restricted: set[str] = set()  # replicas whose health restricts them
        self._num_leases = 0
        self.is_split = False  # whether some replica has a role: prefill or decode
        self._order = {name: position for position, name in enumerate(order)}
        self.working_sets = WorkingSets()
        self.layout_of: Callable[[CandidateId], KvLayout | None] = _no_layout
        """A candidate's KV groups; None: it has one, or they are not known."""
        self.no_replica: Callable[[], str] = lambda: "No replica is configured."
        """Says why there is no replica at all, for clients."""
        self.absent: Callable[[], str] = str
        """Lists the replicas that have not answered yet, for clients; empty: all have."""
        self.on_change: Callable[[], None] = _ignore
        """Called when a candidate may have room that it had not: what waits may go."""
        self.on_down: Callable[[str, float], None] = _ignore_name
        """Called with a replica that was found dead or hung, unless it was draining, and now."""

        self.on_restart: Callable[[str, float], None] = _ignore_name
        """Called with a replica for which another process answers, and now."""

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

        Load, health, draining, sleep and pause stay with the name, unless the address is another:
        that is another server, and leases of the old one end without effect.
        """
        known = self._replicas.get(replica.name)
        if known is None or known.url != replica.url:
            self.remove(replica.name)
            self._health[replica.name] = Health(self._rules)
            self._signs[replica.name] = Signs()
        else:
            replica = replace(
                replica,
                draining=replica.draining or known.draining,
                asleep=replica.asleep or known.asleep,
                paused=replica.paused or known.paused,
            )
        self._replicas[replica.name] = replica
        if self._order:
            self._replicas = dict(sorted(self._replicas.items(), key=self._position))
        health, speed = self._health[replica.name], self._speed_of(replica)
        candidates = {candidate.id: candidate for candidate in candidates_of(replica)}
        for state in self._states_of(replica.name):
            if state.candidate.id not in candidates:
                self._forget(state.candidate.id)
        for id_, candidate in candidates.items():
            if id_ in self._states:
                self._states[id_].candidate, self._states[id_].speed = candidate, speed
            else:
                self._states[id_] = CandidateState(candidate, health, speed)
        self._watch(replica.name)
        self._forget_lists()
        self.on_change()

    def remove(self, name: str) -> bool:
        """Forget a replica; its open leases end without effect. False if it was unknown."""
        if self._replicas.pop(name, None) is None:
            return False
        del self._health[name], self._signs[name]
        self._speeds.pop(name).leave()
        self._restricted.discard(name)
        for state in self._states_of(name):
            self._forget(state.candidate.id)
        self._forget_lists()
        self.on_change()
        return True

    def drain(self, name: str, *, draining: bool = True) -> None:
        """Stop (or resume) offering a replica; what runs there goes on. KeyError if unknown."""
        self._replicas[name] = replace(self._replicas[name], draining=draining)
        self.add(self._replicas[name])

    def set_sleep(self, name: str, *, asleep: bool, paused: bool) -> None:
        """Stop (or resume) offering a replica that sleeps or is paused. KeyError if unknown."""
        self._replicas[name] = replace(self._replicas[name], asleep=asleep, paused=paused)
        self.add(self._replicas[name])

    def set_models(self, name: str, models: tuple[ServedModel, ...]) -> None:
        """Note that a replica loaded or unloaded adapters. KeyError if unknown."""
        self.add(replace(self._replicas[name], models=models))

    def model(self, name: str) -> ServedModel | None:
        """Find a served model or adapter by name."""
        for replica in self._replicas.values():
            for served in replica.models:
                if served.id == name:
                    return served
        return None

    def longest(self, model: str) -> int | None:
        """Return the tokens of the longest request that a replica takes for a model.

        None: some may take any, as far as is known.
        """
        lengths = self._lengths.get(model)
        if lengths is None:
            with suppress(RouterError):
                self._serving(model)
            lengths = self._lengths.get(model)
        return lengths.longest if lengths is not None else None

    def is_up(self, name: str, now_s: float) -> bool:
        """Return whether a replica's health lets requests be sent to it."""
        health = self._health.get(name)
        return health is not None and health.can_accept(now_s)

    def listens(self, name: str, now_s: float) -> bool:
        """Return whether something may answer at a replica, however well it does."""
        health = self._health.get(name)
        return health is not None and health.state(now_s) is not HealthState.DOWN

    def is_down(self, name: str) -> bool:
        """Return whether a replica was found dead or hung, or is gone."""
        health = self._health.get(name)
        return health is None or health.is_down

    def is_idle(self, name: str) -> bool:
        """Return whether this router has nothing in flight at a replica."""
        return all(state.is_idle for state in self._states_of(name))

    def signs(self, name: str) -> Signs:
        """Return the signs of a replica's work; of one that is gone there are none."""
        return self._signs.get(name) or Signs()

    def num_sent(self, name: str) -> int:
        """Count the requests that routers have in flight at a replica."""
        return sum(state.ledger.num_requests for state in self._states_of(name))

    def has(self, candidate: CandidateId) -> bool:
        """Return whether a candidate is known."""
        return candidate in self._states

    def models(self) -> list[dict[str, Any]]:
        """List the union of served models as entries of `/v1/models`, without duplicates."""
        return model_entries(self._replicas.values())

    # The life of a request

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
            model: Model or adapter id; None: any model will do (routes without one).
            now_s: Now.
            exclude: Names of replicas that were tried already.
            num_tokens: Of prompt and answer. Where replicas take different lengths, those that
                are too short are left out; if all are, the longest remain: their engine says no.

        Raises:
            UnknownModel: No replica serves it.
            NoReplicaAvailable: Some serve it, but all are out, draining or excluded.
        """
        serving = self._serving(model)
        if num_tokens and model in self._mixed:
            serving = self._lengths[model or ""].fitting(serving, num_tokens)
        if not exclude and not self._restricted:
            offered = serving
        else:
            offered = self._eligible(serving, now_s, exclude)
        if not offered:
            raise self._none_available(model, now_s)
        return offered

    def prefillers(
        self, model: str | None, reader: Replica | None, now_s: float
    ) -> tuple[Candidate, ...]:
        """List the candidates that can compute a prompt for others now, in the order configured.

        `reader`: for whom; a prompt gets there by the transfer that both have, and through a pool
        that both are in. None: for any.
        """
        serving = self._prefilling.get(model)
        if serving is None:
            serving = self._prefilling[model] = tuple(
                self._states[candidate.id].candidate
                for replica in self._replicas.values()
                if replica.role == "prefill" and replica.is_offered
                if any(served.id == model for served in replica.models)
                for candidate in candidates_of(replica)
            )
        offered = [c for c in serving if reader is None or _can_meet(c.replica, reader)]
        return self._eligible(offered, now_s, ()) if self._restricted else tuple(offered)

    def candidates_at(
        self, name: str, model: str | None, now_s: float, *, exclude: Collection[str] = ()
    ) -> tuple[Candidate, ...]:
        """List the candidates of one replica, draining or not, in whatever health.

        Raises:
            NoReplicaAvailable: it is excluded, or gone.
        """
        replica = self._replicas.get(name) if name not in exclude else None
        if replica is None:
            raise self._none_available(model, now_s)
        return candidates_of(replica)

    def views(
        self,
        candidates: Sequence[Candidate],
        matches: Mapping[CandidateId, Match],
        now_s: float,
        in_front_ms: InFront = NOTHING,
    ) -> tuple[ReplicaView, ...]:
        """Describe each candidate to the policy; shape (num_candidates,), same order.

        Args:
            candidates: As `candidates` returned them, with no state change in between.
            matches: Reusable leading tokens; candidates without any may be absent.
            now_s: Now.
            in_front_ms: Compute that goes to a candidate before the request, not sent yet.
        """
        states, match_of = self._states, matches.get
        views = [states[c.id].view(match_of(c.id, NO_MATCH), now_s) for c in candidates]
        if in_front_ms:
            waits = in_front_ms.get
            views = [replace(v, queue_ms=v.queue_ms + waits(v.id, 0.0)) for v in views]
        return tuple(views)

    def admit(self, candidate: CandidateId, booking: Booking, now_s: float) -> Lease:
        """Book a request that is sent to `candidate`: by this router, or by another.

        Another router's counts as ours do: queue, busy ratio, cache pressure, room of a slow start;
        but neither for nor against the replica's health. KeyError if the candidate is not known.
        """
        state = self._states[candidate]
        self._num_leases += 1
        if booking.session_hash is not None:
            num_cached_tokens = booking.num_cached_tokens
            self.working_sets.begin(
                booking.session_hash,
                candidate,
                booking.num_uncached_tokens + num_cached_tokens,
                num_cached_tokens,
                now_s,
                is_batch=booking.is_batch,
            )
        return state.admit(self._num_leases, booking, now_s)

    def first_token(self, lease: Lease, now_s: float) -> None:
        """Note a request's first token and learn from its time; later calls do nothing."""
        state = self._states.get(lease.candidate)
        if state is not None:
            state.first_token(lease, now_s, (now_s - lease.begun_s) * 1000.0)
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
        self._watch(state.candidate.replica.name)
        self._tell_down(state.candidate.replica.name, was_down, now_s)
        if lease.booking.session_hash is not None:
            self.working_sets.end(lease.booking.session_hash, now_s)
        self.on_change()
        return True

    def absolve(self, lease: Lease, now_s: float) -> None:
        """Take back what the failure of an ended lease did to its replica's health."""
        state = self._states.get(lease.candidate)
        if state is not None:
            state.health.absolve(lease.number, now_s)
            self._watch(state.candidate.replica.name)

    def num_ready(self, candidate: CandidateId, now_s: float) -> int:
        """Count requests before their first token that routers sent there, but for lost ones."""
        state = self._states.get(candidate)
        return state.ledger.num_timely(now_s) if state is not None else 0

    def queue_at_pace_ms(self, candidate: CandidateId) -> float:
        """Return how long what waits there takes at the pace of the last ones; 0.0: not known."""
        state = self._states.get(candidate)
        return state.ledger.queue_at_pace_ms() if state is not None else 0.0

    def has_idle_time(self, candidate: CandidateId, price_ms: float, now_s: float) -> bool:
        """Return whether a candidate was idle for so long; False: it is not known."""
        state = self._states.get(candidate)
        return state is not None and state.ledger.idle.saved_ms(now_s) >= price_ms

    def spend_idle_time(self, candidate: CandidateId, price_ms: float, now_s: float) -> None:
        """Let a prompt go for so much idle time."""
        state = self._states.get(candidate)
        if state is not None:
            state.ledger.idle.spend(price_ms, now_s)

    def capacity_tokens(self, candidate: CandidateId) -> int | None:
        """Return how many tokens a candidate's cache holds; None: not known.

        Of several KV groups: how many the conversations that live there may have.
        """
        state = self._states.get(candidate)
        if state is None:
            return None
        layout, num_blocks = self.layout_of(candidate), state.candidate.replica.num_blocks
        if layout is None or num_blocks is None:
            return state.candidate.capacity_tokens
        return capacity_tokens(layout, num_blocks, self.working_sets.at(candidate).num_sessions)

    def overdue_s(self, lease: Lease, *, ratio: float, floor_s: float) -> float | None:
        """Return after how long a first token is overdue; None: too little is known.

        A multiple of what was predicted and of how far predictions are off, at least `floor_s`.
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

    # Other routers' requests

    def first_token_elsewhere(self, lease: Lease, now_s: float, ttft_ms: float | None) -> None:
        """Note the first token of another router's request, which took that router `ttft_ms`.

        The cost model learns from it: the time is the engine's, and the features are what this
        ledger showed, as they will be when it predicts. They differ from the sender's by what
        happened while the note was under way, some milliseconds of work of one queue, and by the
        order of requests sent at once; the fit takes that for noise. So a router with little
        traffic, or a new one, knows the engines as well as the others.
        """
        state = self._states.get(lease.candidate)
        if state is not None:
            state.first_token(lease, now_s, ttft_ms)
            self.on_change()

    def tbt_ms(self, candidate: CandidateId, num_tokens: int, now_s: float) -> float | None:
        """Predict the time between tokens of an answer when its prompt has been computed.

        None: the candidate has nothing in flight, or too little is known of it.
        """
        state = self._states.get(candidate)
        return state.tbt_ms(num_tokens, now_s) if state is not None else None

    # Probes and readings

    def probe_ok(self, name: str, now_s: float) -> None:
        """Note that a replica answered a health probe; ignored if it is gone."""
        if (health := self._health.get(name)) is not None:
            health.probe_ok(now_s)
            self._watch(name)
            self.on_change()

    def probe_failed(
        self, name: str, failure: ProbeFailure, now_s: float, *, jitter: float = 0.5
    ) -> None:
        """Note that a replica failed a health probe; ignored if it is gone."""
        if (health := self._health.get(name)) is not None:
            was_down = health.is_down
            health.probe_failed(failure, now_s, jitter)
            self._watch(name)
            self._tell_down(name, was_down, now_s)
            self.on_change()

    def probe_excused(self, name: str) -> None:
        """Note that a probe got no answer from a replica that shows life otherwise."""
        if (health := self._health.get(name)) is not None:
            health.probe_excused()

    def note_engine_load(self, candidate: CandidateId, load: EngineLoad) -> None:
        """Take over a reading of the engine's own `/metrics`; ignored if the candidate is gone."""
        state = self._states.get(candidate)
        if state is not None:
            state.note_engine_load(load)
            self.on_change()

    def status(self, now_s: float) -> tuple[CandidateStatus, ...]:
        """Describe all candidates for people, eligible or not, in the order configured."""
        return tuple(
            state.status(now_s) for name in self._replicas for state in self._states_of(name)
        )

    # Private

    def _forget_lists(self) -> None:
        """Have lists of candidates made anew: the replicas are others."""
        self._by_model.clear()
        self._lengths.clear()
        self._mixed.clear()
        self._prefilling.clear()
        self.is_split = any(replica.role != "both" for replica in self._replicas.values())

    def _tell_down(self, name: str, was_down: bool, now_s: float) -> None:
        replica = self._replicas.get(name)
        if was_down or replica is None or replica.draining:
            return
        if self._health[name].is_down:
            self.on_down(name, now_s)

    def _forget(self, candidate: CandidateId) -> None:
        del self._states[candidate]
        self.working_sets.remove(candidate)

    def _position(self, item: tuple[str, Replica]) -> int:
        return self._order.get(item[0], len(self._order))

    def _watch(self, name: str) -> None:
        """Keep apart the replicas that `candidates` must look at one by one: mostly none."""
        if self._health[name].is_unrestricted and self._replicas[name].weight >= 1.0:
            self._restricted.discard(name)
        else:
            self._restricted.add(name)

    def _speed_of(self, replica: Replica) -> Speed:
        """Find a replica's speed; what is learned of its first class outlives the replicas."""
        key = (replica.base_model, replica.cost_class)
        classes = self._classes.setdefault(key, [])
        if not classes:
            classes.append(CostClass(replica.cost_class, CostFit(self._prior)))
        speed = self._speeds.get(replica.name)
        if speed is None or speed.classes is not classes:
            if speed is not None:
                speed.leave()
            speed = self._speeds[replica.name] = Speed(replica.name, classes)
        return speed

    def _states_of(self, name: str) -> list[CandidateState]:
        return [state for state in self._states.values() if state.candidate.replica.name == name]

    def _serving(self, model: str | None) -> tuple[Candidate, ...]:
        """List a model's candidates that may be offered; UnknownModel if no replica has it.

        While some replica's models are not known yet, or it was not found, a model may be there:
        that is not unknown.
        """
        known = self._by_model.get(model)
        if known is not None:
            return known
        replicas = [
            replica for replica in self._replicas.values() if model is None or replica.serves(model)
        ]
        if replicas and all(replica.role == "prefill" for replica in replicas):
            raise NoReplicaAvailable(
                "Every replica has role prefill, so none can answer. Set role: decode for some."
            )
        if not self.is_split and (halves := _producers(replicas)):
            raise NoReplicaAvailable(
                f"Only prompts are computed at {', '.join(halves)} (kv_producer), and no replica "
                "has a role. Set role: prefill there, and role: decode at the others."
            )
        if not replicas:
            is_known = all(replica.models for replica in self._replicas.values())
            if model is not None and is_known:
                raise self._unknown_model(model)
            return ()  # not kept: clients may ask for any name
        serving = self._by_model[model] = tuple(
            self._states[candidate.id].candidate
            for replica in replicas
            if replica.is_offered and replica.role != "prefill"
            for candidate in candidates_of(replica)
        )
        if model is not None:
            lengths = self._lengths[model] = Lengths.of(model, replicas)
            if not lengths.are_alike:
                self._mixed.add(model)
        return serving

    def _unknown_model(self, model: str) -> RouterError:
        if not self._replicas:
            return NoReplicaAvailable(self.no_replica())
        served = ", ".join(entry["id"] for entry in self.models())
        absent = self.absent()
        if absent:  # one of these may serve it, so the client may come back
            return NoReplicaAvailable(
                f"No replica that has answered serves `{model}` "
                f"(served: {served}; not answered yet: {absent})."
            )
        return UnknownModel(
            f"The model `{model}` does not exist (served: {served}).", param="model"
        )

    def _eligible(
        self, serving: Sequence[Candidate], now_s: float, exclude: Collection[str]
    ) -> tuple[Candidate, ...]:
        """Leave out candidates that were tried, and those whose health forbids it."""
        states = [self._states[c.id] for c in serving if c.replica.name not in exclude]
        offered = tuple(
            state.candidate for state in eligible(states, self._rules, now_s, self._restricted)
        )
        for name in list(self._restricted):
            self._health[name].weight(now_s)  # a slow start that is over ends here
            self._watch(name)
        return offered

    def _none_available(self, model: str | None, now_s: float) -> NoReplicaAvailable:
        """Make the error for "no replica", with the time after which to try again."""
        if not self._replicas:
            return NoReplicaAvailable(self.no_replica())
        waits_s = [
            self._states[candidate.id].health.retry_at_s - now_s
            for candidate in self._serving(model)
        ]
        retry_after_s = min(_MAX_RETRY_AFTER_S, max(1.0, min(waits_s, default=1.0)))
        what = "replica" if model is None else f"replica of `{model}`"
        states = [self._state_of(r, now_s) for r in self._replicas.values() if _has(r, model)]
        more = [f"and {len(states) - _SHOWN} more"] if len(states) > _SHOWN else []
        return NoReplicaAvailable(
            f"No {what} can take a request now ({', '.join(states[:_SHOWN] + more)}).",
            retry_after_s=retry_after_s,
        )

    def _state_of(self, replica: Replica, now_s: float) -> str:
        """Say for clients how a replica is, and why."""
        withheld = [s for s in ("draining", "asleep", "paused") if getattr(replica, s)]
        health = self._health[replica.name]
        reason = f" ({health.reason})" if health.reason and not withheld else ""
        return f"{replica.name}: {', '.join(withheld) or health.state(now_s).value}{reason}"


def _has(replica: Replica, model: str | None) -> bool:
    return model is None or replica.serves(model)


def _producers(replicas: Sequence[Replica]) -> list[str]:
    """Name the replicas that show that they compute prompts for others beside them.

    None where all do: then they are no halves. Of another version of vLLM none is believed: its
    metrics may have other names, and that is no reason to refuse requests.
    """
    others = {replica.version for replica in replicas if replica.seems != "prefill"}
    return [r.name for r in replicas if r.seems == "prefill" and r.version in others]


def _can_meet(prefill: Replica, decode: Replica) -> bool:
    """Return whether what one computes gets to the other."""
    if prefill.transfer != decode.transfer:
        return False
    return prefill.transfer != "store" or prefill.pool == decode.pool
