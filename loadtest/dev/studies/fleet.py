"""Measure what a request costs with several routers: the router asked, each other one, and Redis.

    python -m loadtest.dev.studies.fleet --routers 1 2 4 8 16 --out docs/images/fleet.svg

All requests go to the first router, as in `loadtest.dev.bench.bench_foreign`. Two emulated replicas
stand for many: what a request costs does not depend on their number. The table is on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest.dev.bench.bench_foreign import LARGE, RATE, SMALL, Cost, measure
from loadtest.pictures.look import draw, readable_ticks

_COLUMNS = (
    "routers",
    "router asked, ms",
    "each other router, ms",
    "Redis, ms",
    "requests",
)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of load, for each row")
    parser.add_argument("--full", action="store_true", help="caches that are full and evict")
    parser.add_argument("--commands", action="store_true", help="show the commands Redis ran")
    parser.add_argument("--during", default="", help="shell command while requests come")
    parser.add_argument("--out", type=Path, help="file for the picture, .svg")
    return parser


def main() -> None:
    """Measure each number of routers; print a row for each as it is known."""
    options = parser().parse_args()
    print(f"| {' | '.join(_COLUMNS)} |\n|{' --- |' * len(_COLUMNS)}", flush=True)
    costs: dict[int, Cost] = {}
    for num_routers in options.routers:
        with tempfile.TemporaryDirectory(prefix="warmroute-fleet-") as folder:
            costs[num_routers] = cost = asyncio.run(
                measure(
                    Path(folder),
                    num_routers=num_routers,
                    num_blocks=SMALL if options.full else LARGE,
                    rate=options.rate,
                    seconds=options.seconds,
                    during=options.during,
                )
            )
        other = f"{cost.other_ms:.3f}" if num_routers > 1 else "-"
        row = (num_routers, f"{cost.own_ms:.2f}", other, f"{cost.redis_ms:.3f}", cost.num_requests)
        print(f"| {' | '.join(map(str, row))} |", flush=True)
        for name, (calls, ms) in sorted(cost.commands.items(), key=lambda each: -each[1][1])[:6]:
            if options.commands:
                print(f"    {name:10} {calls:6.2f} calls, {ms:.4f} ms a request", flush=True)
    if options.out is not None:
        options.out.write_bytes(_picture(costs))


def _picture(costs: Mapping[int, Cost]) -> bytes:
    numbers = sorted(costs)
    several = [number for number in numbers if number > 1]

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        axis.plot(several, [costs[n].other_ms for n in several], "o-", label="each other router")
        axis.plot(numbers, [costs[n].redis_ms for n in numbers], "s--", label="Redis")
        axis.set_xscale("log")
        axis.set_ylim(bottom=0.0)
        axis.set_xlabel("routers")
        axis.set_ylabel("CPU a request, ms")
        readable_ticks(axis)
        axis.legend()

    return draw(paint, width=7.0, height=3.5)


if __name__ == "__main__":
    main()
