"""How many replicas should compute prompts, and how many answers: goodput by their ratio.

    python -m loadtest.studies.ratios --trace conversation_trace.jsonl

Sixteen replicas: all of them for whole requests, with large and with small chunks of a prompt in a
step, or some for prompts and the others for answers. Simulated, with `kv_aware` placing prompts and
the live router's rule answers. The limits are those of FAST'25 Mooncake, 5.1: a first token within
30 s; the mean of the longest tenth of the times between tokens within 100 or 200 ms.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress

from loadtest.generated import Agents
from loadtest.markdown import table
from loadtest.results import TurnResult
from loadtest.simulator import Halves, PoolSetup, Setup, Simulated, simulate
from loadtest.timing import Timing
from loadtest.traces import read_workload
from loadtest.workload import Workload
from policies import create

NUM_REPLICAS: Final = 16
SPEED: Final = 20.0  # of reads, from the pool or from replica to replica
SLO_TTFT_S: Final = 30.0
SLO_TBTS_S: Final = (0.1, 0.2)
LOADS: Final = (0.6, 0.9, 1.2)  # of the trace
SESSIONS: Final = (30, 120)  # of agents, alive at once
NUM_TURNS: Final = 2_000  # of the trace
NUM_BLOCKS: Final = 1_000  # 512k tokens: what four H100 hold beside a 70B model
SMALL_CHUNK: Final = 1024

FLEETS: Final[tuple[tuple[str, Setup], ...]] = (
    ("whole, chunks of 8,192", Setup(num_replicas=NUM_REPLICAS)),
    (
        f"whole, chunks of {SMALL_CHUNK:,}",
        Setup(num_replicas=NUM_REPLICAS, max_num_batched_tokens=SMALL_CHUNK),
    ),
    *(
        (
            f"{num}:{NUM_REPLICAS - num}",
            Setup(
                num_replicas=0,
                halves=Halves(num_prefill=num, num_decode=NUM_REPLICAS - num, speed=SPEED),
            ),
        )
        for num in (4, 6, 8, 10, 12, 14)
    ),
)
"""Label, prefill:decode where they are apart; and the replicas."""

Advance = Callable[[int], None]


class Case(Struct, frozen=True, kw_only=True):
    """What is asked; and how fast, by what changes of a setup."""

    name: str
    workload: Workload
    paces: tuple[tuple[str, dict[str, Any]], ...]


class Cell(Struct, frozen=True, kw_only=True):
    """One fleet under one load."""

    case: str
    has_pool: bool
    fleet: str
    pace: str
    goodput: tuple[float, ...]  # turns a second within the limits, for each of `SLO_TBTS_S`
    ttft_mean_s: float
    ttft_p90_s: float
    tbt_tail_p90_s: float
    apart_ratio: float
    prefill_busy_ratio: float
    decode_busy_ratio: float


def trace_case(trace: Path) -> Case:
    """Read the beginning of Mooncake's conversation trace, spread over the 3 s it rounds to."""
    return Case(
        name="conversation, open loop",
        workload=read_workload(trace, max_requests=NUM_TURNS, timing=Timing(spread_s=3.0)),
        paces=tuple([(f"load {load:g}", {"load": load}) for load in LOADS]),
    )


def agents_case() -> Case:
    """Draw agents of some 12 turns, so many alive at once."""
    return Case(
        name="agents, closed loop",
        workload=Agents(num_sessions=max(SESSIONS), num_turns=12, rate=math.inf, seed=1).workload(),
        paces=tuple(
            [
                (f"{num} sessions", {"loop": "closed", "concurrency": num, "load": None})
                for num in SESSIONS
            ]
        ),
    )


def cells(cases: Sequence[Case], advance: Advance = lambda num: None) -> list[Cell]:
    """Simulate every fleet at every pace of every case, without and with a pool."""
    found = []
    for case in cases:
        for pool in (None, PoolSetup(speed=SPEED)):
            for fleet, setup in FLEETS:
                for pace, changes in case.paces:
                    asked = replace(setup, num_blocks=NUM_BLOCKS, pool=pool, **changes)
                    got = simulate(case.workload, create("kv_aware"), asked, advance=advance)
                    found.append(_cell(case.name, fleet, pace, got))
    return found


