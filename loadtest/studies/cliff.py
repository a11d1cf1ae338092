"""The cliff: what a fleet gets done against how many agent sessions are alive at once.

    python -m loadtest.studies.cliff                             8 replicas, simulated; minutes
    python -m loadtest.studies.cliff --replicas 64 --sessions 384 768 --arms kv_aware
    python -m loadtest.studies.cliff --read FILE... --out docs   tables and picture of earlier runs
    python -m loadtest.studies.cliff --real                      two real engines; half an hour

When the contexts of all sessions outgrow the caches, each turn throws out what the next one needs.
Sessions as those of the grid on real engines, engines as they were fitted there, in a closed loop:
so many are alive at once, and each that is over is followed by another. Goodput is turns a second
with a first token in time (`cliff_run`): a turn is what an agent waits for, and a session of which
some turns were late is still of use.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import Progress

from loadtest.compare.arms import arm_of
from loadtest.extras import need
from loadtest.markdown import table
from loadtest.studies import pair
from loadtest.studies.cells import (
    BLOCK_SIZE,
    NUM_ENGINES,
    NUM_USABLE_BLOCKS,
    PREFILLS,
    THINKS,
)
from loadtest.studies.cliff_map import Point, draw_cliff, draw_goodput
from loadtest.studies.cliff_run import SETTING, CliffRun, Setting, run, run_real
from loadtest.studies.grid_run import DEFAULT, ENGINES, WITHOUT_QUEUE
from loadtest.studies.measured import add_arms, interrupt_on_sigterm, measured

NUM_REPLICAS: Final = 8
ARMS: Final = ("session_hash", WITHOUT_QUEUE, DEFAULT)
SESSIONS: Final = (32, 40, 48, 56, 64, 80, 96, 112)  # with 8 replicas; with more, more
REAL_SESSIONS: Final = (8, 10, 12, 14, 16, 20, 24, 28)
SEEDS: Final = (101, 102, 103, 104)  # nothing is tuned on those from 100 on

Measure = Callable[[int, str, int], CliffRun]
"""Makes one point, of a number of sessions, an arm and a seed."""
Found = Callable[[CliffRun], None]


@contextmanager
def on_engines(setting: Setting) -> Iterator[Measure]:
    """Measure on two real engines, which run as long as the context lasts.

    Raises:
        ChildDied, FileNotFoundError, RuntimeError, TimeoutError: a process did not start; in the
            context also where every turn of a run failed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="cliff-") as folder,
        pair.running(Path(folder), has_pool=False, prefill=setting.prefill) as engines,
    ):
        yield lambda num_sessions, arm, seed: asyncio.run(
            run_real(engines, num_sessions, arm, seed, setting)
        )


def run_all(
    measure: Measure,
    sessions: Sequence[int],
    arms: Sequence[str],
    seeds: Sequence[int],
    *,
    found: Found,
    started: Callable[[str], None] = lambda name: None,
) -> None:
    """Run every arm with every number of sessions and every seed; who goes first alternates."""
    for round_, seed in enumerate(seeds):
        ordered = arms if round_ % 2 == 0 else arms[::-1]
        for num_sessions, arm in product(sessions, ordered):
            started(f"{num_sessions} sessions: {arm}")
            found(measure(num_sessions, arm, seed))


def points_of(runs: Sequence[CliffRun]) -> list[Point]:
    """Take the mean of all seeds, number of sessions by number of sessions."""
    places = sorted({run.num_sessions for run in runs})
    arms = dict.fromkeys(run.arm for run in runs)
    found = []
    for arm, num_sessions in product(arms, places):
        ours = [r for r in runs if r.arm == arm and r.num_sessions == num_sessions]
        if ours:
            found.append(_point(ours))
    return found


