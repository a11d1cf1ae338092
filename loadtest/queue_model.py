"""What routing changes, without engines: a queue model of a fleet over a Mooncake trace.

    python -m loadtest.queue_model --trace conversation_trace.jsonl --load 1.15 --alpha 0 1 2 4

The model: n replicas; each computes one prefill at a time, first come, first served, and keeps
an LRU of C blocks; no decoding. A shared pool of unlimited size may be `speedup` times faster to
read than computing; a read occupies the replica (vLLM overlaps it, so this is pessimistic). The
arrivals are the trace's own; `load` sets the speed: offered work over what the fleet could
compute if nothing were ever cached. The policies are the router's own objects; they are given
exact caches and exact costs, so their results are upper bounds, and deterministic.

With several routers each request comes to one of them by chance, and what it makes of a replica
(its work in the queue, its blocks being computed) is seen by the others `staleness_ms` later; its
blocks at the latest with the engine's own events. Infinite: every router knows its own requests
alone, as routers do that share caches but no load.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtest.results import percentile
from loadtest.traces import TraceRequest, read_trace, sessions_of
from policies import POLICIES, CostModel, Policy, ReplicaView, RequestView, Snapshot, create
from policies.cost import KvAware
from policies.naming import label_of
from policies.view import CandidateId
from router.replicas.candidate_state import LATELY_S
from router.replicas.ledger import BUSY_S
from router.replicas.recent import RecentShare, RecentSum

BLOCK_TOKENS = 512  # Source: Mooncake FAST25-release/README.md
PAIRS_PER_TOKEN = 44.4
"""Cost of 1e6 (token, context) pairs over cost of one token: 8d / 22d**2 with d = 8192, from
FAST'25 Mooncake, Eq. 1 for LLaMA3-70B."""

EVENTS_MS = 100.0  # from a prefill's end until every router has its blocks' events


class Setup(Struct, frozen=True, kw_only=True):
    """The fleet to model."""

    num_replicas: int = 8
    num_blocks: int = 5859  # per replica; 3M tokens, as in the FAST'25 paper
    load: float = 0.9
    pool_speedup: float | None = None  # None: no pool
    num_first_blocks: int = 4  # of `first_blocks_hash`
    pairs_per_token: float = PAIRS_PER_TOKEN
    seed: int = 0
    num_routers: int = 1
    staleness_ms: float = 0.0  # until another router's request is seen; math.inf: never


class Result(Struct, frozen=True, kw_only=True):
    """What one policy made of the trace."""

    label: str
    num_requests: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    local_ratio: float  # of all prompt tokens: found in the replica's own cache
    pool_ratio: float  # of all prompt tokens: read from the pool
    busy_ratio: float  # time spent on prefills and reads over replicas x span


def cost_for(trace: Sequence[TraceRequest], setup: Setup) -> CostModel:
    """Choose the speed at which the trace offers `setup.load` without any cache."""
    unit = CostModel(base_ms=0.0, ms_per_token=1.0, ms_per_mtoken2=setup.pairs_per_token)
    work_ms = sum(unit.prefill_ms(request.input_length, 0) for request in trace)
    span_ms = max(1.0, trace[-1].timestamp - trace[0].timestamp)
    speed = setup.load * setup.num_replicas * span_ms / work_ms
    return CostModel(
        base_ms=0.0,
        ms_per_token=speed,
        ms_per_mtoken2=speed * setup.pairs_per_token,
        ms_per_fetched_token=speed / (setup.pool_speedup or 1.0),
    )


class _Dispatch(Struct, frozen=True, gc=False):
    """One request at one replica, as long as it is not seen by every router."""

    router: int
    seen_ms: float  # by the others
    work_ms: float
    done_ms: float


