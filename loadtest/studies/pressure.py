"""The pressure map: where following the cache pays, against what needs no index.

    python -m loadtest.studies.pressure --out docs

Requests to contexts that do not fit the fleet's caches more or less (working set over all caches)
and are asked for more or less evenly (skew of Zipf's law); and bursts of siblings that share a new
prefix. For each: goodput under the stated limits, mean TTFT, prompt tokens computed per request,
under `kv_aware` and three policies that know no caches. On the bursts also `kv_aware` without owned
speculation: exact knowledge of what is held, none of what is being computed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress

from loadtest.extras import need
from loadtest.generated import Siblings, Zipf
from loadtest.markdown import table
from loadtest.simulator import Setup, Simulated, simulate
from loadtest.studies.pressure_map import Point, draw_map
from loadtest.workload import Workload
from policies import create

POLICIES = ("kv_aware", "prefix_hash", "session_hash", "least_loaded")
NO_SPECULATION = "without speculation"  # kv_aware

RATIOS = (0.25, 1.0, 3.0, 8.0)  # working set over the fleet's caches
SKEWS = (0.0, 1.0, 1.4)
NUM_SIBLINGS = (2, 4, 8, 16)

SETUP = Setup(num_replicas=6, num_blocks=500, load=0.9, slo_ttft_s=2.0, slo_tbt_s=1.0)
BURST_SLO_TTFT_S = 4.0
"""For bursts: alone, computing one of their prompts takes 2 s."""

NUM_REQUESTS = 2_400
SEEDS = (0,)

Advance = Callable[[int], None]


def points(advance: Advance = lambda num: None) -> list[Point]:
    """Simulate the whole map."""
    found = []
    for skew in SKEWS:
        for ratio in RATIOS:
            draws = [zipf(ratio, skew, seed) for seed in SEEDS]
            found += _points(f"skew {skew:g}", ratio, draws, POLICIES, advance)
    for num_siblings in NUM_SIBLINGS:
        draws = [siblings(num_siblings, seed) for seed in SEEDS]
        found += _points("siblings", num_siblings, draws, (*POLICIES, NO_SPECULATION), advance)
    return found


def num_turns() -> int:
    """Count the turns that `points` simulates, about."""
    num_runs = len(SKEWS) * len(RATIOS) * len(POLICIES)
    num_runs += len(NUM_SIBLINGS) * (len(POLICIES) + 1)
    return num_runs * NUM_REQUESTS * len(SEEDS)


def zipf(ratio: float, skew: float, seed: int) -> Workload:
    """Draw requests to contexts that take `ratio` times the fleet's caches."""
    assert SETUP.num_blocks is not None
    return Zipf(
        num_requests=NUM_REQUESTS,
        working_set_blocks=round(ratio * SETUP.num_replicas * SETUP.num_blocks),
        skew=skew,
        seed=seed,
    ).workload()


def siblings(num_siblings: int, seed: int) -> Workload:
    """Draw bursts of so many siblings, as many requests in all."""
    return Siblings(
        num_bursts=NUM_REQUESTS // num_siblings, num_siblings=num_siblings, seed=seed
    ).workload()


def _points(
    family: str, x: float, draws: Sequence[Workload], policies: Sequence[str], advance: Advance
) -> list[Point]:
    found = []
    for name in policies:
        speculates = name != NO_SPECULATION
        policy = create(name if speculates else "kv_aware")
        limit_s = BURST_SLO_TTFT_S if family == "siblings" else SETUP.slo_ttft_s
        setup = replace(SETUP, speculates=speculates, slo_ttft_s=limit_s)
        runs = [
            simulate(draw, policy, replace(setup, seed=seed), advance=advance)
            for seed, draw in enumerate(draws)
        ]
        found.append(_point(family, x, name, runs))
    return found


def _point(family: str, x: float, policy: str, runs: Sequence[Simulated]) -> Point:
    num_turns = sum(len(run.run.turns) for run in runs)
    computed = sum(
        run.num_prompt_tokens - run.num_local_tokens - run.num_pool_tokens for run in runs
    )
    ttft_s = sum(turn.ttft_s or 0.0 for run in runs for turn in run.run.turns)
    return Point(
        family=family,
        x=x,
        policy=policy,
        good_ratio=sum(run.num_good for run in runs) / num_turns,
        ttft_mean_s=ttft_s / num_turns,
        num_computed_tokens=computed / num_turns,
    )


def report(found: Sequence[Point]) -> str:
    """Lay the map out as Markdown: in each cell good share, mean TTFT, computed tokens."""
    parts = [
        f"{SETUP.num_replicas} replicas (`{SETUP.engine}`) of {SETUP.num_blocks} blocks of 512 "
        f"tokens, offered load {SETUP.load:g} without any cache, no pool, {NUM_REQUESTS:,} "
        f"requests, drawn {'once' if len(SEEDS) == 1 else f'{len(SEEDS)} times'}. In each cell: "
        "share of good requests, mean time to first token, and prompt tokens computed per request. "
        f"Good requests have a first token within {SETUP.slo_ttft_s:g} s "
        f"({BURST_SLO_TTFT_S:g} s for bursts). The longest tenth of their inter-token latency is "
        f"within {SETUP.slo_tbt_s:g} s in the mean."
    ]
    for family in dict.fromkeys(point.family for point in found):
        members = [point for point in found if point.family == family]
        xs = list(dict.fromkeys(point.x for point in members))
        is_burst = family == "siblings"
        title = (
            "Bursts of siblings, each 22,200 tokens with 22,000 in common, new with every burst:"
            if is_burst
            else f"Contexts of 8,192 tokens, {family.replace('skew', 'Zipf skew')}:"
        )
        header = ["policy", *(f"{x:g} siblings" if is_burst else f"{x:g}x caches" for x in xs)]
        rows = [
            [f"`{name}`", *(_cell(p) for p in members if p.policy == name)]
            for name in dict.fromkeys(point.policy for point in members)
        ]
        parts += [title, table(header, rows)]
    return "\n\n".join(parts)


def _cell(point: Point) -> str:
    return f"{point.good_ratio:.0%}, {point.ttft_mean_s:.2f} s, {point.num_computed_tokens:,.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate the map, print it, draw it; a few minutes."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.studies.pressure", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, help="directory for pressure.svg")
    parser.add_argument("--json", type=Path, help="write the points there")
    args = parser.parse_args(argv)
    if args.out is not None:
        need("matplotlib")
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=num_turns())
        found = points(lambda num: progress.advance(task, num))
    print(report(found))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    if args.out is not None:
        (args.out / "pressure.svg").write_bytes(draw_map(found))
    return 0


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