def twice_the_peak(points: Sequence[Point], arm: str) -> tuple[Point, Point] | None:
    """Find an arm's peak of goodput, and its point at twice so many sessions or the next above.

    None: there is no such point.
    """
    ours = sorted((p for p in points if p.arm == arm), key=lambda point: point.num_sessions)
    peak = max(ours, key=lambda point: point.goodput)
    beyond = [point for point in ours if point.num_sessions >= 2 * peak.num_sessions]
    return (peak, beyond[0]) if beyond else None


def report(runs: Sequence[CliffRun]) -> str:
    """Lay runs of one fleet out as Markdown: every point, then what twice the peak leaves."""
    points = points_of(runs)
    first, setting = runs[0], runs[0].setting
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    kind = "real engines" if first.is_real else "replicas"
    fleet = f"{kind} (`{ENGINES[setting.prefill]}`)"
    caption = (
        f"{first.num_replicas} {fleet} of {NUM_USABLE_BLOCKS:,} blocks of {BLOCK_SIZE}, "
        f"{setting.think} think; seeds {seeds}. Goodput: turns a second with a first token within "
        f"{setting.slo_ttft_s:g} s. Uncached: tokens computed per turn. Times in seconds."
    )
    header = (
        "sessions", "arm", "goodput", "turns/s", "uncached", "TTFT mean", "P90", "P99",
        "longest wait", "session done in",
    )  # fmt: skip
    rows = [
        (
            f"{p.num_sessions}", _name(p), f"{p.goodput:.1f}", f"{p.throughput:.1f}",
            f"{p.num_uncached_tokens:,.0f}", f"{p.ttft_mean_s:.2f}", f"{p.ttft_p90_s:.2f}",
            f"{p.ttft_p99_s:.2f}", f"{p.longest_wait_s:.1f}", f"{p.completion_mean_s:.1f}",
        )
        for p in sorted(points, key=lambda point: point.num_sessions)
    ]  # fmt: skip
    return "\n\n".join([caption, table(header, rows), _peaks(points)]).strip()


def default_report() -> str:
    """Simulate 8 replicas as the command does, and lay the runs out; minutes."""
    runs: list[CliffRun] = []
    run_all(partial(run, NUM_REPLICAS), SESSIONS, ARMS, SEEDS, found=runs.append)
    return report(runs)


def _name(point: Point) -> str:
    failed = f" ({point.num_errors} failed)" if point.num_errors else ""
    return f"`{point.arm}`{failed}"


def _peaks(points: Sequence[Point]) -> str:
    rows = []
    for arm in dict.fromkeys(point.arm for point in points):
        pair = twice_the_peak(points, arm)
        if pair is not None:
            peak, beyond = pair
            rows.append(
                (
                    f"`{arm}`", f"{peak.goodput:.1f} at {peak.num_sessions}",
                    f"{beyond.goodput:.1f} at {beyond.num_sessions}",
                    f"{beyond.goodput / peak.goodput:.0%}" if peak.goodput else "",
                )
            )  # fmt: skip
    return table(("arm", "peak", "at twice the sessions", "of the peak"), rows) if rows else ""