class _Server:
    """One modelled replica: its cache, and when its queue is done."""

    __slots__ = (
        "busy_ms",
        "cache",
        "done_ms",
        "free_ms",
        "fresh",
        "id",
        "num_blocks",
        "prefilling",
        "unseen",
        "written_tokens",
    )

    def __init__(self, id_: CandidateId, num_blocks: int) -> None:
        self.id = id_
        self.num_blocks = num_blocks
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.done_ms: deque[float] = deque()  # first-token times of the requests in flight
        self.free_ms = 0.0
        self.busy_ms = 0.0
        self.prefilling = RecentShare(BUSY_S)
        self.written_tokens = RecentSum(LATELY_S)
        self.unseen: list[_Dispatch] = []  # by some router
        self.fresh: dict[int, tuple[int, float]] = {}  # block: who knows it (bits), all when

    def match(self, blocks: Sequence[int], router: int = 0, now_ms: float = 0.0) -> int:
        """Count leading blocks in the cache, those of requests in flight included.

        As a router sees it: other routers' new blocks are not there before they are told.
        """
        cache, fresh = self.cache, self.fresh
        for count, block in enumerate(blocks):
            if block not in cache:
                return count
            if fresh and block in fresh:
                routers, seen_ms = fresh[block]
                if not routers >> router & 1 and now_ms < seen_ms:
                    return count
        return len(blocks)

    def tell(
        self, router: int, blocks: Sequence[int], work_ms: float, seen_ms: float, now_ms: float
    ) -> None:
        """Keep a request that was just served, and its new blocks, from other routers for now."""
        self.unseen.append(_Dispatch(router, seen_ms, work_ms, self.free_ms))
        blocks_seen_ms = min(seen_ms, self.free_ms + EVENTS_MS)
        self.fresh = {block: told for block, told in self.fresh.items() if now_ms < told[1]}
        for block in blocks:
            if block in self.fresh:
                routers, told_ms = self.fresh[block]
                self.fresh[block] = routers | 1 << router, told_ms
            elif block not in self.cache:
                self.fresh[block] = 1 << router, blocks_seen_ms

    def store(self, blocks: Sequence[int]) -> None:
        """Use blocks, last one first: of one prompt the tail goes first, as in vLLM."""
        cache = self.cache
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > self.num_blocks:
            cache.popitem(last=False)

    def view(
        self, num_matched: int, cost: CostModel, now_ms: float, router: int = 0
    ) -> ReplicaView:
        while self.done_ms and self.done_ms[0] <= now_ms:
            self.done_ms.popleft()
        if self.free_ms <= now_ms:
            self.prefilling.switch(False, self.free_ms / 1000.0)
        num_tokens = num_matched * BLOCK_TOKENS
        num_unseen, unseen_ms = self._unseen_by(router, now_ms)
        return ReplicaView(
            id=self.id,
            num_gpu_tokens=num_tokens,
            num_cpu_tokens=num_tokens,
            num_requests=len(self.done_ms) - num_unseen,
            num_waiting=len(self.done_ms) - num_unseen,
            queue_ms=max(0.0, self.free_ms - now_ms - unseen_ms),
            busy_ratio=self.prefilling.at(now_ms / 1000.0),
            cache_pressure=self.written_tokens.at(now_ms / 1000.0)
            / (self.num_blocks * BLOCK_TOKENS),
            cost=cost,
        )

    def _unseen_by(self, router: int, now_ms: float) -> tuple[int, float]:
        """Count other routers' requests here that this one does not know of, and their work."""
        if not self.unseen:
            return 0, 0.0
        self.unseen = [d for d in self.unseen if now_ms < d.seen_ms and now_ms < d.done_ms]
        left_ms = [min(d.work_ms, d.done_ms - now_ms) for d in self.unseen if d.router != router]
        return len(left_ms), sum(left_ms)

    def serve(self, work_ms: float, now_ms: float) -> float:
        """Queue one prefill; return its first-token time in ms."""
        self.prefilling.switch(True, now_ms / 1000.0)
        self.free_ms = max(self.free_ms, now_ms) + work_ms
        self.busy_ms += work_ms
        self.done_ms.append(self.free_ms)
        return self.free_ms - now_ms


class _Pool:
    """Blocks shared by all, each from the time its prefill is done."""

    __slots__ = ("_ready_ms",)

    def __init__(self) -> None:
        self._ready_ms: dict[int, float] = {}

    def match(self, blocks: Sequence[int], now_ms: float) -> int:
        for count, block in enumerate(blocks):
            if self._ready_ms.get(block, now_ms + 1.0) > now_ms:
                return count
        return len(blocks)

    def store(self, blocks: Iterable[int], ready_ms: float) -> None:
        for block in blocks:
            self._ready_ms.setdefault(block, ready_ms)


