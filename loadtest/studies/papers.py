"""The papers' figures of prefill and decode apart, beside the simulator's.

    python -m loadtest.studies.papers --trace conversation_trace.jsonl
    python -m loadtest.studies.papers --part scaling

    scaling     vLLM and Mooncake, blog of 2026-05-06, figure 5: 12 to 60 GPUs, agents
    datasets    Mooncake, arXiv 2407.00079, figures 11 and 12: four instances, by data set
    trace       figure 13: twenty instances, a real trace

Order and ratio can be held beside theirs; seconds cannot, since their engines are not known well
enough. What was fitted is said with each table. Their figures 9 and 10 are in
`loadtest.studies.overload`.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress

from loadtest.agents import lognormal
from loadtest.emulator.time_model import TimeModel
from loadtest.generated.prefix import Prefix
from loadtest.generated.script import Script
from loadtest.markdown import table
from loadtest.results import percentile
from loadtest.simulator import Halves, PoolSetup, Setup, Simulated, simulate
from loadtest.simulator.published import A800X8_70B, POOL_SPEED
from loadtest.studies.measured import interrupt_on_sigterm, measured
from loadtest.timing import Timing, poisson
from loadtest.traces import read_workload
from loadtest.workload import Workload
from policies import create

Part = Literal["scaling", "datasets", "trace"]
PARTS: Final[tuple[Part, ...]] = get_args(Part)

Step = Callable[[str], None]
"""Called with what is simulated next, before it is."""

# -- the blog's scaling ------------------------------------------------------------------------

GB200_KIMI: Final = TimeModel(
    base_ms=30.0,
    ms_per_prefill_token=0.005,
    ms_per_mtoken2=0.6,
    ms_per_decode=0.05,
    ms_per_mtoken_context=0.74,
)
"""Kimi-2.5 on GB200: 32B active parameters on four GPUs, MLA with 38 KB of KV a token (the blog's)
read by eight. `base_ms` is fitted: it makes the blog's 39 ms a token at its first point."""

SCALING: Final = (
    (1, 137_000, 2.4, 39),
    (2, 271_000, 2.2, 40),
    (3, 401_000, 2.1, 42),
    (4, 535_000, 2.1, 42),
    (5, 656_000, 2.2, 42),
)
"""Prefill and decode instances, of twelve GPUs together; tokens a second, P50 of the time to first
token in s and of the time between tokens in ms, read off the blog's figure 5."""

SESSIONS_EACH: Final = 75
_GPUS_EACH: Final = 12
_BLOCK: Final = 1024
_PREFILL_TOKENS: Final = 3_000_000
_DECODE_TOKENS: Final = 12_000_000
_SCALING_SPEED: Final = 25.0  # of reads: 200 GB/s, at 38 KB a token


class Agents(Struct, frozen=True, kw_only=True):
    """The blog's synthetic agents: all alike, no pause between turns."""

    num_sessions: int
    num_turns: int = 30
    num_shared_tokens: int = 20_000
    num_first_tokens: int = 10_000
    num_turn_tokens: int = 2_048
    num_output_tokens: int = 900

    def workload(self) -> Workload:
        """Write them down; they start within the time of one turn, evenly."""
        script = Script(_BLOCK)
        shared = Prefix(_BLOCK).grow(self.num_shared_tokens)
        for session in range(self.num_sessions):
            prefix, done = shared.fork(), None
            for number in range(self.num_turns):
                prefix.grow(self.num_turn_tokens if number else self.num_first_tokens)
                done = script.say(
                    f"s{session}",
                    prefix,
                    self.num_output_tokens,
                    num_known_tokens=0,
                    after=(done,) if done else (),
                    arrival_s=None if done else 36.0 * session / self.num_sessions,
                )
        return script.workload(f"{self.num_sessions} agents")


class Scaled(Struct, frozen=True, kw_only=True):
    """One size of the fleet under one policy."""

    policy: str
    num_each: int  # prefill, and decode, instances
    tokens_per_s: float  # prompts' and answers'
    ttft_p50_s: float
    tbt_p50_ms: float
    hit_ratio: float
    pool_ratio: float


def scale(policy: str, num_each: int, agents: Agents) -> Scaled:
    """Simulate the blog's agents on so many prefill and so many decode instances."""
    setup = Setup(
        num_replicas=0,
        halves=Halves(
            num_prefill=num_each,
            num_decode=num_each,
            by_peers=True,
            always_apart=True,
            num_decode_blocks=_DECODE_TOKENS // _BLOCK,
        ),
        num_blocks=_PREFILL_TOKENS // _BLOCK,
        time_model=GB200_KIMI,
        pool=PoolSetup(speed=_SCALING_SPEED),
        load=None,
        load_interval_s=math.inf,
        loop="closed",
    )
    found = simulate(agents.workload(), create(policy), setup)
    turns = found.run.turns
    num_tokens = found.num_prompt_tokens + sum(turn.num_output_tokens or 0 for turn in turns)
    return Scaled(
        policy=policy,
        num_each=num_each,
        tokens_per_s=num_tokens / found.span_s,
        ttft_p50_s=found.summary.ttft_p50_s,
        tbt_p50_ms=1e3 * percentile(sorted(turn.tbt_mean_s or 0.0 for turn in turns), 0.5),
        hit_ratio=found.local_ratio + found.pool_ratio,
        pool_ratio=found.pool_ratio,
    )


def scaling(step: Step) -> str:
    """Simulate the blog's figure 5, by its policy and by ours; lay it out."""
    found = []
    for policy, sizes in (("round_robin", SCALING), ("kv_aware", (SCALING[0], SCALING[-1]))):
        for num_each, *_ in sizes:
            step(f"scaling, {_GPUS_EACH * num_each} GPUs: {policy}")
            found.append(scale(policy, num_each, Agents(num_sessions=SESSIONS_EACH * num_each)))
    return scaling_report(found)


def scaling_report(found: Sequence[Scaled]) -> str:
    """Lay the fleet's sizes out beside the blog's."""
    rows = []
    for num_each, theirs, ttft_s, tbt_ms in SCALING:
        row = [f"{num_each}P{num_each}D, {_GPUS_EACH * num_each}"]
        row.append(f"{theirs / 1e3:,.0f}k, {theirs / SCALING[0][1]:.2f}; {ttft_s} s; {tbt_ms} ms")
        for policy in dict.fromkeys(each.policy for each in found):
            ours = [each for each in found if each.policy == policy]
            cells = [_scaled(each, ours[0]) for each in ours if each.num_each == num_each]
            row += cells or [""]
        rows.append(row)
    policies = [f"ours, `{each}`" for each in dict.fromkeys(each.policy for each in found)]
    return "\n\n".join(
        [
            "**More of both halves.** The blog's synthetic agents, 75 for each prefill and decode "
            "instance, prompts placed in turn. In each cell: tokens a second, and as a multiple of "
            "the smallest fleet's; median time to first token; median inter-token latency. Ours "
            "also: share of prompt tokens read from the pool (theirs: above 95 %).",
            table(["instances, GPUs", "blog, round-robin", *policies], rows),
        ]
    )


def _scaled(each: Scaled, first: Scaled) -> str:
    return (
        f"{each.tokens_per_s / 1e3:,.0f}k, {each.tokens_per_s / first.tokens_per_s:.2f}; "
        f"{each.ttft_p50_s:.2f} s; {each.tbt_p50_ms:.0f} ms; "
        f"{each.hit_ratio:.1%}, {each.pool_ratio:.0%}"
    )


# -- the report's data sets --------------------------------------------------------------------

A800X8_WHOLE: Final = replace(A800X8_70B, ms_per_decode=0.05, ms_per_mtoken_context=25.6)
"""As in `published`, and what decoding adds: 327,680 bytes of KV a token over eight A800."""

_GPU_BLOCKS: Final = 2_700  # of 512: 1.4M tokens, what eight A800 hold beside a 70B model
_NUM_REQUESTS: Final = (120, 1_000)  # of a run; between them, as many as come
_SPANS: Final = 6.0  # in so many times the limit of a first token
_NUM_DOCUMENTS: Final = 20
_SLO_RATIOS: Final = (10.0, 5.0)  # TTFT, TBT, over those of an idle fleet; arXiv 2407.00079, 2
_LEAST_RATE: Final = 1e-3
_NUM_HALVINGS: Final = 4


class DataSet(Struct, frozen=True, kw_only=True):
    """One of the report's (its table 2), and by how much 3P+1D was ahead of four of vLLM."""

    name: str
    num_input_tokens: int
    num_output_tokens: int
    cached_ratio: float
    spread: float = 0.0  # sigma of lengths
    published: str

    def workload(self, rate: float, num: int, *, is_shared: bool = True) -> Workload:
        """Draw requests that arrive as a Poisson process.

        `is_shared`: prompts begin with one of some documents; else nothing of them repeats.
        """
        dice, arrivals = random.Random(self.name), poisson(rate, random.Random(f"{self.name}/at"))
        script, root = Script(512), Prefix(512)
        num_shared = round(self.cached_ratio * self.num_input_tokens)
        documents = [root.fork().grow(num_shared) for _ in range(_NUM_DOCUMENTS)]
        for number in range(num):
            num_input = round(lognormal(dice, self.num_input_tokens, self.spread))
            begun = dice.choice(documents).fork() if is_shared else root.fork().grow(num_shared)
            script.say(
                f"s{number}",
                begun.grow(max(1, num_input - num_shared)),
                max(2, round(lognormal(dice, self.num_output_tokens, self.spread))),
                num_known_tokens=0,
                arrival_s=next(arrivals),
            )
        return script.workload(self.name)


DATA_SETS: Final = (
    DataSet(name="ArXiv Summarization", num_input_tokens=8_088, num_output_tokens=229,
            cached_ratio=0.0, spread=0.4, published="+20 %"),
    DataSet(name="L-Eval", num_input_tokens=19_019, num_output_tokens=72,
            cached_ratio=0.8, spread=0.4, published="+40 %"),
    *(DataSet(name=f"simulated, {num_k}k", num_input_tokens=1_000 * num_k, num_output_tokens=512,
              cached_ratio=0.5, published="+50 to +525 %") for num_k in (16, 32, 64, 128)),
)  # fmt: skip


class Fleet(Struct, frozen=True, kw_only=True):
    """Four instances."""

    name: str
    policy: str
    setup: Setup
    is_cached: bool = True


def _fleet(num_prefill: int, num_decode: int) -> Setup:
    return Setup(
        num_replicas=0,
        halves=Halves(
            num_prefill=num_prefill, num_decode=num_decode, by_peers=True, always_apart=True
        ),
        pool=PoolSetup(speed=POOL_SPEED),
        num_blocks=_GPU_BLOCKS,
        time_model=A800X8_WHOLE,
        load=None,
        load_interval_s=math.inf,
    )


def _whole(num_replicas: int, **changes: Any) -> Setup:
    return Setup(
        num_replicas=num_replicas,
        num_blocks=_GPU_BLOCKS,
        time_model=A800X8_WHOLE,
        load=None,
        load_interval_s=math.inf,
        **changes,
    )


FLEETS: Final = (
    Fleet(name="4 whole, no cache", policy="least_loaded", setup=_whole(4), is_cached=False),
    Fleet(name="the same, one request at a time", policy="least_loaded",
          setup=_whole(4, max_num_seqs=1), is_cached=False),
    Fleet(name="4 whole, `kv_aware`, chunks of 1,024", policy="kv_aware",
          setup=_whole(4, max_num_batched_tokens=1_024)),
    Fleet(name="2P+2D", policy="kv_aware", setup=_fleet(2, 2)),
    Fleet(name="3P+1D", policy="kv_aware", setup=_fleet(3, 1)),
)  # fmt: skip


def best_rate(given: DataSet, fleet: Fleet, slos_s: tuple[float, float]) -> float:
    """Find the highest rate at which nine in ten requests have each time within its limit.

    To a few percent: doubled, then halved. 0.0: not even next to no load is.
    """

    def keeps(rate: float) -> bool:
        least, most = _NUM_REQUESTS
        num = max(least, min(most, round(_SPANS * slos_s[0] * rate)))
        return all(s <= slo for s, slo in zip(p90s(given, fleet, rate, num), slos_s, strict=True))

    if not keeps(_LEAST_RATE):
        return 0.0
    low = high = 0.05
    while keeps(high):
        low, high = high, 2.0 * high
    while low > _LEAST_RATE and not keeps(low):
        low, high = low / 2.0, low
    for _ in range(_NUM_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def p90s(given: DataSet, fleet: Fleet, rate: float, num: int) -> tuple[float, float]:
    """Simulate a rate; return the 90th percentiles of first tokens, and of times between them."""
    workload = given.workload(rate, num, is_shared=fleet.is_cached)
    found = simulate(workload, create(fleet.policy), fleet.setup)
    between_s = sorted(turn.tbt_mean_s or 0.0 for turn in found.run.turns)
    return found.summary.ttft_p90_s, percentile(between_s, 0.9)


def limits_s(given: DataSet) -> tuple[float, float]:
    """Take the limits from next to no load: without a cache, on whole instances."""
    idle = p90s(given, FLEETS[0], _LEAST_RATE, _NUM_REQUESTS[0])
    ttft_s, tbt_s = (ratio * s for ratio, s in zip(_SLO_RATIOS, idle, strict=True))
    return ttft_s, tbt_s


def datasets(step: Step) -> str:
    """Simulate figures 11 and 12; lay them out."""
    found = []
    for given in DATA_SETS:
        step(f"{given.name}: limits")
        slos_s = limits_s(given)
        rates = []
        for fleet in FLEETS:
            step(f"{given.name}: {fleet.name}")
            rates.append(best_rate(given, fleet, slos_s))
        found.append((given, rates))
    return datasets_report(found)


def datasets_report(found: Sequence[tuple[DataSet, Sequence[float]]]) -> str:
    """Lay rates out: a row for each data set, ratios to the first fleet's."""
    rows = []
    for given, rates in found:
        first = rates[0]
        cells = [f"{rate:.2f}" + (f", {rate / first - 1:+.0%}" if first else "") for rate in rates]
        rows.append([given.name, given.published, f"{first:.2f}", *cells[1:]])
    return "\n\n".join(
        [
            "**By data set.** Four instances of LLaMA2-70B on eight A800. The highest rate, in "
            "requests a second, within two limits, and its difference to the first column. The "
            "90th percentile of the time to first token is within ten times that of an idle fleet. "
            "The 90th percentile of the mean inter-token latency is within five times that of an "
            "idle fleet.",
            table(
                ["data set", "published, 3P+1D", *(fleet.name for fleet in FLEETS)],
                rows,
            ),
        ]
    )


# -- the report's real trace -------------------------------------------------------------------

_TRACE_FLEETS: Final = (
    ("20 whole, chunks of 8,192", "least_loaded", _whole(20)),
    ("20 whole, `kv_aware`, chunks of 1,024", "kv_aware", _whole(20, max_num_batched_tokens=1_024)),
    ("10P+10D", "kv_aware", _fleet(10, 10)),
)
_SLO_TTFT_S: Final = 30.0
_SLO_TBT_S: Final = 0.1  # of both the source is arXiv 2407.00079, 8.1.3
_PACES: Final = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
_NUM_TRACE_TURNS: Final = 2_000


class Paced(Struct, frozen=True, kw_only=True):
    """One fleet at one pace of the trace: shares of requests within the limits."""

    fleet: str
    pace: float
    ttft_ratio: float
    tbt_ratio: float
    both_ratio: float


def paced(trace: Workload, fleet: str, policy: str, setup: Setup, pace: float) -> Paced:
    """Replay a trace so many times as fast."""
    turns = tuple([replace(turn, arrival_s=turn.arrival_s / pace) for turn in trace.turns])
    found: Simulated = simulate(replace(trace, turns=turns), create(policy), setup)
    in_time = [(turn.ttft_s or 0.0) <= _SLO_TTFT_S for turn in found.run.turns]
    fast = [(turn.tbt_tail_s or 0.0) <= _SLO_TBT_S for turn in found.run.turns]
    both = [one and other for one, other in zip(in_time, fast, strict=True)]
    ratios = [sum(each) / len(each) for each in (in_time, fast, both)]
    return Paced(fleet=fleet, pace=pace, ttft_ratio=ratios[0], tbt_ratio=ratios[1],
                 both_ratio=ratios[2])  # fmt: skip


def trace(path: Path, step: Step) -> str:
    """Simulate figure 13; lay it out."""
    given = read_workload(path, max_requests=_NUM_TRACE_TURNS, timing=Timing(spread_s=3.0))
    found = []
    for fleet, policy, setup in _TRACE_FLEETS:
        for pace in _PACES:
            step(f"trace, {pace:g} times as fast: {fleet}")
            found.append(paced(given, fleet, policy, setup, pace))
    return trace_report(found)


def trace_report(found: Sequence[Paced]) -> str:
    """Lay paces out, a row for each fleet."""
    paces = list(dict.fromkeys(each.pace for each in found))
    rows = []
    for fleet in dict.fromkeys(each.fleet for each in found):
        ours = {each.pace: each for each in found if each.fleet == fleet}
        cells = [
            f"{each.ttft_ratio:.0%}, {each.tbt_ratio:.0%}, {each.both_ratio:.0%}"
            for each in map(ours.__getitem__, paces)
        ]
        rows.append([fleet, *cells])
    return "\n\n".join(
        [
            "**A real trace.** Published: 57 % of vLLM's requests were within the limit of "
            "inter-token latency (0.1 s), and nearly all of Mooncake's. First tokens came within "
            "30 s at both. 75 % more requests could be served. Ours: the first "
            f"{_NUM_TRACE_TURNS:,} of the conversation trace, by pace. In each cell: share of "
            "requests with the first token in time, with the longest tenth of inter-token latency "
            "in time, and both.",
            table(["instances", *(f"{pace:g} times as fast" for pace in paces)], rows),
        ]
    )


def report(
    parts: Sequence[Part], path: Path | None, step: Step, done: Callable[[str], None]
) -> None:
    """Simulate parts, and hand over each one's tables when they are done."""
    for part in parts:
        if part == "scaling":
            done(scaling(step))
        elif part == "datasets":
            done(datasets(step))
        elif path is not None:
            done(trace(path, step))


def num_steps(parts: Sequence[Part]) -> int:
    """Count the calls of `step`."""
    each = {
        "scaling": len(SCALING) + 2,
        "datasets": len(DATA_SETS) * (len(FLEETS) + 1),
        "trace": len(_TRACE_FLEETS) * len(_PACES),
    }
    return sum(each[part] for part in parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, and print the tables; after Ctrl-C those of the parts that are done."""
    asked = argparse.ArgumentParser(
        prog="python -m loadtest.studies.papers", description=(__doc__ or "").split("\n")[0]
    )
    asked.add_argument("--trace", type=Path, help="Mooncake's; without it that part is left out")
    asked.add_argument("--part", action="append", choices=PARTS, help="default: all")
    args = asked.parse_args(argv)
    parts = args.part or [part for part in PARTS if part != "trace" or args.trace is not None]
    if "trace" in parts and (args.trace is None or not args.trace.is_file()):
        asked.error(f"--part trace needs --trace FILE: {args.trace} is no file")
    found: list[str] = []

    def run(progress: Progress) -> None:
        interrupt_on_sigterm()
        task = progress.add_task("", total=num_steps(parts) + 1)

        def step(name: str) -> None:
            progress.update(task, description=name)
            progress.advance(task)

        report(parts, args.trace, step, found.append)

    code = measured(run, Console(stderr=True))
    print("\n\n".join(found))
    return code


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
