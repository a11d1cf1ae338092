"""The fleet: all replicas with their load, health and speed, in one place.

    members   who is there, and the health of each
    offers    which candidates can take a request, and why there is none
    load      work in flight at each candidate, and what is learned from it: speed, health

The life of a request: `offers.candidates` -> `load.views` -> (policy) -> `load.admit` ->
`load.first_token` -> `load.end`. What must live here: leases, from `admit` to `end`, and questions
about the load. What must not: who is offered a request (router.replicas.offers), which candidate to
take (policies), what is cached (router.index), any I/O or clock. Every state change is one
synchronous call; `now_s` comes from the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from policies.view import NOTHING_HELD, CandidateId, CostModel, Holding, ReplicaView
from router.index.behind import NOTHING_BEHIND, Behind
from router.index.hit_length import KvLayout, capacity_tokens
from router.records.record import Outcome
from router.replicas.candidate_state import CandidateState, CandidateStatus, EngineLoad
from router.replicas.cost_fit import PRIOR
from router.replicas.health import HealthRules
from router.replicas.ledger import Booking, Lease
from router.replicas.members import Members
from router.replicas.offers import Offers
from router.replicas.replica import Candidate
from router.scheduling.conversations import Conversations
from router.scheduling.waiting import NOTHING, InFront

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


def _ignore(*_: object) -> None:
    """Do nothing about what is called."""


def _nothing_behind(_: CandidateId) -> Behind:
    """Return that there is nothing behind a candidate's cache."""
    return NOTHING_BEHIND


class Fleet:
    """The three parts, put together; see the module.

    Args:
        rules: When a replica's health changes.
        prior: The cost of a prompt before any was seen.
        order: Names; the replicas of these come first, in this order.
        conversations: Those that requests belong to.
        waiting: Replicas and sources that have not answered yet, and why; grows and shrinks.
        layout_of: Returns a candidate's KV groups; None: it has one, or they are not known.
        behind: Returns the blocks behind a candidate's cache.
        on_down: Called with a replica that is dead or hangs, unless it was draining, and now.
    """

    __slots__ = ("conversations", "load", "members", "offers")

    def __init__(
        self,
        *,
        rules: HealthRules | None = None,
        prior: CostModel = PRIOR,
        order: Sequence[str] = (),
        conversations: Conversations | None = None,
        waiting: Mapping[str, str] | None = None,
        layout_of: Callable[[CandidateId], KvLayout | None] = _ignore,
        behind: Callable[[CandidateId], Behind] = _nothing_behind,
        on_down: Callable[[str, float], None] = _ignore,
    ) -> None:
        self.conversations = Conversations() if conversations is None else conversations
        self.members = Members(
            rules=rules or HealthRules(),
            prior=prior,
            order=order,
            conversations=self.conversations,
            on_down=on_down,
        )
        self.offers = Offers(self.members, {} if waiting is None else waiting)
        self.load = Load(self.members, self.conversations, layout_of, behind)
