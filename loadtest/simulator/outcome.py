"""What a simulation found: the run as a client would have seen it, and what only it knows."""

from __future__ import annotations

from msgspec import Struct

from loadtest.results import Run, Summary, summarize
from loadtest.simulator.setup import Setup
from router.records.record import DecisionRecord


class ReplicaUse(Struct, frozen=True, kw_only=True):
    """What one replica did; ratios are of the simulated time."""

    name: str
    num_requests: int
    num_computed_tokens: int  # prompt tokens, those of preempted requests again
    num_evicted_blocks: int
    num_preemptions: int
    num_steps: int
    busy_ratio: float  # with any step under way
    prefill_ratio: float  # with a prefill in it


class Simulated(Struct, frozen=True, kw_only=True):
    """One workload under one policy.

    Tokens are prompt tokens; `num_local_tokens` were in the replica's cache, `num_pool_tokens` were
    read from the pool, the rest was computed. `goodput` counts turns within both limits of the
    setup, per second of simulated time.
    """

    run: Run
    setup: Setup
    stretch: float  # factor on the workload's arrival times
    span_s: float  # simulated, to the last answer
    replicas: tuple[ReplicaUse, ...]
    num_prompt_tokens: int
    num_local_tokens: int
    num_pool_tokens: int
    num_good: int
    num_mispredicted: int  # turns for which another number of cached tokens had been predicted
    num_pool_stored: int = 0  # blocks
    num_pool_evicted: int = 0
    tbt_mean_s: float = 0.0
    tbt_tail_p90_s: float = 0.0  # over turns: 90th percentile of the mean of the longest tenth
    records: tuple[DecisionRecord, ...] = ()  # where the setup keeps them

    @property
    def summary(self) -> Summary:
        """Sum the run up."""
        return summarize(self.run.turns)

    @property
    def local_ratio(self) -> float:
        return self.num_local_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def pool_ratio(self) -> float:
        return self.num_pool_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def goodput(self) -> float:
        """Turns within both limits, per second."""
        return self.num_good / self.span_s if self.span_s else 0.0

    @property
    def good_ratio(self) -> float:
        """Share of turns within both limits."""
        return self.num_good / len(self.run.turns) if self.run.turns else 0.0

    @property
    def busy_ratio(self) -> float:
        """Share of time with a prefill under way, in the mean of the replicas."""
        return sum([use.prefill_ratio for use in self.replicas]) / len(self.replicas)

    @property
    def imbalance(self) -> float:
        """Busiest replica's time over the mean; 1.0 is even."""
        return max(use.prefill_ratio for use in self.replicas) / (self.busy_ratio or 1.0)
