"""Published figures beside the simulator's, on Mooncake's conversation trace.

    warmroute simulate --trace conversation_trace.jsonl --published

Two checks. Hit rates say whether blocks, eviction and matching are right: they are counted on the
trace alone, so they must come out equal, within `TOLERANCE`. Mean TTFT by scheduling rule says
whether queues and costs are: the papers' engines, scale and pace are known in part only, so the
order must come out, and the last step about as large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress

from loadtest.emulator.time_model import TimeModel
from loadtest.markdown import table
from loadtest.simulator.outcome import Simulated
from loadtest.simulator.setup import PoolSetup, Setup
from loadtest.simulator.simulation import simulate
from loadtest.workload import Workload
from policies import Policy, create

HITS = {
    1_000: 4.5,
    5_859: 13.9,
    10_000: 21.6,
    30_000: 33.2,
    50_000: 36.2,
    100_000: 37.1,
    1_000_000: 37.4,
}
"""Blocks of an LRU cache to the share of prompt tokens found in it, in %; the last is the ideal.

Counted on FAST25-release/traces/conversation_trace.jsonl (kvcache-ai/Mooncake). FAST'25, Fig. 9,
shows 3M tokens (5,859 blocks) at about two fifths of the ideal.
"""

TOLERANCE = 0.5  # percentage points

A800X8_70B = TimeModel(base_ms=13.0, ms_per_prefill_token=0.112, ms_per_mtoken2=2.6)
"""LLaMA3-70B on eight A800 (312 TFLOP/s each), prefill only, as in FAST'25; made as the presets of
`loadtest.emulator.time_model` are."""

POOL_SPEED = 35.0
"""Reading over prefilling: 4 x 200 Gbit/s at 320 KB of KV a token, over 0.112 ms a token."""


class Rule(Struct, frozen=True, kw_only=True):
    """One of the papers' scheduling rules, its published means in seconds, and ours for it."""

    name: str
    fast_s: float  # FAST'25 Fig. 5: conversation trace, 16 nodes
    arxiv_s: float  # arXiv 2407.00079 Fig. 8: 8 + 8 nodes, 23,000 requests
    policy: str
    has_pool: bool = False


RULES = (
    Rule(name="random", fast_s=19.65, arxiv_s=92.07, policy="random"),
    Rule(name="load balance", fast_s=5.27, arxiv_s=60.41, policy="least_loaded"),
    Rule(name="cache-aware", fast_s=3.58, arxiv_s=14.36, policy="mooncake"),
    Rule(name="KVCache-centric", fast_s=3.07, arxiv_s=6.26, policy="mooncake", has_pool=True),
)

LOADS = (0.9, 1.15)

Advance = Callable[[int], None]


def report(workload: Workload, advance: Advance = lambda num: None) -> str:
    """Do both checks and lay them out as Markdown; a minute."""
    hits = {num_blocks: hit_percent(workload, num_blocks, advance) for num_blocks in HITS}
    ours = [[mean_s(workload, rule, load, advance) for load in LOADS] for rule in RULES]
    setup = order_setup(LOADS[0], has_pool=True)
    return "\n\n".join(
        [
            f"**Hit rates.** {len(workload.turns):,} requests of `{workload.name}`, one replica "
            "with the whole capacity, partial last blocks kept as Mooncake keeps them, replies of "
            "one token. Share of prompt tokens found in the cache.",
            _hit_table(hits),
            hit_verdict(hits),
            f"**Order of scheduling rules.** Mean time to first token. Ours: {setup.num_replicas} "
            "prefill replicas with LLaMA3-70B on eight A800 each, and 3M tokens of cache each. The "
            "trace's own arrivals come at a pace that offers 0.9 and 1.15 of the fleet's capacity "
            "without caches. The rules are `random`, `least_loaded`, `mooncake` without a pool, "
            f"and `mooncake` with a pool that reads {POOL_SPEED:g} times faster than prefilling.",
            _order_table(ours),
            order_verdict(ours),
        ]
    )


