"""The counts of a simulation: every turn's result, and the sums.

What must not live here: when anything happens (simulation).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from loadtest.engine_model.pool import BlockPool
from loadtest.results import Predicted, Run, RunInfo, TurnResult, percentile
from loadtest.simulator.engine import Engine, Request, between_tokens
from loadtest.simulator.outcome import ReplicaUse, Simulated
from loadtest.simulator.setup import Setup
from loadtest.simulator.ticket import Ticket, ticket_of
from loadtest.workload import Turn, Workload
from policies.policy import Policy
from router.base.engines import Role


class Tally:
    """The results of one simulation.

    Args:
        workload: The turns.
        policy: Places them.
        setup: The fleet.
        engines: By number, as placements name them.
        advance: Called with 1 for each result.
    """

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        setup: Setup,
        engines: Sequence[Engine],
        advance: Callable[[int], None],
    ) -> None:
        self._workload = workload
        self._policy = policy
        self._setup = setup
        self._engines = engines
        self._advance = advance
        self._results: list[TurnResult] = []
        self._num_local_tokens = self._num_cpu_tokens = self._num_pool_tokens = 0
        self._num_mispredicted = 0
        self._num_apart = self._num_moved_tokens = 0  # of prompts computed for another replica
        self._prefill_s = 0.0
        self._end_s = 0.0

    def answered(self, ticket: Ticket, request: Request, now_s: float) -> None:
        """Count a turn that was answered."""
        turn, prompt, prefill = ticket.turn, request, None
        if ticket.prompt is not None:
            prompt = ticket.prompt
            prefill = ticket_of(prompt).placement
            assert prompt.first_token_s is not None
            self._prefill_s += prompt.first_token_s - prefill.lease.begun_s
            self._num_apart += 1
            self._num_moved_tokens += request.num_read_tokens
        placement = prefill or ticket.placement
        num_read = prompt.num_read_tokens
        num_local = prompt.num_cached_tokens - num_read
        num_cpu, num_pool = (num_read, 0) if self._setup.tier is not None else (0, num_read)
        self._num_local_tokens += num_local
        self._num_cpu_tokens += num_cpu
        self._num_pool_tokens += num_pool
        num_predicted = placement.predicted.num_cached_tokens
        self._num_mispredicted += num_predicted != prompt.num_cached_tokens
        tbt = between_tokens(request)
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
            predicted=Predicted(gpu=num_local, cpu=num_cpu, pool=num_pool),
            policy=self._policy.name,
            tbt_mean_s=tbt[0] if tbt else None,
            tbt_tail_s=tbt[1] if tbt else None,
        )
        self._add(result, now_s)

    def failed(self, turn: Turn, at_s: float, now_s: float, status: int, why: str) -> None:
        """Count a turn of `at_s` that was refused."""
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

    def outcome(self, label: str, stretch: float, pool: BlockPool | None) -> Simulated:
        """Sum up.

        Args:
            label: Names the run.
            stretch: The factor that was on arrival times.
            pool: None: there is no shared pool.
        """
        setup, results = self._setup, self._results
        tails = sorted([r.tbt_tail_s for r in results if r.tbt_tail_s is not None])
        means = [r.tbt_mean_s for r in results if r.tbt_mean_s is not None]
        first_s = min((result.start_s for result in results), default=0.0)
        span_s = self._end_s - first_s
        return Simulated(
            run=Run(
                info=RunInfo(
                    label=label,
                    target="simulated",
                    workload=self._workload.name,
                    loop=setup.loop,
                    seed=setup.seed,
                ),
                turns=tuple(results),
            ),
            setup=setup,
            stretch=stretch,
            span_s=span_s,
            replicas=self._uses(span_s),
            num_prompt_tokens=sum([result.num_prompt_tokens or 0 for result in results]),
            num_local_tokens=self._num_local_tokens,
            num_cpu_tokens=self._num_cpu_tokens,
            num_pool_tokens=self._num_pool_tokens,
            num_good=sum([_is_good(result, setup) for result in results]),
            num_mispredicted=self._num_mispredicted,
            num_pool_stored=pool.num_put if pool else 0,
            num_pool_evicted=pool.num_evicted if pool else 0,
            num_apart=self._num_apart,
            num_moved_tokens=self._num_moved_tokens,
            prefill_mean_s=self._prefill_s / self._num_apart if self._num_apart else 0.0,
            tbt_mean_s=sum(means) / len(means) if means else 0.0,
            tbt_tail_p90_s=percentile(tails, 0.9),
        )

    def _add(self, result: TurnResult, now_s: float) -> None:
        self._results.append(result)
        self._end_s = max(self._end_s, now_s)
        self._advance(1)

    def _uses(self, span_s: float) -> tuple[ReplicaUse, ...]:
        num_tokens: Counter[str | None] = Counter()
        for result in self._results:
            num_tokens[result.replica] += result.num_output_tokens or 0
        roles = zip(self._setup.roles, self._engines, strict=True)
        return tuple(
            [_use_of(name, role, each, num_tokens[name], span_s) for (name, role), each in roles]
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
        busy_ratio=engine.busy_s / span_s if span_s else 0.0,
        prefill_ratio=engine.prefill_s / span_s if span_s else 0.0,
    )


def _is_good(result: TurnResult, setup: Setup) -> bool:
    if result.ttft_s is None or result.ttft_s > setup.slo_ttft_s:
        return False
    return result.tbt_tail_s is None or result.tbt_tail_s <= setup.slo_tbt_s
