"""Place a request: `plan` decides, `commit` puts the decision into effect, `end` takes it back.

This is the only way to place a request: the story, the queue, overdue requests and `explain`
use it.

    plan     look up who holds the prompt, freeze all that is known, ask the policy; changes nothing
    commit   count the request's load, claim the blocks it will compute, tell other routers
    end      give all of that back, once, however the request ended

All three are synchronous. Nothing changes between the look-up and the lease if `commit` directly
follows `plan`.

`Stays`: where a replica is evacuated, its live conversations stay until they end or their time is
up. A conversation that moves without its blocks is computed again, whenever that happens. So what
helps is to let it end where it is. It moves at once if a replica that stays can have nearly all of
its prompt without computing it: from its own cache, or from the pool.

In the last quarter of the time the others move, each at its own moment: if all moved at the end,
each would wait for the prompts of the others.

A policy that fails again and again is replaced, so that requests are answered. A policy is pure,
and so a fault of its code comes back with each prompt of the same kind.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from time import monotonic
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from policies.decode import DecodeLoad, local_ms, transfer_ms
from policies.policy import Policy
from policies.registry import create
from policies.view import NOTHING_HELD, Decision, RequestView, Snapshot
from router.api.routes import engine_route
from router.base.errors import NoReplicaAvailable, RouteNotServed, RouterError
from router.base.messages import Evacuation
from router.base.supervisor import blamed
from router.cluster.outbox import Outbox
from router.metrics import Metrics
from router.records.record import Outcome
from router.replicas.fleet import Fleet
from router.replicas.ledger import Booking, Lease
from router.replicas.replica import Candidate, candidates_of
from router.request.match import Matcher, with_last_turn
from router.request.observer import NO_OBSERVERS, Observers
from router.request.results import Placement, Plan, Prompt, Split, Tries
from router.scheduling.order import BATCH
from router.scheduling.waiting import ANYWHERE, NOTHING, VISITS, InFront, Where
from router.upstream import Answer

_SPREAD: Final = 0.25  # of the time
_NEARLY_ALL: Final = 0.9
_STEPS: Final = 1024


class Stays:
    """Adds the replica that is evacuated to the candidates of conversations that stay there."""

    def __init__(
        self, fleet: Fleet, matcher: Matcher, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._fleet = fleet
        self._matcher = matcher
        self._clock = clock

    def with_home(
        self, prompt: Prompt, tries: Tries, others: Sequence[Candidate], now_s: float
    ) -> Sequence[Candidate]:
        """Return the candidates of a prompt: its home is one of them if it stays there."""
        home = self._home(prompt, tries, now_s)
        if home is None or (others and self._is_elsewhere(prompt, home, others)):
            return others
        return (*others, home)

    def _home(self, prompt: Prompt, tries: Tries, now_s: float) -> Candidate | None:
        """Find where a conversation lives, if it may stay there. None: it is not evacuated."""
        session, model, fleet = prompt.read.whose.session_hash, prompt.read.model, self._fleet
        if session is None or model is None:
            return None
        fleet.conversations.expire(now_s)
        id_ = fleet.conversations.lives_at(session)
        name = "" if id_ is None else id_.partition("#")[0]
        evacuation = fleet.members.evacuations.get(name)
        if evacuation is None or self._clock() >= leaves_at(evacuation, session):
            return None
        if name in tries.replicas or not fleet.members.is_up(name, now_s):
            return None
        replica = fleet.members.replica(name)
        if not replica.is_awake or not replica.serves(model):
            return None
        return next((each for each in candidates_of(replica) if each.id == id_), None)

    def _is_elsewhere(self, prompt: Prompt, home: Candidate, others: Sequence[Candidate]) -> bool:
        """Return whether another candidate can have nearly as much of a prompt as its home."""
        if prompt.tokens is None:
            return False
        held = self._matcher.match(prompt, (*others, home)).held
        num_here = held.get(home.id, NOTHING_HELD).num_own_tokens
        found = [held.get(each.id, NOTHING_HELD).num_cached_tokens for each in others]
        num_there = max(found, default=0)
        return num_there >= _NEARLY_ALL * num_here


def leaves_at(evacuation: Evacuation, session: int) -> float:
    """Return when a conversation moves, in unix seconds."""
    spread_s = _SPREAD * (evacuation.until - evacuation.begun)
    return evacuation.until - spread_s * (session % _STEPS) / _STEPS


logger = logging.getLogger(__name__)

MOST_FAILURES: Final = 5
"""Failures in a row after which `least_loaded` decides in a policy's place."""


