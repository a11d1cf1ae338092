"""The replicas by name: who is there, the health of each, and its work in flight.

    members   what stays with a replica's name until it is another server
    load      leases, from `admit` to `end`, and what is learned from them: speed, health

What must not live here: who is offered a request (router.replicas.fleet), which candidate to take
(policies), what is cached (router.index), any I/O or clock. Every state change is one synchronous
call; `now_s` comes from the caller's monotonic clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from policies.view import NOTHING_HELD, CandidateId, CostModel, Holding, ReplicaView
from router.base.engines import in_order
from router.base.messages import Evacuation
from router.index.behind import Behind
from router.index.hit_length import KvLayout, capacity_tokens
from router.records.record import Outcome
from router.replicas.candidate_state import CandidateState, CandidateStatus, EngineLoad
from router.replicas.cost_fit import CostFit, Speed
from router.replicas.deaths import Deaths
from router.replicas.health import Health, HealthRules, HealthState, ProbeFailure, Signs
from router.replicas.ledger import Booking, Lease
from router.replicas.replica import Candidate, Lengths, Replica, ServedModel, candidates_of
from router.scheduling.conversations import Conversations
from router.scheduling.waiting import NOTHING, InFront

_MOST_STARTS: Final = 16
_SEVERAL_S: Final = 600.0


class Member:
    """A replica, and all that stays with its name until it is another server."""

    __slots__ = ("health", "replica", "several_s", "signs", "speed", "starts", "states")

    def __init__(self, replica: Replica, health: Health, speed: Speed) -> None:
        self.replica = replica
        self.health = health
        self.signs = Signs()
        self.speed = speed
        self.states: dict[CandidateId, CandidateState] = {}
        self.starts: deque[float] = deque(maxlen=_MOST_STARTS)  # of its processes, latest last
        self.several_s = -math.inf  # when an earlier process was back


class Serving(Struct, frozen=True):
    """The candidates that may be offered for a model."""

    candidates: tuple[Candidate, ...]
    lengths: Lengths | None  # None: of any model


class Members:
    """Replicas by name; see the module's charter.

    Args:
        order: Names; the replicas of these come first, in this order.
        conversations: Those at a candidate end when it is removed.
        deaths: Informed of replicas that are dead or hang, unless they were draining. None: nothing
            is recorded.
    """

    __slots__ = ("_conversations", "_deaths", "_fits", "_order", "_prior", "by_name", "can_answer",
                 "evacuations", "is_split", "lacking", "once_changed", "replicas", "restricted",
                 "rules", "served", "serving", "states")  # fmt: skip

    def __init__(
        self,
        *,
        rules: HealthRules,
        prior: CostModel,
        order: Sequence[str],
        conversations: Conversations,
        deaths: Deaths | None,
    ) -> None:
        self.rules = rules
        self._prior = prior
        self._fits: dict[tuple[str, str], CostFit] = {}  # by model and label
        self._order = {name: position for position, name in enumerate(order)}
        self._conversations = conversations
        self._deaths = deaths
        self.by_name: dict[str, Member] = {}
        self.states: dict[CandidateId, CandidateState] = {}
        self.replicas: tuple[Replica, ...] = ()
        """All replicas: those of `order` in that order, then others as they were added."""
        self.served: dict[str, ServedModel] = {}
        """The models and adapters that they serve, by name."""
        self.serving: dict[str | None, Serving] = {}
        """What `Offers` has derived from them, by model."""
        self.is_split = False  # whether some replica has a role: prefill or decode
        self.can_answer = False  # whether some replica answers: one of role prefill does not
        self.restricted: set[str] = set()  # replicas whose health or weight restricts them
        self.evacuations: dict[str, Evacuation] = {}
        """Replicas that drain, and whose live conversations may stay there."""
        self.lacking: dict[str, set[str]] = {}
        """Routes of engines that some replicas lack, with the names of these."""
        self.once_changed: set[Callable[[], None]] = set()
        """Called once, when a candidate may have room that it did not have before."""

    def replica(self, name: str) -> Replica:
        """Find a replica; KeyError if there is none of that name."""
        return self.by_name[name].replica

    def add(self, replica: Replica) -> None:
        """Add a replica, or replace the description of the one of that name.

        Load, health, draining, sleep and pause stay with the name, unless the address is another.
        Then it is another server, and leases of the old one end without effect.
        """
        member = self.by_name.get(replica.name)
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
            self.by_name[replica.name] = Member(
                replica, Health(self.rules), Speed(self._fit(replica))
            )
            if self._order:
                self.by_name = dict(sorted(self.by_name.items(), key=self._position))
        self._forget_lacking(replica.name)  # it may be another release now
        self._describe(replica)

    def note_start(self, name: str, started_s: float | None, now_s: float) -> bool:
        """Record when a replica's process started; return whether an earlier one is back.

        Then several engines share its address: a process that has ended does not come back.
        """
        member = self.by_name[name]
        starts = member.starts
        if started_s is None or (starts and starts[-1] == started_s):
            return False
        is_back = started_s in starts
        if is_back:
            starts.remove(started_s)
            member.several_s = now_s
        starts.append(started_s)
        return is_back

    def has_several(self, name: str, now_s: float) -> bool:
        """Return whether several engines shared a replica's address recently."""
        return now_s < self.by_name[name].several_s + _SEVERAL_S

    def remove(self, name: str) -> bool:
        """Remove a replica; its open leases end without effect. False if it was unknown."""
        member = self.by_name.pop(name, None)
        if member is None:
            return False
        self._forget_lacking(name)
        self.restricted.discard(name)
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
        names = self.lacking.setdefault(route, set()) if name in self.by_name else {name}
        if name in names:
            return False
        names.add(name)
        return True

    def version(self) -> str | None:
        """Return the oldest release among the replicas; None: none says its own."""
        versions = [each.version for each in self.replicas if each.version is not None]
        return min(versions, key=in_order, default=None)

    def states_of(self, name: str) -> Collection[CandidateState]:
        """Return the candidates of a replica; one that is gone has none."""
        member = self.by_name.get(name)
        return member.states.values() if member is not None else ()

    def changed(self) -> None:
        """Call who waits for room."""
        waiting = [*self.once_changed]
        self.once_changed.clear()
        for call in waiting:
            call()

    # -- health ------------------------------------------------------------------------------

    def is_up(self, name: str, now_s: float) -> bool:
        """Return whether a replica's health lets requests be sent to it."""
        member = self.by_name.get(name)
        return member is not None and member.health.can_accept(now_s)

    def listens(self, name: str, now_s: float) -> bool:
        """Return whether a server may answer at a replica, in whatever health."""
        member = self.by_name.get(name)
        return member is not None and member.health.state(now_s) is not HealthState.DOWN

    def is_down(self, name: str) -> bool:
        """Return whether a replica is dead, hangs, or is gone."""
        member = self.by_name.get(name)
        return member is None or member.health.is_down

    def signs(self, name: str) -> Signs:
        """Return the signs of a replica's work; a replica that is gone has none."""
        member = self.by_name.get(name)
        return member.signs if member is not None else Signs()

    def probe_ok(self, name: str, now_s: float) -> None:
        """Record that a replica answered a health probe; ignored if it is gone."""
        if (member := self.by_name.get(name)) is not None:
            member.health.probe_ok(now_s)
            self.health_changed(name, True, now_s)

    def probe_failed(
        self, name: str, failure: ProbeFailure, now_s: float, *, jitter: float = 0.5
    ) -> None:
        """Record that a replica failed a health probe; ignored if it is gone."""
        if (member := self.by_name.get(name)) is not None:
            was_down = member.health.is_down
            member.health.probe_failed(failure, now_s, jitter)
            self.health_changed(name, was_down, now_s)

    def probe_excused(self, name: str) -> None:
        """Record that a probe got no answer from a replica that is active otherwise."""
        if (member := self.by_name.get(name)) is not None:
            member.health.probe_excused()

    def note_signs(self, name: str, is_stalled: bool, now_s: float) -> bool:
        """Record whether signs show that a replica has stalled; return whether that is new."""
        member = self.by_name.get(name)
        if member is None or not (is_stalled or member.health.is_stalled):
            return False
        was_stalled = member.health.is_stalled
        if is_stalled:
            member.health.stalled(member.signs.quiet_s(now_s), now_s)
        else:
            member.health.moves(now_s)
        self.health_changed(name, True, now_s)
        return was_stalled != member.health.is_stalled

    def health_changed(self, name: str, was_down: bool, now_s: float) -> None:
        """Draw what follows from a replica's health, which may have changed."""
        member = self.by_name[name]
        self.restrict(name)
        if member.health.is_down and not member.replica.is_awake:
            self.set_sleep(name, asleep=False, paused=False)  # it will say so when it is back
        is_new = member.health.is_down and not was_down and not member.replica.draining
        if is_new and self._deaths is not None:
            self._deaths.went_down(name, now_s)
        self.changed()

    def restrict(self, name: str) -> None:
        """Update the set of replicas that `Offers.candidates` must examine: mostly none."""
        member = self.by_name[name]
        if member.health.is_unrestricted and member.replica.weight >= 1.0:
            self.restricted.discard(name)
        else:
            self.restricted.add(name)

    # -- private -----------------------------------------------------------------------------

    def _describe(self, replica: Replica) -> None:
        """Replace the description of a known replica, and its candidates."""
        member = self.by_name[replica.name]
        member.replica = replica
        if member.speed.fit is not self._fit(replica):
            member.speed = Speed(self._fit(replica))
        candidates = {candidate.id: candidate for candidate in candidates_of(replica)}
        for gone in member.states.keys() - candidates.keys():
            del member.states[gone]
            self._remove(gone)
        for id_, candidate in candidates.items():
            state = member.states.get(id_)
            if state is None:
                state = CandidateState(candidate, member.health, member.speed)
                self.states[id_] = member.states[id_] = state
            state.candidate, state.speed = candidate, member.speed
        self.restrict(replica.name)
        self._membership_changed()

    def _fit(self, replica: Replica) -> CostFit:
        """Return what a replica's label learned; it outlives the replica."""
        label = replica.base_model, replica.cost_class
        if label not in self._fits:
            self._fits[label] = CostFit(self._prior)
        return self._fits[label]

    def _membership_changed(self) -> None:
        self.replicas = tuple(member.replica for member in self.by_name.values())
        self.is_split = any(replica.role != "both" for replica in self.replicas)
        self.can_answer = any(replica.role != "prefill" for replica in self.replicas)
        self.serving.clear()
        self.served = {}
        for replica in self.replicas:
            for model in replica.models:
                self.served.setdefault(model.id, model)
        self.changed()

    def _forget_lacking(self, name: str) -> None:
        for names in self.lacking.values():
            names.discard(name)

    def _remove(self, candidate: CandidateId) -> None:
        del self.states[candidate]
        self._conversations.remove(candidate)

    def _position(self, item: tuple[str, Member]) -> int:
        return self._order.get(item[0], len(self._order))


