"""A fleet's day in discrete events: turns arrive, a router places them, engines step.

What must live here: the order of events, and what each part learns of them. What must not: how an
engine steps (engine), how a router decides (router), what is shown (table). Deterministic: events
of one moment happen in the order of `_Kind`, then in the order they were planned.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from heapq import heappop, heappush

from msgspec import Struct
from msgspec.structs import replace

from loadtest.results import Predicted, Run, RunInfo, TurnResult, percentile
from loadtest.simulator.blocks import Blocks
from loadtest.simulator.engine import Engine, Request
from loadtest.simulator.outcome import ReplicaUse, Simulated
from loadtest.simulator.pool import Pool, Reads
from loadtest.simulator.router import Ask, Choice, Placement, Router
from loadtest.simulator.setup import Setup, stretch
from loadtest.workload import Turn, TurnKey, Workload
from policies.hashing import mix
from policies.naming import params_of
from policies.policy import Policy
from router.api.sessions import session_hash
from router.contracts import KEY_MASK, BlockKey
from router.index.cache_view import Claim
from router.records.record import DecisionRecord, PrefillRecord, Try
from router.replicas.halves import DECODE
from router.replicas.ledger import Lease
from router.roles import Role
from router.scheduling.waiting import Waiting

_FIRST_REPLY_BLOCK = 1 << 63  # names of reply blocks start here, those of a workload stay below
_LOOK_EVERY_S = 0.1  # at turns that wait; nothing else may happen
_FASTEST_LINK = 1e12  # tokens/s, where a prefill takes no time


def simulate(
    workload: Workload,
    policy: Policy,
    setup: Setup,
    *,
    label: str = "",
    advance: Callable[[int], None] = lambda num: None,
) -> Simulated:
    """Send a workload through a simulated fleet, from cold caches.

    Args:
        workload: What is asked.
        policy: Places every request.
        setup: The fleet, and how fast the workload comes.
        label: Names the run; default: the policy's name.
        advance: Called with the number of turns that were done since the last call.

    Raises:
        ValueError: The setup makes no sense (unknown engine, batch above its token budget, ...).
    """
    return _Simulation(workload, policy, setup, label or policy.name, advance).run()


class _Kind(IntEnum):
    """What can happen, in the order in which it does at one and the same moment."""

    NOTE = 0  # another router's request becomes known
    TURN = 1  # a turn arrives
    READ = 2  # a read from the pool is done
    ENGINE = 3  # a leap ends, or an idle engine begins


class _Keys(dict[int, BlockKey]):
    """Keys of hash ids: mixed to 60 bits, as digests are."""

    def __missing__(self, hash_id: int) -> BlockKey:
        key = self[hash_id] = BlockKey(mix(hash_id) & KEY_MASK)
        return key


class _Elsewhere(Struct):
    """One request as another router has booked it; None: it does not know of it yet."""

    router: Router
    lease: Lease | None = None
    claim: Claim | None = None


class _Arrival(Struct):
    """One turn that wants to go."""

    turn: Turn
    ask: Ask
    num_out: int
    at_s: float
    choice: Choice | None = None  # the last one, while it waits


class _Ticket(Struct):
    """One turn on its way, or its prompt alone.

    `answer`: of a prompt that is computed for a decode replica, the turn that waits for it there.
    `prompt`: of a turn whose prompt is computed elsewhere, how that went.
    """

    turn: Turn
    arrival_s: float
    num_out: int
    placement: Placement
    router: Router
    elsewhere: list[_Elsewhere]
    answer: _Ticket | None = None
    prompt: Request | None = None


class _Simulation:
    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        setup: Setup,
        label: str,
        advance: Callable[[int], None],
    ) -> None:
        self._workload = workload
        self._policy = policy
        self._setup = setup
        self._label = label
        self._advance = advance
        self._size = workload.block_size
        self._dice = random.Random(setup.seed)
        self._keys = _Keys()
        self._num_reply_blocks = 0
        self._stretch = stretch(workload, setup)
        self._pool = None if setup.pool is None else Pool(setup.pool.capacity_blocks)
        self._reads = _reads(setup)
        self._engines = [self._engine(number) for number in range(len(setup.roles))]
        self._routers = [Router(policy, setup, self._size) for _ in range(setup.num_routers)]
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._waiting_for: dict[TurnKey, list[Turn]] = {}
        self._num_awaited: dict[TurnKey, int] = {}
        self._num_left = Counter(turn.session_id for turn in workload.turns)
        self._not_started: deque[Turn] = deque()  # first turns of sessions, once others are over
        self._num_reads_seen = 0
        self._looked_at: set[Router] = set()  # whose queues will be looked at again
        self._results: list[TurnResult] = []
        self._records: list[DecisionRecord] = []
        self._num_local_tokens = self._num_pool_tokens = self._num_mispredicted = 0
        self._num_apart = self._num_moved_tokens = 0  # of prompts computed for another replica
        self._prefill_s = 0.0
        self._span_s = 0.0

    def run(self) -> Simulated:
        """Process all events and return the outcome."""
        self._plan_turns()
        events = self._events
        while events:
            now_s, _, _, happen = heappop(events)
            happen(now_s)
        return self._outcome()

    # -- setting up --------------------------------------------------------------------------

    def _engine(self, number: int) -> Engine:
        setup = self._setup
        return Engine(
            Blocks(setup.cache_blocks(self._size) + 1, self._size, self._new_key),
            setup.times,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_num_seqs=setup.max_num_seqs,
            on_first_token=self._first_token,
            on_finish=self._finished,
            number=number,
            pool=self._pool,
            reads=self._reads,
            saves=setup.roles[number][1] != "decode",
        )

    def _new_key(self) -> BlockKey:
        self._num_reply_blocks += 1
        return BlockKey(mix(_FIRST_REPLY_BLOCK + self._num_reply_blocks) & KEY_MASK)

    def _plan_turns(self) -> None:
        closed = self._setup.loop == "closed"
        num_free = self._setup.concurrency if closed else None
        for turn in self._workload.turns:
            if closed and turn.after:
                awaited = set(turn.after)
                self._num_awaited[turn.key] = len(awaited)
                for key in turn.after:
                    if key in awaited:
                        awaited.discard(key)
                        self._waiting_for.setdefault(key, []).append(turn)
            elif num_free == 0:
                self._not_started.append(turn)
            else:
                num_free = None if num_free is None else num_free - 1
                self._plan(turn.arrival_s * self._stretch, _Kind.TURN, partial(self._arrive, turn))

    def _plan(self, at_s: float, kind: _Kind, happen: Callable[[float], None]) -> None:
        self._num_events += 1
        heappush(self._events, (at_s, kind, self._num_events, happen))

    # -- what happens ------------------------------------------------------------------------

    def _arrive(self, turn: Turn, now_s: float) -> None:
        num_tokens, num_out = max(1, turn.num_input_tokens), self._num_out(turn)
        engine_tokens = self._engines[0].blocks.num_usable_blocks * self._size
        if num_tokens + num_out > engine_tokens:
            self._refuse(turn, now_s, f"{num_tokens + num_out} tokens, the cache has room for "
                         f"{engine_tokens}")  # fmt: skip
            return
        num_full = num_tokens // self._size
        keys = [self._keys[hash_id] for hash_id in turn.hash_ids[:num_full]]
        ask = Ask(keys, num_tokens, session_hash(turn.session_id, self._setup.model))
        routers = self._routers
        router = routers[0] if len(routers) == 1 else self._dice.choice(routers)
        arrival = _Arrival(turn, ask, num_out, now_s)
        if router.queue is None:
            self._send(router, arrival, self._choose(router, ask, now_s), now_s)
        else:
            waiting = router.queue.add(
                arrival,
                ask.session_hash,
                num_tokens,
                now_s,
                is_batch=turn.is_batch,
                deadline_s=None if turn.deadline_s is None else now_s + turn.deadline_s,
            )
            if waiting.deadline_s is not None:
                choice = self._choose(router, ask, now_s)
                spare_ms = router.queue.expect(waiting, choice.prompt, now_s)
                if spare_ms is not None and spare_ms < 0.0:
                    router.queue.remove(waiting)
                    self._reject(waiting, now_s)
                    return
            self._release(router, now_s)

    def _choose(self, router: Router, ask: Ask, now_s: float) -> Choice:
        return router.choose(ask, self._num_pooled(ask), now_s)

    def _num_pooled(self, ask: Ask) -> int | None:
        """Count the leading blocks that the pool has; None: there is no pool."""
        if self._pool is None:
            return None
        return self._pool.match(ask.keys[: (ask.num_tokens - 1) // self._size])

    def _release(self, router: Router, now_s: float) -> None:
        """Send what may go; what stays is looked at again when something ends, and in a while."""
        queue = router.queue
        if queue is None or not queue:
            return

        def choose(waiting: Waiting) -> Choice:
            choice = waiting.item.choice = self._choose(router, waiting.item.ask, now_s)
            return choice.prompt

        queue.release(
            now_s,
            choose,
            lambda waiting, *_: self._send(router, waiting.item, waiting.item.choice, now_s),
            lambda waiting, *_: self._reject(waiting, now_s),
        )
        if queue and router not in self._looked_at:
            self._looked_at.add(router)
            self._plan(now_s + _LOOK_EVERY_S, _Kind.TURN, partial(self._look, router))

    def _look(self, router: Router, now_s: float) -> None:
        self._looked_at.discard(router)
        self._release(router, now_s)

    def _send(self, router: Router, arrival: _Arrival, choice: Choice, now_s: float) -> None:
        ticket = _Ticket(
            turn=arrival.turn,
            arrival_s=arrival.at_s,
            num_out=arrival.num_out,
            placement=router.place(choice, now_s),
            router=router,
            elsewhere=[],
        )
        prefill = ticket.placement.prefill
        if prefill is not None:
            prompt = replace(ticket, num_out=1, placement=prefill, elsewhere=[], answer=ticket)
            self._notify_others(prompt, now_s)
        self._notify_others(ticket, now_s)
        self._request(ticket if prefill is None else prompt, now_s)

    def _request(self, ticket: _Ticket, now_s: float) -> None:
        """Send a turn, or its prompt, to its engine."""
        placement = ticket.placement
        ask = placement.choice.ask
        engine = self._engines[placement.replica]
        request = Request(list(ask.keys), ask.num_tokens, ticket.num_out, ticket)
        if self._pool is None:
            request.keeps_blocks = ticket.answer is not None
            request.num_sent_tokens = ask.num_tokens - 1 if ticket.prompt is not None else 0
        if self._setup.to_engine_s:
            at_s = now_s + self._setup.to_engine_s
            self._plan(at_s, _Kind.ENGINE, partial(self._reach, engine, request))
        else:
            self._reach(engine, request, now_s)

    def _reach(self, engine: Engine, request: Request, now_s: float) -> None:
        engine.arrive(request, now_s)
        self._plan_engine(engine, now_s)

    def _num_out(self, turn: Turn) -> int:
        return max(1, turn.num_output_tokens) if self._setup.decodes else 1

    def _plan_engine(self, engine: Engine, now_s: float) -> None:
        """Plan what an engine does next: the end of its leap; or to begin, now."""
        at_s = now_s if engine.end_s is None else engine.end_s
        self._plan(at_s, _Kind.ENGINE, partial(self._step, engine))

    def _step(self, engine: Engine, now_s: float) -> None:
        if engine.end_s is None:
            engine.wake(now_s)
        elif engine.end_s == now_s:
            engine.complete(now_s)
        else:
            return  # the leap was cut short, or it began a moment ago
        changes = engine.blocks.take_changes()
        if changes:
            published_s = now_s if engine.end_s is None else engine.first_step_s
            for router in self._routers:
                router.streams[engine.number].send(changes, published_s + self._setup.event_lag_s)
        if engine.end_s is not None:
            self._plan_engine(engine, now_s)
        self._plan_reads()

    def _plan_reads(self) -> None:
        reads = self._reads
        if reads is None or reads.version == self._num_reads_seen:
            return
        self._num_reads_seen = reads.version
        next_s = reads.next_s()
        if next_s is not None:
            self._plan(next_s, _Kind.READ, partial(self._read, reads, reads.version))

    def _read(self, reads: Reads[Request], version: int, now_s: float) -> None:
        if version != reads.version:
            return  # another one began or ended: the rates have changed
        for read in reads.finish(now_s):
            engine = self._engines[read.replica]
            engine.read_done(read.request, now_s)
            self._plan_engine(engine, now_s)
            self._let_go(_ticket(read.request), now_s)
        self._plan_reads()

    def _let_go(self, ticket: _Ticket, now_s: float) -> None:
        """Free what a prefill replica keeps of a prompt: it was read."""
        if ticket.prompt is not None and ticket.prompt.keeps_blocks:
            engine = self._engines[_ticket(ticket.prompt).placement.replica]
            engine.release(ticket.prompt, now_s)
            self._plan_engine(engine, now_s)

    def _prefilled(self, request: Request, answer: _Ticket, now_s: float) -> None:
        """Have a turn answered whose prompt is computed by now."""
        router, num_pooled = answer.router, self._num_pooled(answer.placement.choice.ask)
        answer.prompt = request
        answer.placement = router.rebook(answer.placement, num_pooled, now_s)
        self._notify(answer, now_s, _ended)
        self._notify_others(answer, now_s)
        self._request(answer, now_s)

    def _first_token(self, request: Request, now_s: float) -> None:
        ticket = _ticket(request)
        ticket.router.first_token(ticket.placement, now_s)
        ttft_s = now_s - ticket.placement.lease.begun_s
        self._notify(ticket, now_s, partial(_answered, ttft_s))
        self._let_go(ticket, now_s)
        self._plan(now_s, _Kind.TURN, partial(self._release, ticket.router))

    def _finished(self, request: Request, now_s: float) -> None:
        ticket = _ticket(request)
        ticket.router.end(ticket.placement, now_s)
        self._notify(ticket, now_s, _ended)
        if ticket.answer is not None:
            self._prefilled(request, ticket.answer, now_s)
            return
        self._note(ticket, request, now_s)
        self._go_on(ticket.turn, now_s)
        self._plan(now_s, _Kind.TURN, partial(self._release, ticket.router))

    def _go_on(self, turn: Turn, now_s: float) -> None:
        """Plan the turns that waited for this one alone, or else for its session's end."""
        for waiting in self._waiting_for.pop(turn.key, ()):
            self._num_awaited[waiting.key] -= 1
            if not self._num_awaited[waiting.key]:
                self._plan(now_s + waiting.wait_s, _Kind.TURN, partial(self._arrive, waiting))
        self._num_left[turn.session_id] -= 1
        if not self._num_left[turn.session_id] and self._not_started:
            following = self._not_started.popleft()
            self._plan(now_s, _Kind.TURN, partial(self._arrive, following))

    # -- other routers -----------------------------------------------------------------------

    def _notify_others(self, ticket: _Ticket, now_s: float) -> None:
        if len(self._routers) == 1 or math.isinf(self._setup.note_lag_s):
            return
        note = ticket.router.note_of(ticket.placement)
        ticket.elsewhere = [
            _Elsewhere(router) for router in self._routers if router is not ticket.router
        ]

        def began(other: _Elsewhere, received_s: float) -> None:
            other.lease, other.claim = other.router.began_elsewhere(note, received_s)

        self._notify(ticket, now_s, began)

    def _notify(
        self, ticket: _Ticket, now_s: float, learn: Callable[[_Elsewhere, float], None]
    ) -> None:
        for other in ticket.elsewhere:
            self._plan(now_s + self._setup.note_lag_s, _Kind.NOTE, partial(learn, other))

    # -- results -----------------------------------------------------------------------------

    def _note(self, ticket: _Ticket, request: Request, now_s: float) -> None:
        turn, prompt, prefill = ticket.turn, request, None
        if ticket.prompt is not None:
            prompt = ticket.prompt
            prefill = _ticket(prompt).placement
            assert prompt.first_token_s is not None
            self._prefill_s += prompt.first_token_s - prefill.lease.begun_s
            self._num_apart += 1
            self._num_moved_tokens += request.num_pooled_tokens
        placement = prefill or ticket.placement
        num_local = prompt.num_cached_tokens - prompt.num_pooled_tokens
        self._num_local_tokens += num_local
        self._num_pool_tokens += prompt.num_pooled_tokens
        num_predicted = placement.num_gpu_tokens + placement.num_pool_tokens
        self._num_mispredicted += num_predicted != prompt.num_cached_tokens
        tbt = self._engines[ticket.placement.replica].between_tokens(request)
        assert request.first_token_s is not None
        result = TurnResult(
            session_id=turn.session_id,
            number=turn.number,
            start_s=ticket.arrival_s,
            due_s=ticket.arrival_s if self._setup.loop == "open" else None,
            total_s=now_s - ticket.arrival_s,
            ttft_s=request.first_token_s - ticket.arrival_s,
            status=200,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=prompt.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            replica=ticket.placement.lease.candidate,
            prefill=prefill.lease.candidate if prefill is not None else None,
            predicted=Predicted(gpu=num_local, pool=prompt.num_pooled_tokens),
            policy=self._policy.name,
            tbt_mean_s=tbt[0] if tbt else None,
            tbt_tail_s=tbt[1] if tbt else None,
        )
        if self._setup.keeps_records:
            self._records.append(self._record(ticket, result, len(self._records)))
        self._add(result, now_s)

    def _reject(self, waiting: Waiting, now_s: float) -> None:
        """Answer as a router does to what would miss its deadline; its session goes on."""
        arrival: _Arrival = waiting.item
        self._fail(arrival.turn, arrival.at_s, now_s, 429, "too late")

    def _refuse(self, turn: Turn, now_s: float, why: str) -> None:
        """Answer as an engine does to what it can never hold."""
        self._fail(turn, now_s, now_s, 400, why)

    def _fail(self, turn: Turn, at_s: float, now_s: float, status: int, why: str) -> None:
        self._add(
            TurnResult(
                session_id=turn.session_id,
                number=turn.number,
                start_s=at_s,
                total_s=now_s - at_s,
                status=status,
                error=f"http_{status}",
                error_message=why,
            ),
            now_s,
        )
        self._go_on(turn, now_s)

    def _add(self, result: TurnResult, now_s: float) -> None:
        self._results.append(result)
        self._span_s = max(self._span_s, now_s)
        self._advance(1)

    def _record(self, ticket: _Ticket, result: TurnResult, number: int) -> DecisionRecord:
        placement, prompt = ticket.placement, ticket.prompt
        policy = self._policy if placement.choice.plan is None else DECODE
        return DecisionRecord(
            request_id=f"simulated-{number}",
            at=ticket.arrival_s,
            api="chat",
            model=self._setup.model,
            policy=policy.name,
            policy_params={name: getattr(policy, name) for name in policy.__struct_fields__},
            state="exact",
            snapshot=placement.choice.snapshot,
            decision=placement.choice.decision,
            prefill=_prefill_record(self._policy, placement, prompt),
            tries=(Try(candidate=placement.lease.candidate),),
            outcome="ok",
            status=200,
            num_prompt_tokens=result.num_prompt_tokens or 0,
            num_predicted_cached_tokens=placement.num_gpu_tokens + placement.num_pool_tokens,
            num_reported_cached_tokens=None if prompt is not None else result.num_cached_tokens,
            num_completion_tokens=result.num_output_tokens,
            router_ms=0.0,
            predicted_ttft_ms=placement.lease.predicted_ms,
            ttft_ms=1e3 * (result.ttft_s or 0.0),
            total_ms=1e3 * result.total_s,
        )

    def _uses(self, span_s: float) -> tuple[ReplicaUse, ...]:
        num_tokens: Counter[str | None] = Counter()
        for result in self._results:
            num_tokens[result.replica] += result.num_output_tokens or 0
        roles = zip(self._setup.roles, self._engines, strict=True)
        return tuple(
            [_use_of(name, role, each, num_tokens[name], span_s) for (name, role), each in roles]
        )

    def _outcome(self) -> Simulated:
        setup, results = self._setup, self._results
        tails = sorted([r.tbt_tail_s for r in results if r.tbt_tail_s is not None])
        means = [r.tbt_mean_s for r in results if r.tbt_mean_s is not None]
        first_s = min((result.start_s for result in results), default=0.0)
        span_s = self._span_s - first_s
        return Simulated(
            run=Run(
                info=RunInfo(
                    label=self._label,
                    target="simulated",
                    workload=self._workload.name,
                    loop=setup.loop,
                    seed=setup.seed,
                ),
                turns=tuple(results),
            ),
            setup=setup,
            stretch=self._stretch,
            span_s=span_s,
            replicas=self._uses(span_s),
            num_prompt_tokens=sum([result.num_prompt_tokens or 0 for result in results]),
            num_local_tokens=self._num_local_tokens,
            num_pool_tokens=self._num_pool_tokens,
            num_good=sum([_is_good(result, setup) for result in results]),
            num_mispredicted=self._num_mispredicted,
            num_pool_stored=self._pool.num_stored if self._pool else 0,
            num_pool_evicted=self._pool.num_evicted if self._pool else 0,
            num_apart=self._num_apart,
            num_moved_tokens=self._num_moved_tokens,
            prefill_mean_s=self._prefill_s / self._num_apart if self._num_apart else 0.0,
            tbt_mean_s=sum(means) / len(means) if means else 0.0,
            tbt_tail_p90_s=percentile(tails, 0.9),
            records=tuple(self._records),
        )