class _Failing(Struct):
    policy: Policy
    num: int = 0
    reason: str = ""


class Deciders:
    """Policies as they are asked, and those that are replaced.

    Args:
        plain: Decides in the place of a policy that fails.
    """

    def __init__(self, plain: Policy) -> None:
        self._failing: dict[int, _Failing] = {}  # by identity
        self._plain = plain

    @property
    def replaced(self) -> list[tuple[str, str]]:
        """Name the policies that failed too often, and why."""
        return [
            (found.policy.name, found.reason)
            for found in self._failing.values()
            if found.num >= MOST_FAILURES
        ]

    def reset(self) -> None:
        """Ask all policies again."""
        self._failing.clear()

    def decide(self, policy: Policy, snapshot: Snapshot) -> tuple[Policy, Decision, int]:
        """Ask a policy, or the one in its place; return which it was, and the replica's position.

        Raises:
            Exception: whatever the policy raises; RuntimeError: it chose what was not offered.
        """
        found = self._failing.get(id(policy)) if self._failing else None
        if found is not None and found.num >= MOST_FAILURES:
            return _asked(self._plain, snapshot)
        try:
            asked = _asked(policy, snapshot)
        except Exception as exc:
            found = self._failing.setdefault(id(policy), _Failing(policy))
            found.num += 1
            found.reason = blamed(exc)
            if found.num == MOST_FAILURES:
                fields = {"policy": policy.name, "reason": found.reason}
                logger.error("policy fails: least_loaded decides in its place", extra=fields)
            raise
        if found is not None:
            del self._failing[id(policy)]
        return asked


def _asked(policy: Policy, snapshot: Snapshot) -> tuple[Policy, Decision, int]:
    decision = policy.decide(snapshot)
    for index, replica in enumerate(snapshot.replicas):
        if replica.id == decision.candidate:
            return policy, decision, index
    raise RuntimeError(f"policy {policy.name!r} chose {decision.candidate!r}, not offered")


DECODE: Final = DecodeLoad()
"""Chooses among candidates that may have their prompts computed elsewhere."""