_USUAL_TOKENS = 10_000  # of a conversation, until there are any

_NUM_KNOWN = 32  # observations before predictions can be held against an engine


class Load:
    """Books requests at candidates.

    `end` is called in every case; calling it again does nothing.

    Args:
        members: The replicas.
        conversations: Those that requests belong to.
        layout_of: Returns a candidate's KV groups; None: it has one, or they are not known.
        behind: Returns the blocks behind a candidate's cache.
    """

    __slots__ = ("_behind", "_conversations", "_layout_of", "_members", "_num_leases", "_states")

    def __init__(
        self,
        members: Members,
        conversations: Conversations,
        layout_of: Callable[[CandidateId], KvLayout | None],
        behind: Callable[[CandidateId], Behind],
    ) -> None:
        self._members = members
        self._states = members.states
        self._conversations = conversations
        self._layout_of = layout_of
        self._behind = behind
        self._num_leases = 0

    # -- the life of a request ---------------------------------------------------------------

    def views(
        self,
        candidates: Sequence[Candidate],
        held: Mapping[CandidateId, Holding],
        now_s: float,
        in_front_ms: InFront = NOTHING,
    ) -> tuple[ReplicaView, ...]:
        """Describe each candidate to the policy; shape (num_candidates,), same order.

        Args:
            candidates: As `Offers.candidates` returned them, with no state change in between.
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
            num_tokens, model = booking.num_tokens, state.speed.model
            self._conversations.begin(
                booking.session_hash,
                candidate,
                num_tokens,
                booking.num_cached_tokens,
                now_s,
                cost_s=1e-3 * (model.prefill_ms(num_tokens, 0) - model.base_ms),
                is_batch=booking.is_batch,
                is_visit=booking.is_visit,
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
            if self._members.once_changed:
                self._members.changed()

    def end(
        self,
        lease: Lease,
        now_s: float,
        outcome: Outcome | None,
        *,
        jitter: float = 0.5,
        is_answered: bool = True,
    ) -> bool:
        """End a lease, and record its outcome; None: it was another router's, and `is_answered`.

        `jitter` is uniform in [0, 1), drawn by the caller: it spreads retries of a failed
        replica. Idempotent: False, and no effect, if the lease was given back before or its
        replica is gone.
        """
        state, members = self._states.get(lease.candidate), self._members
        if state is None:
            return False
        name = state.candidate.replica.name
        if outcome is Outcome.OK and name not in members.restricted:
            is_new = state.end(lease, now_s, outcome, jitter)  # its health stays what it is
            if members.once_changed:
                members.changed()
        else:
            was_down = state.health.is_down
            is_new = state.end(lease, now_s, outcome, jitter)
            if is_new:
                members.health_changed(name, was_down, now_s)
        if not is_new:
            return False
        booking = lease.booking
        if booking.session_hash is not None:
            is_answered = outcome is Outcome.OK or (outcome is None and is_answered)
            self._conversations.end(
                booking.session_hash, booking.num_tokens, now_s, is_answered=is_answered
            )
        return True

    def absolve(self, lease: Lease) -> None:
        """Undo what the failure of an ended lease did to its replica's health."""
        state = self._states.get(lease.candidate)
        if state is not None:
            state.health.absolve(lease.number)
            self._members.restrict(state.candidate.replica.name)

    # -- what engines say --------------------------------------------------------------------

    def note_engine_load(self, candidate: CandidateId, load: EngineLoad) -> None:
        """Record a reading of the engine's own `/metrics`; ignored if the candidate is gone."""
        state = self._states.get(candidate)
        if state is not None:
            state.note_engine_load(load)
            self._members.changed()

    def set_early(self, candidate: CandidateId, num_requests: int) -> None:
        """Set how many requests an engine has that yield to all others; they are no load."""
        state = self._states.get(candidate)
        if state is not None:
            state.num_early = num_requests

    # -- questions ---------------------------------------------------------------------------

    def status(self, now_s: float) -> tuple[CandidateStatus, ...]:
        """Describe all candidates for people, eligible or not, in the order configured."""
        members = self._members.by_name.values()
        return tuple(state.status(now_s) for each in members for state in each.states.values())

    def is_idle(self, name: str) -> bool:
        """Return whether this router has nothing in flight at a replica."""
        return all(state.is_idle for state in self._members.states_of(name))

    def num_sent(self, name: str) -> int:
        """Count the requests that routers have in flight at a replica."""
        return sum(state.ledger.num_requests for state in self._members.states_of(name))

    def num_ready(self, candidate: CandidateId, now_s: float) -> int:
        """Count requests before their first token that routers sent there, without lost ones."""
        state = self._states.get(candidate)
        return state.ledger.num_timely(now_s) if state is not None else 0

    def queue_at_pace_ms(self, candidate: CandidateId) -> float:
        """Return how long the queue there takes at the recent pace; 0.0: not known."""
        state = self._states.get(candidate)
        return state.ledger.queue_at_pace_ms() if state is not None else 0.0

    def capacity_tokens(self, candidate: CandidateId) -> int | None:
        """Return how many tokens a candidate's cache holds; None: not known.

        With several KV groups: how many tokens its live conversations may have.
        """
        state = self._states.get(candidate)
        if state is None:
            return None
        num_blocks = state.candidate.replica.num_blocks
        if num_blocks is None or self._layout_of(candidate) is None:
            return state.candidate.capacity_tokens
        return self._tokens_in(state.candidate, num_blocks)

    def room_tokens(self, candidate: CandidateId) -> int | None:
        """Return how many tokens of conversations can be kept there; None: any.

        In the cache, or in the CPU tier or pool behind it: what the cache evicts is read again from
        there. Until a tier or pool evicts, it has all that was computed. In a pool, conversations
        of other candidates take their part. It does not count if computing is faster.
        """
        capacity, behind = self.capacity_tokens(candidate), self._behind(candidate)
        if capacity is None or not behind.num_blocks:
            return capacity
        state, at = self._states[candidate], self._conversations.at
        if behind.sharers and not self._is_worth_reading(state, behind):
            return capacity
        if not behind.is_full:
            return None
        others = sum([at(other).num_tokens for other in behind.sharers if other != candidate])
        held = self._tokens_in(state.candidate, behind.num_blocks) or 0
        return max(capacity, held - others)

    def _is_worth_reading(self, state: CandidateState, behind: Behind) -> bool:
        """Return whether a pool gives a usual conversation sooner than it is computed again."""
        room, model = self._conversations.at(state.candidate.id), state.speed.model
        num_tokens = room.num_tokens // max(1, room.num_sessions) or _USUAL_TOKENS
        compute_ms = model.prefill_ms(num_tokens, 0) - model.base_ms
        return behind.ms_per_token(model) * num_tokens <= compute_ms

    def reads_back(self, candidate: CandidateId) -> bool:
        """Return whether a candidate reads what its cache evicts from a CPU tier or a pool."""
        return self._behind(candidate).num_blocks > 0

    def _tokens_in(self, candidate: Candidate, num_blocks: int) -> int | None:
        """Return how many tokens of its live conversations so many blocks hold; None: any."""
        layout, block_size = self._layout_of(candidate.id), candidate.replica.block_size
        if layout is None:
            return num_blocks * block_size if block_size is not None else None
        return capacity_tokens(
            layout, num_blocks, self._conversations.at(candidate.id).num_sessions
        )

    def overdue_s(self, lease: Lease, *, ratio: float, floor_s: float) -> float | None:
        """Return after how long a first token is overdue; None: too little is known.

        A multiple of the predicted time and of the error of predictions, at least `floor_s`.
        """
        state = self._states.get(lease.candidate)
        if state is None or not lease.booking.streams:
            return None
        if state.speed.fit.num_observations < _NUM_KNOWN:
            return None
        model = state.speed.model
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