def num_turns_to_simulate(workload: Workload) -> int:
    """Count the turns that `report` simulates in all."""
    return len(workload.turns) * (len(HITS) + len(RULES) * len(LOADS))


def hit_percent(workload: Workload, num_blocks: int, advance: Advance = lambda num: None) -> float:
    """Simulate one LRU cache; return the share of prompt tokens that it had, in %."""
    lengths = {turn.key: turn.num_input_tokens for turn in workload.turns}
    size = workload.block_size
    # One token more than the blocks hold: the partial block counts as full, and can be hit.
    whole = [
        replace(turn, num_input_tokens=size * len(turn.hash_ids) + 1) for turn in workload.turns
    ]
    setup = Setup(num_replicas=1, num_blocks=num_blocks, load=0.5, decodes=False, event_lag_s=0.0)
    found = simulate(
        replace(workload, turns=tuple(whole)), create("round_robin"), setup, advance=advance
    )
    num_hit = sum(
        min(turn.num_cached_tokens or 0, lengths[turn.session_id, turn.number])
        for turn in found.run.turns
    )
    return 100.0 * num_hit / sum(lengths.values())


def order_setup(load: float, *, has_pool: bool) -> Setup:
    """Describe the fleet on which the rules are compared."""
    return Setup(
        load=load,
        engine="a800x8-70b",
        time_model=A800X8_70B,
        decodes=False,
        pool=PoolSetup(speed=POOL_SPEED) if has_pool else None,
    )


def mean_s(
    workload: Workload, rule: Rule, load: float, advance: Advance = lambda num: None
) -> float:
    """Simulate one rule; return its mean time to first token."""
    policy: Policy = create(rule.policy)
    setup = order_setup(load, has_pool=rule.has_pool)
    found: Simulated = simulate(workload, policy, setup, advance=advance)
    return found.summary.ttft_mean_s


def hit_verdict(hits: dict[int, float]) -> str:
    """Write how far ours are from what is counted."""
    far = max(abs(hits[num_blocks] - expected) for num_blocks, expected in HITS.items())
    how = "within" if far <= TOLERANCE else "NOT within"
    return f"Largest difference: {far:.2f} points, {how} the tolerance of {TOLERANCE}."


def order_verdict(ours: Sequence[Sequence[float]]) -> str:
    """Write whether the rules come out in the published order, and how large the last step is."""
    columns = list(zip(*ours, strict=True))
    same = all(list(column) == sorted(column, reverse=True) for column in columns)
    steps = ", ".join(
        f"{column[-1] / column[-2] - 1:+.0%} at load {load:g}"
        for load, column in zip(LOADS, columns, strict=True)
    )
    fast = RULES[-1].fast_s / RULES[-2].fast_s - 1
    return (
        f"The order is {'the published one' if same else 'NOT the published one'}. "
        f"What the pool adds to cache-awareness: {fast:+.0%} in FAST'25; ours {steps}."
    )


def _hit_table(hits: dict[int, float]) -> str:
    header = ["blocks", *(f"{num:,}" for num in list(HITS)[:-1]), "unlimited"]
    return table(
        header,
        [
            ["counted on the trace", *(f"{value:.1f} %" for value in HITS.values())],
            ["simulated", *(f"{value:.1f} %" for value in hits.values())],
        ],
    )


def _order_table(ours: Sequence[Sequence[float]]) -> str:
    header = ["rule", "FAST'25 Fig. 5", "arXiv Fig. 8", *(f"ours, load {load:g}" for load in LOADS)]
    rows = [
        [rule.name, f"{rule.fast_s:.2f} s", f"{rule.arxiv_s:.2f} s", *(f"{s:.2f} s" for s in mine)]
        for rule, mine in zip(RULES, ours, strict=True)
    ]
    return table(header, rows)


def with_progress(workload: Workload) -> str:
    """Make the report with a progress bar."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=num_turns_to_simulate(workload))
        return report(workload, lambda num: progress.advance(task, num))