class Place:
    """Plans, commits and ends placements.

    Args:
        policy: Places prompts that have no policy of their own.
        seed: For the policies' draws; fixed for the process.
        outbox: Tells other routers. None: there are none.
        clock: Monotonic seconds; the simulator has its own.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        matcher: Matcher,
        policy: Policy,
        seed: int,
        outbox: Outbox | None,
        metrics: Metrics,
        observers: Observers = NO_OBSERVERS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._fleet = fleet
        self._matcher = matcher
        self._stays = Stays(fleet, matcher)
        self._caches = matcher.caches
        self.fetches = matcher.fetches
        self._policy = policy
        self._plain_policy = create("least_loaded", {})  # without a prompt nothing is cached
        self.deciders = Deciders(self._plain_policy)
        self._seed = seed
        self._outbox = outbox
        self._metrics = metrics
        self._observers = observers
        self._num_decisions: Counter[str | None] = Counter()  # by model: its policy counts alone

    def use(self, policy: Policy) -> None:
        """Place prompts by another policy, from the next decision on."""
        self._policy = policy
        self.deciders.reset()

    # ---------------------------------------------------------------- plan

    def candidates(self, prompt: Prompt, tries: Tries, now_s: float) -> Sequence[Candidate]:
        """List the candidates that a request may go to now.

        Raises:
            UnknownModel, NoReplicaAvailable: there are none.
            RouteNotServed: those that there are lack the request's route.
        """
        exclude: AbstractSet[str] = tries.replicas
        if self._fleet.members.lacking:
            exclude = exclude | self._without_route(prompt)
        if prompt.owner is not None:
            return self._fleet.offers.candidates_at(
                prompt.owner, prompt.read.model, now_s, exclude=exclude
            )
        model, num_tokens = prompt.read.model, prompt.num_needed_tokens
        try:
            found = self._fleet.offers.candidates(
                model, now_s, exclude=exclude, num_tokens=num_tokens
            )
        except NoReplicaAvailable:
            others = self._stays.with_home(prompt, tries, (), now_s)
            if prompt.read.response_id is not None:
                others = self._fleet.offers.draining(model, now_s, exclude=exclude)
            if not others:
                raise
            return others
        if tries.only is not None:
            found = tuple(each for each in found if each.replica.name in tries.only)
            if not found:
                raise NoReplicaAvailable("No other replica is idle.")
        if not self._fleet.members.evacuations:
            return found
        return self._stays.with_home(prompt, tries, found, now_s)

    def _without_route(self, prompt: Prompt) -> AbstractSet[str]:
        """Return the replicas that lack a request's route.

        Raises:
            RouteNotServed: all that could answer it do.
        """
        inbound, fleet = prompt.read.inbound, self._fleet
        route = engine_route(inbound.method, inbound.path)
        names = fleet.members.lacking.get(route) if route is not None else None
        if not names:
            return frozenset()
        is_nowhere = prompt.owner in names or fleet.offers.all_lack(prompt.read.model, route or "")
        if is_nowhere:
            raise RouteNotServed(f"No replica serves {inbound.method} {inbound.path}.")
        return names

    def idle_others(self, prompt: Prompt, tries: Tries) -> frozenset[str]:
        """Name the replicas that a request may go to next and where no request waits."""
        now_s = self._clock()
        try:
            candidates = self.candidates(prompt, tries, now_s)
        except RouterError:
            return frozenset()
        views = self._fleet.load.views(candidates, {}, now_s)
        both = zip(candidates, views, strict=True)
        return frozenset(each.replica.name for each, view in both if view.num_waiting == 0)

    def plan(
        self,
        prompt: Prompt,
        tries: Tries,
        in_front_ms: InFront = NOTHING,
        where: Where = ANYWHERE,
    ) -> Plan:
        """Decide where a request goes, among the replicas that were not tried.

        Args:
            prompt: What to place.
            tries: The request's tries so far.
            in_front_ms: Work that waits in the queue and goes to candidates before the request.
            where: Where its conversation has room.

        Raises:
            UnknownModel, NoReplicaAvailable: no replica serves the model, or none that does is up.
        """
        now_s = self._clock()
        candidates = with_room(self.candidates(prompt, tries, now_s), where)
        policy = self._policy if prompt.read.request is not None else self._plain_policy
        if prompt.variant is not None:
            policy = prompt.variant.policy
        if not self._fleet.members.is_split or prompt.read.request is None:
            return self._choose(prompt, candidates, policy, now_s, in_front_ms)
        decodes = any(candidate.replica.role == "decode" for candidate in candidates)
        by = DECODE if decodes else policy
        plan = self._choose(prompt, candidates, by, now_s, in_front_ms)
        return self.split(prompt, tries, plan, policy, in_front_ms)

    def split(
        self, prompt: Prompt, tries: Tries, plan: Plan, policy: Policy, in_front_ms: InFront
    ) -> Plan:
        """Decide whether another candidate computes a prompt first, and which: by the policy.

        A replica that decodes computes the prompt itself if that costs no more than reading it, or
        if there is no other place. Both choices are of one moment and change nothing.
        """
        reader, snapshot = plan.candidate.replica, plan.snapshot
        if reader.role != "decode":
            return plan
        here_ms, there_ms = local_ms(snapshot, plan.view), transfer_ms(snapshot, plan.view)
        why, helper = _why_here(prompt, tries, plan), None
        if why is None and here_ms <= there_ms:
            why = "cheaper"
        if why is None:
            others = self._fleet.offers.prefillers(prompt.read.model, reader, snapshot.now_s)
            others = tuple(each for each in others if each.replica.name != tries.failed_helper)
            if others:
                helper = self._choose(prompt, others, policy, snapshot.now_s, in_front_ms)
                helper, why = replace(helper, helps=True), "chosen"
        split = Split(why=why or "no_replica", here_ms=here_ms, there_ms=there_ms)
        return replace(plan, helper=helper, split=split)

    def look(self, prompt: Prompt, placement: Placement) -> Plan:
        """Plan again for the candidate of a request; the decision stays."""
        plan = placement.plan
        return self._choose(prompt, (plan.candidate,), plan.policy, self._clock())

    def has(self, placement: Placement) -> bool:
        """Return whether the candidate of a request is still there."""
        return placement.lease.candidate in self._fleet.members.states

    def has_room(self, prompt: Prompt, plan: Plan) -> bool:
        """Return whether the engine chosen has blocks for a prompt beside what it has."""
        return self._matcher.has_room(prompt, plan.candidate)

    def _choose(
        self,
        prompt: Prompt,
        candidates: Sequence[Candidate],
        policy: Policy,
        now_s: float,
        in_front_ms: InFront = NOTHING,
    ) -> Plan:
        """Freeze what is known of candidates, and have a policy choose among them."""
        read = prompt.read
        found = self._matcher.match(prompt, candidates)
        conversations, session = self._fleet.conversations, None
        if read.whose.session_hash is not None:
            session = conversations.get(read.whose.session_hash, now_s)
        held, home = found.held, None
        if session is not None and read.request is not None and not prompt.is_matchable:
            caching = [each.id for each in candidates if each.replica.caches_prefixes]
            if session.candidate in caching:
                held, home = with_last_turn(prompt, session, held)
        views = self._fleet.load.views(candidates, held, now_s, in_front_ms)
        conversations.expire(now_s)
        snapshot = Snapshot(
            now_s=now_s,
            number=self._num_decisions[prompt.read.model],
            seed=self._seed,
            request=RequestView(
                num_tokens=prompt.num_tokens,
                session_hash=read.whose.session_hash,
                parent_session_hash=read.whose.parent_session_hash,
                session_candidate=session.candidate if session is not None else None,
                first_blocks_hash=found.first_blocks_hash,
            ),
            replicas=views,
            num_sessions=conversations.num_sessions(
                [each.id for each in candidates], read.whose.session_hash
            ),
            arrivals_per_s=conversations.arrivals_per_s(now_s),
        )
        policy, decision, index = self.deciders.decide(policy, snapshot)
        is_guess = prompt.tokens is None or decision.candidate == home
        return Plan(
            candidate=candidates[index],
            view=snapshot.replicas[index],
            decision=decision,
            snapshot=snapshot,
            policy=policy,
            fetchable=found.fetchable.get(decision.candidate),
            is_guess=is_guess,
        )

    # ---------------------------------------------------------------- commit

    def commit(self, prompt: Prompt, tries: Tries, plan: Plan) -> Placement:
        """Carry out a plan: from here on the request's load and blocks count."""
        now_s = self._clock()
        helper = None
        if plan.helper is not None:
            helper = self._begin(prompt, plan.helper, _booking_of(prompt, plan.helper), now_s)
            booking = Booking(  # until its prompt is computed, it only has its place
                num_uncached_tokens=0,
                num_cached_tokens=prompt.num_tokens,
                streams=False,
                session_hash=prompt.read.whose.session_hash,
                is_batch=prompt.service_class == BATCH,
            )
        else:
            booking = _booking_of(prompt, plan)
        if tries.wait.released in VISITS:
            booking = replace(booking, is_visit=True)
        placement = self._begin(prompt, plan, booking, now_s, helper)
        tries.replicas.add(placement.replica)
        self._num_decisions[prompt.read.model] += 1
        return placement

    def rebook(
        self, prompt: Prompt, placement: Placement, plan: Plan, *, is_sent: bool = False
    ) -> None:
        """Book a request again where it is: its prompt is computed elsewhere by now.

        So its time there begins now, and its load is what is known now. `is_sent`: all of its
        prompt comes from the replica that computed it.
        """
        now_s, old = self._clock(), placement.lease
        self._fleet.load.end(old, now_s, Outcome.CLIENT_GONE)  # counts neither way
        booking = replace(_booking_of(prompt, plan), is_visit=old.booking.is_visit)
        if is_sent:
            booking = booking.sent(plan.view.num_gpu_tokens)
        placement.lease = self._fleet.load.admit(placement.lease.candidate, booking, now_s)
        if placement.claim is not None:
            self._caches.release(placement.claim, computed=False, now_s=now_s)
            placement.claim = None
        if self._outbox is not None:
            self._outbox.ended(old, computed=False)
        placement.predicted = plan.prediction
        self._claim(prompt, placement, plan)

    def _begin(
        self,
        prompt: Prompt,
        plan: Plan,
        booking: Booking,
        now_s: float,
        helper: Placement | None = None,
    ) -> Placement:
        """Book a request, or its prompt alone, at a candidate."""
        candidate = plan.candidate
        placement = Placement(
            plan=plan,
            candidate=candidate,
            replica=candidate.replica.name,
            predicted=plan.prediction,
            lease=self._fleet.load.admit(candidate.id, booking, now_s),
            claim=None,
            state=self._caches.state(candidate.id, prompt.extra),
            placed_s=now_s,
            helper=helper,
        )
        self._claim(prompt, placement, plan, waits=helper is not None)
        self._metrics.decisions.labels(plan.policy.name, placement.state).inc()
        self._observers.leased(prompt, placement)
        return placement

    def _claim(
        self, prompt: Prompt, placement: Placement, plan: Plan, *, waits: bool = False
    ) -> None:
        """Claim the blocks that a candidate will compute or read, and tell other routers.

        `waits`: another replica has to compute the prompt first, so nothing is claimed yet.
        """
        candidate, num_held_blocks = plan.candidate, 0
        contract = self._caches.contract(candidate.id)
        if not waits and prompt.tokens and contract and prompt.is_placed_at(candidate):
            keys = prompt.keys(contract)
            num_held_blocks = plan.view.num_gpu_tokens // contract.block_size
            placement.claim = self._caches.claim(
                candidate.id, keys, min(num_held_blocks, len(keys)), prompt.num_tokens
            )
        if self._outbox is not None:
            self._outbox.began(
                placement.lease,
                claim=placement.claim,
                num_held_blocks=num_held_blocks,
                session_hash=None if plan.helps else prompt.read.whose.session_hash,
                has_named_session=prompt.read.whose.is_named,
            )
        if self.fetches is not None and plan.view.num_fetched_tokens and not waits:
            self.fetches.began(candidate.id)

    # ---------------------------------------------------------------- first token, end

    def answered(self, prompt: Prompt, placement: Placement, answer: Answer) -> None:
        """Record the first token of an answer, if it has come."""
        read = prompt.read
        if answer.outcome_status != 200:
            return
        if read.request is not None and read.whose.session_hash is not None:
            candidate = placement.lease.candidate
            self._fleet.conversations.computed(
                read.whose.session_hash, candidate, prompt.num_tokens
            )
        # A batch's first token is that of one of its prompts.
        if read.streams and read.num_prompts == 1 and answer.first_s is not None:
            self.first_token(placement, answer.first_s)

    def first_token(self, placement: Placement, at_s: float) -> None:
        """Record the time of a first token."""
        self._fleet.load.first_token(placement.lease, at_s)
        if self._outbox is not None:
            self._outbox.answered(placement.lease, at_s)
        self._observers.first_token(placement, at_s)

    def end(self, placement: Placement, outcome: Outcome) -> None:
        """Release what a request holds, once: its load, and its claim on blocks."""
        if placement.is_ended:
            return
        placement.is_ended = True
        now_s, is_computed = self._clock(), outcome is Outcome.OK
        self._fleet.load.end(placement.lease, now_s, outcome, jitter=random.random())
        if self._outbox is not None:
            self._outbox.ended(placement.lease, computed=is_computed)
        if placement.claim is not None:
            self._caches.release(placement.claim, computed=is_computed, now_s=now_s)
        self._observers.released(placement, outcome)

    def abandon(self, tries: Tries, placement: Placement) -> None:
        """End a placement of which nothing is sent; the request may be placed there again."""
        tries.replicas.discard(placement.replica)
        for each in (placement, placement.helper):
            if each is not None:
                self.end(each, Outcome.CLIENT_GONE)

    def absolve(self, lease: Lease) -> None:
        """Undo what a request's failure counted against its replica."""
        self._fleet.load.absolve(lease)


