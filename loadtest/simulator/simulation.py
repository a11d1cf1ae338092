"""A fleet in discrete events: turns arrive, a router places them, engines step.

What must live here: the steps of a turn, their order, and who learns of them. What must not: how an
engine steps (engine), how a router decides (router), when turns come (turns), what is counted
(tally). Deterministic: events of one moment have an order (events).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from loadtest.engine_model.pool import BlockPool
from loadtest.simulator.engine import Engine, Request
from loadtest.simulator.events import Events, Kind
from loadtest.simulator.other_routers import OtherRouters
from loadtest.simulator.outcome import Simulated
from loadtest.simulator.place import prompt_of
from loadtest.simulator.reads import Reads
from loadtest.simulator.router import Router
from loadtest.simulator.setup import MODEL, Setup, stretch
from loadtest.simulator.tally import Tally
from loadtest.simulator.ticket import Ticket, ticket_of
from loadtest.simulator.turns import Turns
from loadtest.workload import Turn, Workload
from policies.hashing import mix
from policies.policy import Policy
from router.api.sessions import session_hash
from router.base.contracts import KEY_MASK, BlockKey
from router.request.results import Plan, Prompt
from router.scheduling.waiting import InFront, Waiting, Where

TOO_SLOW = "too slow"  # why a queue refuses turns
_FIRST_REPLY_BLOCK = 1 << 63  # names of reply blocks start here; a workload's are smaller
_LOOK_EVERY_S = 0.1  # at turns that wait, even if nothing else happens
_READ_METRICS_S = 5.0  # how often a router reads an engine's metrics
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
        workload: The turns.
        policy: Places every request.
        setup: The fleet, and the pace of the workload.
        label: Names the run; default: the policy's name.
        advance: Called with the number of turns that were done since the last call.

    Raises:
        ValueError: The setup makes no sense (unknown engine, batch above its token budget, ...).
    """
    return _Simulation(workload, policy, setup, advance).run(label or policy.name)


class _Keys(dict[int, BlockKey]):
    """Keys of hash ids: mixed to 60 bits, as digests are."""

    def __missing__(self, hash_id: int) -> BlockKey:
        key = self[hash_id] = BlockKey(mix(hash_id) & KEY_MASK)
        return key


class _Arrival(Struct):
    """One turn to place."""

    turn: Turn
    prompt: Prompt
    num_out: int
    at_s: float
    plan: Plan | None = None  # the last one, while it waits