def _use_of(
    name: str, role: Role, engine: Engine, num_output_tokens: int, span_s: float
) -> ReplicaUse:
    stats = engine.stats
    return ReplicaUse(
        name=name,
        role=role,
        num_requests=stats.num_finished,
        num_computed_tokens=stats.num_computed_tokens,
        num_output_tokens=num_output_tokens,
        num_evicted_blocks=engine.blocks.num_evicted,
        num_preemptions=stats.num_preemptions,
        num_steps=stats.num_steps,
        busy_ratio=stats.busy_s / span_s if span_s else 0.0,
        prefill_ratio=stats.prefill_s / span_s if span_s else 0.0,
    )


def _prefill_record(
    policy: Policy, placement: Placement, prompt: Request | None
) -> PrefillRecord | None:
    plan, prefill = placement.choice.plan, placement.prefill
    if plan is None:
        return None
    record = PrefillRecord(
        result="local",
        why=plan.why,
        here_ms=plan.here_ms,
        there_ms=plan.there_ms,
        transfer=placement.choice.candidate.replica.transfer,
    )
    if prefill is None or prompt is None or prompt.first_token_s is None:
        return record
    [cost] = [each for each in prefill.choice.costs() if each.id == prefill.lease.candidate]
    return replace(
        record,
        result="remote",
        candidate=prefill.lease.candidate,
        cost=cost,
        predicted_ms=prefill.lease.predicted_ms,
        ms=1e3 * (prompt.first_token_s - prefill.lease.begun_s),
        num_predicted_cached_tokens=prefill.num_gpu_tokens + prefill.num_pool_tokens,
        num_reported_cached_tokens=prompt.num_cached_tokens,
        policy=policy.name,
        policy_params=params_of(policy),
        snapshot=prefill.choice.snapshot,
        decision=prefill.choice.decision,
    )