def num_turns(cases: Sequence[Case]) -> int:
    """Count the turns that `cells` simulates."""
    return sum(2 * len(FLEETS) * len(case.paces) * len(case.workload.turns) for case in cases)


def _cell(case: str, fleet: str, pace: str, found: Simulated) -> Cell:
    summary = found.summary
    return Cell(
        case=case,
        has_pool=found.setup.pool is not None,
        fleet=fleet,
        pace=pace,
        goodput=tuple([_goodput(found, slo_s) for slo_s in SLO_TBTS_S]),
        ttft_mean_s=summary.ttft_mean_s,
        ttft_p90_s=summary.ttft_p90_s,
        tbt_tail_p90_s=found.tbt_tail_p90_s,
        apart_ratio=found.apart_ratio,
        prefill_busy_ratio=found.busy_ratio,
        decode_busy_ratio=found.decode_busy_ratio,
    )


def _goodput(found: Simulated, slo_tbt_s: float) -> float:
    num_good = sum([_is_good(turn, slo_tbt_s) for turn in found.run.turns])
    return num_good / found.span_s if found.span_s else 0.0


def _is_good(turn: TurnResult, slo_tbt_s: float) -> bool:
    if turn.ttft_s is None or turn.ttft_s > SLO_TTFT_S:
        return False
    return turn.tbt_tail_s is None or turn.tbt_tail_s <= slo_tbt_s


def report(found: Sequence[Cell]) -> str:
    """Lay the cells out as Markdown: a table for each workload, without and with a pool."""
    limits = " or ".join(f"{1000 * slo_s:g}" for slo_s in SLO_TBTS_S)
    parts = [
        f"{NUM_REPLICAS} replicas (`{Setup().engine}`) of {NUM_BLOCKS:,} blocks of 512 "
        f"tokens; a read, from the pool or from replica to replica, is {SPEED:g} times "
        f"faster than prefilling. In each cell: good turns a second, mean time to first token, "
        "and 90th percentile of the longest tenth of inter-token latency. Good turns have "
        f"{limits} ms between tokens and {SLO_TTFT_S:g} s to the first. Bold: most good turns at "
        "that pace and limit, and all within 1 % of them."
    ]
    for case in dict.fromkeys(cell.case for cell in found):
        for has_pool in (False, True):
            members = [c for c in found if (c.case, c.has_pool) == (case, has_pool)]
            if members:
                parts += [f"`{case}`, {'a pool' if has_pool else 'no pool'}:", _table(members)]
    return "\n\n".join(parts)


def _table(members: Sequence[Cell]) -> str:
    paces = list(dict.fromkeys(cell.pace for cell in members))
    best = {
        pace: [max(c.goodput[n] for c in members if c.pace == pace) for n in range(len(SLO_TBTS_S))]
        for pace in paces
    }
    rows = [
        [fleet, *(_text(c, best[c.pace]) for c in members if c.fleet == fleet)]
        for fleet in dict.fromkeys(cell.fleet for cell in members)
    ]
    return table(["prefill:decode", *paces], rows)


def _text(cell: Cell, best: Sequence[float]) -> str:
    good = ", ".join(
        f"**{value:.2f}**" if value >= 0.99 * most else f"{value:.2f}"
        for value, most in zip(cell.goodput, best, strict=True)
    )
    return f"{good}; {cell.ttft_mean_s:.1f} s; {1000 * cell.tbt_tail_p90_s:,.0f} ms"


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print the tables; minutes."""
    asked = argparse.ArgumentParser(
        prog="python -m loadtest.studies.ratios", description=(__doc__ or "").split("\n")[0]
    )
    asked.add_argument("--trace", type=Path, help="Mooncake's; default: agents only")
    asked.add_argument("--json", type=Path, help="write the cells there")
    args = asked.parse_args(argv)
    try:
        cases = [] if args.trace is None else [trace_case(args.trace)]
    except (OSError, ValueError) as exc:
        asked.error(str(exc))
    cases.append(agents_case())
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=num_turns(cases))
        found = cells(cases, lambda num: progress.advance(task, num))
    print(report(found))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return 0


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
