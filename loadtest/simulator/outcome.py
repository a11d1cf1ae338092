"""The result of a simulation: the run as a client sees it, and figures of the fleet."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from loadtest.results import Run, Summary, summarize
from loadtest.simulator.setup import Setup
from router.base.engines import Role


class ReplicaUse(Struct, frozen=True, kw_only=True):
    """The work of one replica; ratios are of the simulated time."""

    name: str
    role: Role = "both"
    num_requests: int
    num_computed_tokens: int  # prompt tokens, those of preempted requests again
    num_output_tokens: int = 0  # of turns that it answered
    num_evicted_blocks: int
    num_preemptions: int
    num_steps: int
    busy_ratio: float  # with any step under way
    prefill_ratio: float  # with a prefill in it

    @property
    def batch(self) -> float:
        """Tokens of answers by step, in the mean."""
        return self.num_output_tokens / self.num_steps if self.num_steps else 0.0


class Simulated(Struct, frozen=True, kw_only=True):
    """One workload under one policy.

    Tokens are prompt tokens. `num_local_tokens` were in the cache of the replica that computed the
    prompt, `num_cpu_tokens` in its CPU tier, `num_pool_tokens` in the pool; the rest was computed.
    The prompts of `num_apart` turns were computed by a prefill replica, which took `prefill_mean_s`
    with its queue; `num_moved_tokens` of them were read by the decode replica. `goodput` counts
    turns within both limits of the setup, per second of simulated time.
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
    num_cpu_tokens: int = 0
    num_pool_stored: int = 0  # blocks
    num_pool_evicted: int = 0
    num_apart: int = 0
    num_moved_tokens: int = 0
    prefill_mean_s: float = 0.0
    tbt_mean_s: float = 0.0
    tbt_tail_p90_s: float = 0.0  # over turns: 90th percentile of the mean of the longest tenth

    @property
    def summary(self) -> Summary:
        """Sum the run up."""
        return summarize(self.run.turns)

    @property
    def local_ratio(self) -> float:
        return self.num_local_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def cpu_ratio(self) -> float:
        return self.num_cpu_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def pool_ratio(self) -> float:
        return self.num_pool_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def apart_ratio(self) -> float:
        """Share of turns whose prompt a prefill replica computed."""
        return self.num_apart / len(self.run.turns) if self.run.turns else 0.0

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
        """Share of time with a prefill under way, in the mean of those that compute prompts."""
        return _mean([use.prefill_ratio for use in self._prefilling])

    @property
    def imbalance(self) -> float:
        """Busiest replica's time over the mean; 1.0 is even."""
        return max(use.prefill_ratio for use in self._prefilling) / (self.busy_ratio or 1.0)

    @property
    def decode_busy_ratio(self) -> float:
        """Share of time with any step under way, in the mean of the decode replicas."""
        return _mean([use.busy_ratio for use in self._decoding])

    @property
    def decode_batch(self) -> float:
        """Tokens by step of a decode replica, in the mean."""
        return _mean([use.batch for use in self._decoding])

    @property
    def decode_imbalance(self) -> float:
        """Tokens of the decode replica that gave most over the mean; 1.0 is even."""
        nums = [use.num_output_tokens for use in self._decoding]
        return max(nums, default=0) / (_mean(nums) or 1.0)

    @property
    def _prefilling(self) -> list[ReplicaUse]:
        return [use for use in self.replicas if use.role != "decode"]

    @property
    def _decoding(self) -> list[ReplicaUse]:
        return [use for use in self.replicas if use.role == "decode"]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