def _reads(setup: Setup) -> Reads[Request] | None:
    """Make what is read over: the pool's links, or those between replicas; None: neither."""
    pool, halves = setup.pool, setup.halves
    if pool is not None:
        speed, num_links = pool.speed, pool.num_links or max(1.0, len(setup.roles) / 2)
    elif halves is not None:
        speed, num_links = halves.speed, float(min(halves.num_prefill, halves.num_decode))
    else:
        return None
    ms_per_token = setup.times.ms_per_prefill_token
    link = min(_FASTEST_LINK, 1e3 * speed / ms_per_token if ms_per_token else _FASTEST_LINK)
    return Reads(link, num_links)


def _ticket(request: Request) -> _Ticket:
    assert isinstance(request.owner, _Ticket)
    return request.owner


def _answered(ttft_s: float, other: _Elsewhere, now_s: float) -> None:
    if other.lease is not None:
        other.router.answered_elsewhere(other.lease, ttft_s, now_s)


def _ended(other: _Elsewhere, now_s: float) -> None:
    if other.lease is not None:
        other.router.ended_elsewhere(other.lease, other.claim, now_s)


def _is_good(result: TurnResult, setup: Setup) -> bool:
    if result.ttft_s is None or result.ttft_s > setup.slo_ttft_s:
        return False
    return result.tbt_tail_s is None or result.tbt_tail_s <= setup.slo_tbt_s