class _Simulation:
    def __init__(
        self, workload: Workload, policy: Policy, setup: Setup, advance: Callable[[int], None]
    ) -> None:
        self._setup = setup
        self._size = workload.block_size
        self._dice = random.Random(setup.seed)
        self._keys = _Keys()
        self._num_reply_blocks = 0
        self._stretch = stretch(workload, setup)
        self._pool = None if setup.pool is None else BlockPool(setup.pool.capacity_blocks)
        self._reads = _reads(setup)
        self._engines = [self._engine(number) for number in range(len(setup.roles))]
        self._routers = [
            Router(policy, setup, self._size, self._pool) for _ in range(setup.num_routers)
        ]
        self._events = Events()
        self._others = OtherRouters(self._routers, setup.note_lag_s, self._events)
        self._turns = Turns(workload, setup, self._stretch)
        self._tally = Tally(workload, policy, setup, self._engines, advance)
        self._num_reads_seen = 0
        self._looked_at: set[Router] = set()  # whose queues will be looked at again

    def run(self, label: str) -> Simulated:
        """Process all events and return the outcome."""
        for turn, at_s in self._turns.first():
            self._events.plan(at_s, Kind.TURN, partial(self._arrive, turn))
        self._plan_readings()
        self._events.run()
        return self._tally.outcome(label, self._stretch, self._pool)

    def _engine(self, number: int) -> Engine:
        return Engine(
            self._setup,
            number,
            self._size,
            self._pool,
            self._reads,
            self._first_token,
            self._finished,
        )

    def _new_key(self) -> BlockKey:
        self._num_reply_blocks += 1
        return BlockKey(mix(_FIRST_REPLY_BLOCK + self._num_reply_blocks) & KEY_MASK)

    def _plan_readings(self) -> None:
        """Schedule each router's readings of each engine's metrics, one after the other."""
        pairs = [(router, engine) for engine in self._engines for router in self._routers]
        for number, pair in enumerate(pairs, start=1):
            at_s = _READ_METRICS_S * number / len(pairs)
            self._events.plan(at_s, Kind.METRICS, partial(self._read_metrics, *pair))

    def _read_metrics(self, router: Router, engine: Engine, now_s: float) -> None:
        if not self._events.is_over:
            router.note_load(engine.number, engine.load(now_s))
            at_s = now_s + _READ_METRICS_S
            self._events.plan(at_s, Kind.METRICS, partial(self._read_metrics, router, engine))

    def _arrive(self, turn: Turn, now_s: float) -> None:
        if self._setup.stop_s is not None and now_s >= self._setup.stop_s:
            return
        num_tokens, num_out = max(1, turn.num_input_tokens), self._num_out(turn)
        num_blocks = min(engine.blocks.num_usable_blocks for engine in self._engines)
        engine_tokens = num_blocks * self._size
        if num_tokens + num_out > engine_tokens:
            self._refuse(turn, now_s, f"{num_tokens + num_out} tokens, the cache has room for "
                         f"{engine_tokens}")  # fmt: skip
            return
        num_full = num_tokens // self._size
        keys = [self._keys[hash_id] for hash_id in turn.hash_ids[:num_full]]
        session = session_hash(turn.session_id, MODEL)
        prompt = prompt_of(keys, num_tokens, session)
        routers = self._routers
        router = routers[0] if len(routers) == 1 else self._dice.choice(routers)
        arrival = _Arrival(turn, prompt, num_out, now_s)
        if router.queue is None:
            self._send(router, arrival, router.plan(prompt, now_s), now_s)
        else:
            waiting = Waiting(
                arrival,
                session,
                num_tokens,
                now_s,
            )
            router.queue.add(waiting)
            self._release(router, now_s)

    def _release(self, router: Router, now_s: float) -> None:
        """Send turns that may go; look at the others when a turn ends, and at intervals."""
        queue = router.queue
        if queue is None or not queue:
            return

        def look(waiting: Waiting, in_front_ms: InFront, where: Where) -> Plan:
            prompt = waiting.item.prompt
            plan = waiting.item.plan = router.plan(prompt, now_s, in_front_ms, where)
            waiting.answers_at = plan.candidate.id
            return plan.helper or plan

        queue.release(
            now_s,
            look,
            lambda waiting, _, why: self._send(router, waiting.item, waiting.item.plan, now_s, why),
            lambda waiting, *_: self._reject(waiting, now_s),
        )
        if queue and router not in self._looked_at:
            self._looked_at.add(router)
            self._events.plan(now_s + _LOOK_EVERY_S, Kind.TURN, partial(self._look, router))

    def _look(self, router: Router, now_s: float) -> None:
        self._looked_at.discard(router)
        self._release(router, now_s)

    def _send(
        self,
        router: Router,
        arrival: _Arrival,
        plan: Plan,
        now_s: float,
        why: str | None = None,
    ) -> bool:
        ticket = Ticket(
            turn=arrival.turn,
            placed=arrival.prompt,
            arrival_s=arrival.at_s,
            num_out=arrival.num_out,
            placement=router.commit(arrival.prompt, plan, now_s, why),
            router=router,
        )
        helper = ticket.placement.helper
        if helper is not None:
            prompt = replace(ticket, num_out=1, placement=helper, elsewhere=[], answer=ticket)
            self._others.began(prompt, now_s)
        self._others.began(ticket, now_s)
        self._request(ticket if helper is None else prompt, now_s)
        return True

    def _request(self, ticket: Ticket, now_s: float) -> None:
        """Send a turn, or its prompt, to its engine."""
        placement = ticket.placement
        num_tokens = ticket.placed.num_tokens
        engine = self._engines[ticket.router.number_of(placement)]
        num_blocks = (num_tokens + ticket.num_out) // self._size
        keys = list(ticket.router.keys_of(ticket.placed))
        keys += [self._new_key() for _ in range(num_blocks - len(keys))]
        moves_by_peers = self._setup.moves_by_peers
        is_sent = moves_by_peers and ticket.prompt is not None
        request = Request(
            keys, num_tokens, ticket.num_out, ticket, num_tokens - 1 if is_sent else 0
        )
        request.keeps_blocks = moves_by_peers and ticket.answer is not None
        engine.arrive(request, now_s)
        self._plan_engine(engine, now_s)

    def _num_out(self, turn: Turn) -> int:
        return max(1, turn.num_output_tokens) if self._setup.decodes else 1

    def _plan_engine(self, engine: Engine, now_s: float) -> None:
        """Plan the end of an engine's steps, or to begin now."""
        at_s = now_s if engine.end_s is None else engine.end_s
        self._events.plan(at_s, Kind.ENGINE, partial(self._step, engine))

    def _step(self, engine: Engine, now_s: float) -> None:
        if engine.end_s is None:
            engine.wake(now_s)
        elif engine.end_s == now_s:
            engine.complete(now_s)
        else:
            return  # the steps were cut short, or have just begun
        changes = engine.take_changes()
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
            self._events.plan(next_s, Kind.READ, partial(self._read, reads, reads.version))

    def _read(self, reads: Reads, version: int, now_s: float) -> None:
        if version != reads.version:
            return  # another one began or ended: the rates have changed
        for read in reads.finish(now_s):
            engine = self._engines[read.replica]
            engine.read_done(read.request, now_s)
            self._plan_engine(engine, now_s)
            self._release_prompt(ticket_of(read.request), now_s)
        self._plan_reads()

    def _release_prompt(self, ticket: Ticket, now_s: float) -> None:
        """Free the blocks that a prefill replica keeps of a prompt: they were read."""
        if ticket.prompt is not None and ticket.prompt.keeps_blocks:
            engine = self._engines[ticket.router.number_of(ticket_of(ticket.prompt).placement)]
            engine.release(ticket.prompt, now_s)
            self._plan_engine(engine, now_s)

    def _prefilled(self, request: Request, answer: Ticket, now_s: float) -> None:
        """Send a turn to be answered after its prompt was computed."""
        answer.prompt = request
        self._others.ended(answer, now_s)
        answer.router.rebook(answer.placed, answer.placement, now_s)
        self._others.began(answer, now_s)
        self._request(answer, now_s)

    def _first_token(self, request: Request, now_s: float) -> None:
        ticket = ticket_of(request)
        ticket.router.first_token(ticket.placement, now_s)
        ttft_s = now_s - ticket.placement.lease.begun_s
        self._others.answered(ticket, ttft_s, now_s)
        self._release_prompt(ticket, now_s)
        self._events.plan(now_s, Kind.TURN, partial(self._release, ticket.router))

    def _finished(self, request: Request, now_s: float) -> None:
        ticket = ticket_of(request)
        ticket.router.end(ticket.placement, now_s)
        self._others.ended(ticket, now_s)
        if ticket.answer is not None:
            self._prefilled(request, ticket.answer, now_s)
            return
        self._tally.answered(ticket, request, now_s)
        self._go_on(ticket.turn, now_s)
        self._events.plan(now_s, Kind.TURN, partial(self._release, ticket.router))

    def _go_on(self, turn: Turn, now_s: float) -> None:
        """Plan the turns that come after this one."""
        for following, at_s in self._turns.after(turn, now_s):
            self._events.plan(at_s, Kind.TURN, partial(self._arrive, following))

    def _reject(self, waiting: Waiting, now_s: float) -> None:
        """Refuse a turn that would miss a limit, as a router does; its session goes on."""
        arrival: _Arrival = waiting.item
        self._fail(arrival.turn, arrival.at_s, now_s, 429, TOO_SLOW)

    def _refuse(self, turn: Turn, now_s: float, why: str) -> None:
        """Refuse a turn that exceeds the cache, as an engine does."""
        self._fail(turn, now_s, now_s, 400, why)

    def _fail(self, turn: Turn, at_s: float, now_s: float, status: int, why: str) -> None:
        self._tally.failed(turn, at_s, now_s, status, why)
        self._go_on(turn, now_s)


def _reads(setup: Setup) -> Reads | None:
    """Return the links of the pool, between replicas, or to their CPU tiers; None: none."""
    pool, halves, tier = setup.pool, setup.halves, setup.tier
    if tier is not None:
        speed, num_links = tier.speed, float(len(setup.roles))
    elif pool is not None:
        speed, num_links = pool.speed, pool.num_links or max(1.0, len(setup.roles) / 2)
    elif halves is not None:
        speed, num_links = halves.speed, float(min(halves.num_prefill, halves.num_decode))
    else:
        return None
    ms_per_token = setup.times.ms_per_prefill_token
    link = min(_FASTEST_LINK, 1e3 * speed / ms_per_token if ms_per_token else _FASTEST_LINK)
    return Reads(link, num_links)