def _point(runs: Sequence[CliffRun]) -> Point:
    def mean(value: Callable[[CliffRun], float]) -> float:
        return fmean(map(value, runs))

    return Point(
        num_sessions=runs[0].num_sessions,
        arm=runs[0].arm,
        goodput=mean(lambda run: run.goodput),
        throughput=mean(lambda run: run.throughput),
        num_uncached_tokens=mean(lambda run: run.num_uncached_tokens / max(1, run.num_turns)),
        ttft_mean_s=mean(lambda run: run.ttft_mean_s),
        ttft_p90_s=mean(lambda run: run.ttft_p90_s),
        ttft_p99_s=mean(lambda run: run.ttft_p99_s),
        longest_wait_s=max(run.longest_wait_s for run in runs),
        completion_mean_s=mean(lambda run: run.completion_mean_s),
        num_errors=sum(run.num_errors for run in runs),
    )


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    made = argparse.ArgumentParser(
        prog="python -m loadtest.studies.cliff", description=(__doc__ or "").split("\n")[0]
    )
    made.add_argument("--replicas", type=int, help=f"default {NUM_REPLICAS}; real: {NUM_ENGINES}")
    made.add_argument("--sessions", nargs="+", type=int, help="alive at once; default by replicas")
    add_arms(made, ARMS)
    made.add_argument("--think", choices=THINKS, default="short")
    made.add_argument(
        "--prefill", choices=PREFILLS, default=SETTING.prefill,
        help="slow: a computed token costs about five times as much",
    )  # fmt: skip
    made.add_argument(
        "--slo-ttft", type=float, default=SETTING.slo_ttft_s, metavar="SECONDS",
        help="how late a first token may be",
    )  # fmt: skip
    made.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    where = made.add_mutually_exclusive_group()
    where.add_argument("--real", action="store_true", help="two real engines, not simulated ones")
    where.add_argument(
        "--read", nargs="+", type=Path, metavar="FILE", help="runs of --json instead"
    )
    made.add_argument("--json", type=Path, help="write every run there")
    made.add_argument("--out", type=Path, help="directory for cliff.svg and goodput.svg")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run all points, print the tables, draw the picture; after Ctrl-C those of what is done."""
    asked = parser()
    args = asked.parse_args(argv)
    if args.out is not None:
        need("matplotlib")
    default = NUM_ENGINES if args.real else NUM_REPLICAS
    num_replicas = default if args.replicas is None else args.replicas
    for name, values in (("--replicas", [num_replicas]), ("--sessions", args.sessions or [1])):
        if min(values) < 1:
            asked.error(f"{name} {min(values)}: must be at least 1")
    if args.real and num_replicas != NUM_ENGINES:
        asked.error(f"--replicas {num_replicas}: there are {NUM_ENGINES} real engines")
    if not args.slo_ttft > 0.0:
        asked.error(f"--slo-ttft {args.slo_ttft:g}: must be above 0")
    try:
        for arm in args.arms:
            arm_of(arm)
        runs = [run for path in args.read or () for run in _read(path)]
    except (OSError, ValueError) as exc:
        asked.error(str(exc))
    if len({(run.num_replicas, run.setting, run.is_real) for run in runs}) > 1:
        asked.error("runs of several fleets: give those of one alone")

    by_replicas = [num * num_replicas // NUM_REPLICAS for num in SESSIONS]
    sessions = args.sessions or (REAL_SESSIONS if args.real else by_replicas)
    setting = Setting(think=args.think, prefill=args.prefill, slo_ttft_s=args.slo_ttft)

    def measure_all(progress: Progress) -> None:
        total = len(sessions) * len(args.arms) * len(args.seeds)
        task = progress.add_task("engines start" if args.real else "simulating", total=total)

        def done(run: CliffRun) -> None:
            runs.append(run)
            if args.json is not None:
                args.json.write_bytes(msgspec.json.encode(runs) + b"\n")
            progress.advance(task)

        def started(name: str) -> None:
            progress.update(task, description=name)

        simulated: Measure = partial(run, num_replicas, setting=setting)
        with on_engines(setting) if args.real else nullcontext(simulated) as measure:
            run_all(measure, sessions, args.arms, args.seeds, found=done, started=started)

    code = 0
    if args.read is None:
        if args.real:
            interrupt_on_sigterm()
        code = measured(measure_all, Console(stderr=True))
    if runs:
        print(report(runs))
        if args.out is not None:
            points, slo_s = points_of(runs), runs[0].setting.slo_ttft_s
            (args.out / "cliff.svg").write_bytes(draw_cliff(points, slo_ttft_s=slo_s))
            (args.out / "goodput.svg").write_bytes(draw_goodput(points, slo_ttft_s=slo_s))
    return code


def _read(path: Path) -> list[CliffRun]:
    """Read the runs of an earlier command.

    Raises:
        OSError, ValueError: the file cannot be read, or holds none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[CliffRun])
    except msgspec.DecodeError as exc:
        raise ValueError(f"{path}: {exc}") from exc


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
