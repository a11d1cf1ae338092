"""The fleet to simulate, and the pace of the workload."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from loadtest.engine_model.time_model import PRESETS, TimeModel
from loadtest.workload import Workload
from router.base.engines import Role
from router.scheduling.waiting import QueueRules

Loop = Literal["open", "closed"]
MODEL = "simulated"
"""Its name is part of what a session is hashed by."""

CACHE_TOKENS = 3_000_000
"""One replica's cache if no size is given. Source: FAST'25 Mooncake, about 1 TB of DRAM."""


class PoolSetup(Struct, frozen=True, kw_only=True):
    """A shared pool: one replica alone reads a token in 1 / `speed` of the time to prefill it.

    `num_links`: Replicas that can read at full speed at once; more share it. None: half of them (a
    network oversubscribed two to one). `capacity_blocks` None: unlimited.
    """

    speed: float
    num_links: float | None = None
    capacity_blocks: int | None = None


class TierSetup(Struct, frozen=True, kw_only=True):
    """A CPU tier of each replica: it reads a token in 1 / `speed` of the time to prefill it.

    `num_blocks`: Of the workload's size, per replica.
    """

    num_blocks: int
    speed: float = 20.0

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError(f"a CPU tier of {self.num_blocks} blocks: it needs at least 1")


class Halves(Struct, frozen=True, kw_only=True):
    """Replicas that compute prompts for others, and replicas that answer.

    A prompt's KV comes to its decode replica through the pool, at the pool's speed. Without a pool
    it comes from its prefill replica, which keeps it until then. A read alone takes 1 / `speed` of
    the time to prefill the tokens. As many reads are that fast at once as the smaller half has
    replicas; more share it.
    """

    num_prefill: int
    num_decode: int
    speed: float = 20.0

    def __post_init__(self) -> None:
        if self.num_prefill < 1 or self.num_decode < 1:
            raise ValueError(
                f"{self.num_prefill} prefill and {self.num_decode} decode replicas: each needs the "
                "other"
            )


class Setup(Struct, frozen=True, kw_only=True):
    """A simulation without its workload and policy.

    `num_replicas` compute whole requests; with `halves` there may be none of these.

    `load` is the offered work divided by the fleet's capacity, both without any cache. Arrival
    times are stretched to it; None: they stay. In a closed loop it sets when sessions start.
    """

    num_replicas: int = 8
    halves: Halves | None = None  # None: no replica has a role
    num_blocks: int | None = None  # of the workload's size, per replica; None: CACHE_TOKENS
    engine: str = "h100x4-70b"
    time_model: TimeModel | None = None  # in place of the preset that `engine` names
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    pool: PoolSetup | None = None
    tier: TierSetup | None = None
    load: float | None = 0.9
    loop: Loop = "open"
    stop_s: float | None = None  # no turn is sent after that; those in flight are awaited
    decodes: bool = True  # False: every reply is one token, as on a prefill instance
    event_lag_s: float = 0.1  # from a step's end until the router has its events
    num_routers: int = 1  # each request comes to one of them by chance
    note_lag_s: float = 0.0  # until the others know of it; math.inf: never
    slo_ttft_s: float = 30.0  # Source: FAST'25 Mooncake, 5.1; for goodput only
    slo_tbt_s: float = 0.2
    seed: int = 0
    queue: QueueRules | None = None  # None: every turn is sent at once

    def __post_init__(self) -> None:
        if self.tier is not None and (self.pool is not None or self.halves is not None):
            raise ValueError(
                "a CPU tier: not with a pool, and not with prefill and decode replicas"
            )

    @property
    def roles(self) -> list[tuple[str, Role]]:
        """List all replicas, each with its name and its role."""
        halves = self.halves
        num_prefill, num_decode = (halves.num_prefill, halves.num_decode) if halves else (0, 0)
        return [
            *((f"r{number + 1}", "both") for number in range(self.num_replicas)),
            *((f"p{number + 1}", "prefill") for number in range(num_prefill)),
            *((f"d{number + 1}", "decode") for number in range(num_decode)),
        ]

    @property
    def moves_by_peers(self) -> bool:
        """Whether a prompt's KV comes from the replica that computed it, not through a pool."""
        return self.pool is None

    @property
    def times(self) -> TimeModel:
        """The time model in force.

        Raises:
            ValueError: There is no preset of that name.
        """
        if self.time_model is not None:
            return self.time_model
        if self.engine not in PRESETS:
            raise ValueError(f"unknown engine {self.engine!r} (allowed: {', '.join(PRESETS)})")
        return PRESETS[self.engine]

    def cache_blocks(self, block_size: int) -> int:
        """Count the blocks of a replica's cache, without the null block."""
        return self.num_blocks or max(1, CACHE_TOKENS // block_size)


def offered_work_s(workload: Workload, setup: Setup) -> float:
    """Sum the time that the workload takes one replica without any cache.

    It is that of prefills and decodes, without the steps' base, which a batch shares.
    """
    times = setup.times
    total_ms = 0.0
    for turn in workload.turns:
        num = turn.num_input_tokens
        total_ms += times.ms_per_prefill_token * num + times.ms_per_mtoken2 * num * num * 0.5e-6
        if setup.decodes:
            num_out = turn.num_output_tokens - 1
            context = num + 0.5 * num_out
            total_ms += num_out * (
                times.ms_per_decode + times.ms_per_mtoken_context * context * 1e-6
            )
    return total_ms * 1e-3


def stretch(workload: Workload, setup: Setup) -> float:
    """Find the factor on arrival times at which the workload offers `setup.load`."""
    if setup.load is None or workload.span_s <= 0.0:
        return 1.0
    return offered_work_s(workload, setup) / (setup.load * len(setup.roles) * workload.span_s)


def coarsened(workload: Workload, factor: int) -> Workload:
    """Join `factor` blocks into one: an id names its whole prefix, so the last id is kept.

    It makes workloads of small blocks faster; hits are rounded down to the new size.
    """
    if factor == 1:
        return workload
    size = workload.block_size * factor
    turns = []
    for turn in workload.turns:
        ids = turn.hash_ids[factor - 1 :: factor]
        if len(ids) * size < turn.num_input_tokens:
            ids = (*ids, turn.hash_ids[-1])  # the partial one at the end
        turns.append(replace(turn, hash_ids=ids))
    return replace(workload, block_size=size, turns=tuple(turns))