def with_room(candidates: Sequence[Candidate], where: Where) -> Sequence[Candidate]:
    """Keep the candidates where a conversation has room, or can have some; if there are any."""
    if where.home is not None:
        home = tuple([each for each in candidates if each.id == where.home])
        if home:
            return home
    if where.full:
        return tuple([each for each in candidates if each.id not in where.full]) or candidates
    return candidates


def _why_here(prompt: Prompt, tries: Tries, plan: Plan) -> str | None:
    """Return why a prompt cannot be computed elsewhere; None: it can be."""
    if prompt.read.num_prompts > 1:
        return "batch"
    if prompt.owner is not None:
        return "owned"  # only the replica that issued the response before has it
    if prompt.read.outline is not None:
        return "body"  # too costly to be taken apart
    if prompt.original is not None:
        return "pool"
    helped = tries.helped
    if helped is not None and helped.result == "failed":
        return "failed" if tries.failed_helper is None else None
    if helped is not None and plan.candidate.replica.transfer == "store":
        return "done"  # a retry: the pool has it
    return None


def _booking_of(prompt: Prompt, plan: Plan) -> Booking:
    """Return what a request adds to the load of the candidate that computes it."""
    read, held, there = prompt.read, plan.view, plan.fetchable
    is_prompt = read.request is not None
    num_gpu, num_cpu, num_cached = held.num_gpu_tokens, held.num_cpu_tokens, held.num_cached_tokens
    num_uncached, is_fetched = 0, num_cached > max(num_gpu, num_cpu)
    if is_prompt:
        num_uncached = max(prompt.num_tokens - num_cached, 0) + prompt.num_more_tokens
    # The whole answer of a helper is its first token. A batch's time teaches nothing.
    has_first_token = plan.helps or (read.streams and is_prompt and read.num_prompts == 1)
    return Booking(
        num_uncached_tokens=num_uncached,
        num_cached_tokens=num_cached,
        num_fetched_tokens=num_cached - num_gpu,
        is_from_pool=is_fetched,
        num_disk_tokens=there.num_disk_tokens(num_gpu, num_cpu) if there and is_fetched else 0,
        streams=has_first_token,
        session_hash=read.whose.session_hash if is_prompt and not plan.helps else None,
        is_batch=prompt.service_class == BATCH,
        num_prompts=read.num_prompts,
    )