def run(
    trace: Sequence[TraceRequest],
    sessions: Sequence[int],
    policy: Policy,
    setup: Setup,
    *,
    label: str = "",
    advance: Callable[[], None] = lambda: None,
) -> Result:
    """Send the trace through the modelled fleet; `advance` is called once per request."""
    cost = cost_for(trace, setup)
    servers = [
        _Server(CandidateId(f"r{number}"), setup.num_blocks) for number in range(setup.num_replicas)
    ]
    by_id = {server.id: server for server in servers}
    pool = _Pool() if setup.pool_speedup else None
    homes: dict[int, CandidateId] = {}
    ttfts_ms: list[float] = []
    num_local = num_pooled = 0
    dice = random.Random(setup.seed)
    for number, request in enumerate(trace):
        now_ms, blocks = request.timestamp, request.hash_ids
        router = dice.randrange(setup.num_routers)
        reusable = blocks[: (request.input_length - 1) // BLOCK_TOKENS]
        matches = {server.id: server.match(reusable, router, now_ms) for server in servers}
        num_in_pool = pool.match(reusable, now_ms) if pool else None
        decision = policy.decide(
            Snapshot(
                now_s=now_ms / 1000.0,
                number=number,
                seed=setup.seed,
                request=RequestView(
                    num_tokens=request.input_length,
                    session_hash=sessions[number],
                    session_candidate=homes.get(sessions[number]),
                    first_blocks_hash=blocks[: setup.num_first_blocks][-1],
                ),
                replicas=tuple([s.view(matches[s.id], cost, now_ms, router) for s in servers]),
                num_pool_tokens=None if num_in_pool is None else num_in_pool * BLOCK_TOKENS,
            )
        )
        server = by_id[decision.candidate]
        if setup.num_routers > 1:  # what is there is reused, whether or not it was known
            matches[server.id] = server.match(reusable, router, math.inf)
        num_held = max(matches[server.id], num_in_pool or 0) * BLOCK_TOKENS
        num_fetched = num_held - matches[server.id] * BLOCK_TOKENS
        work_ms = cost.prefill_ms(request.input_length - num_held, num_held)
        work_ms += cost.ms_per_fetched_token * num_fetched
        ttfts_ms.append(server.serve(work_ms, now_ms))
        if setup.num_routers > 1:
            server.tell(router, reusable, work_ms, now_ms + setup.staleness_ms, now_ms)
        server.store(blocks)
        num_written = request.input_length - num_held + num_fetched
        server.written_tokens.add(num_written, now_ms / 1000.0)
        if pool:
            pool.store(reusable, server.free_ms)
        homes[sessions[number]] = server.id
        num_local += matches[server.id] * BLOCK_TOKENS
        num_pooled += num_fetched
        advance()
    num_tokens = sum(request.input_length for request in trace)
    span_ms = max(1.0, trace[-1].timestamp - trace[0].timestamp)
    ttfts_ms.sort()
    return Result(
        label=label or policy.name,
        num_requests=len(trace),
        mean_s=sum(ttfts_ms) / len(ttfts_ms) / 1000.0,
        p50_s=percentile(ttfts_ms, 0.5) / 1000.0,
        p90_s=percentile(ttfts_ms, 0.9) / 1000.0,
        p99_s=percentile(ttfts_ms, 0.99) / 1000.0,
        local_ratio=num_local / num_tokens,
        pool_ratio=num_pooled / num_tokens,
        busy_ratio=sum(server.busy_ms for server in servers) / (setup.num_replicas * span_ms),
    )


def rules(
    names: Sequence[str], alphas: Sequence[float] = (), betas: Sequence[float] = ()
) -> list[tuple[str, Policy]]:
    """Make the policies to compare; `kv_aware` once for every alpha and beta."""
    made: list[tuple[str, Policy]] = []
    for name in names:
        if name != KvAware.name:
            made.append((name, create(name)))
            continue
        default = KvAware()
        for alpha, beta in product(alphas or [default.alpha], betas or [default.beta]):
            policy = KvAware(alpha=alpha, beta=beta)
            made.append((label_of(policy), policy))
    return made


def table_of(results: Sequence[Result], setup: Setup) -> Table:
    """Lay results out, TTFT first."""
    pool = f"pool x{setup.pool_speedup:g}" if setup.pool_speedup else "no pool"
    table = Table(
        title=f"{results[0].num_requests:,} requests, {setup.num_replicas} replicas x "
        f"{setup.num_blocks:,} blocks, load {setup.load:g}, {pool}"
    )
    table.add_column("policy", no_wrap=True)
    for column in ("mean s", "P50", "P90", "P99", "local %", "pool %", "busy %"):
        table.add_column(column, justify="right")
    for r in results:
        times = (f"{value:,.2f}" for value in (r.mean_s, r.p50_s, r.p90_s, r.p99_s))
        shares = (f"{100 * value:.1f}" for value in (r.local_ratio, r.pool_ratio, r.busy_ratio))
        table.add_row(r.label, *times, *shares)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and print its table."""
    args = _parser().parse_args(argv)
    setup = Setup(
        num_replicas=args.replicas,
        num_blocks=args.blocks,
        load=args.load,
        pool_speedup=args.pool,
        num_first_blocks=args.first_blocks,
        pairs_per_token=args.pairs,
        seed=args.seed,
    )
    console = Console()
    try:
        trace = read_trace(args.trace, max_requests=args.requests)
        chosen = rules(args.policies, args.alpha, args.beta)
    except (OSError, ValueError) as exc:
        console.print(f"[red]{exc}")
        return 2
    if not trace:
        console.print(f"[red]{args.trace}: no requests")
        return 2
    sessions = sessions_of(trace)
    results = []
    with Progress(console=console, transient=True) as progress:
        for label, policy in chosen:
            task = progress.add_task(label, total=len(trace))
            results.append(
                run(
                    trace,
                    sessions,
                    policy,
                    setup,
                    label=label,
                    advance=lambda task=task: progress.advance(task),  # type: ignore[misc]
                )
            )
    console.print(table_of(results, setup))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.queue_model", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake JSONL")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="NAME")
    parser.add_argument("--alpha", nargs="+", type=float, default=[], help="of kv_aware")
    parser.add_argument("--beta", nargs="+", type=float, default=[], help="of kv_aware")
    parser.add_argument("--load", type=float, default=0.9, help="of the no-cache capacity")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=5859, help="cache of one replica")
    parser.add_argument("--pool", type=float, metavar="SPEEDUP", help="read speed over computing")
    parser.add_argument("--first-blocks", type=int, default=4, help="of prefix_hash")
    parser.add_argument(
        "--pairs",
        type=float,
        default=PAIRS_PER_TOKEN,
        help="cost of 1e6 token-context pairs over that of a token; 0: attention is free",
    )
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
