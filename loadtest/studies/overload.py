"""What is refused where halves are overloaded: by Mooncake's three rules, and by our queue.

    python -m loadtest.studies.overload --trace conversation_trace.jsonl --out docs

Source: arXiv 2407.00079, table 3 and figures 9 and 10: 8 prefill and 8 decode instances, 23,000
requests of a trace, replayed twice as fast as it was recorded. That trace is not at hand; ours is
FAST'25's conversation trace. How fast their decode instances were is not said: data-sheet A800s of
the simulator are never near the limit at this pace, so here they are slowed down until the baseline
refuses about as many as theirs did. What the rules do then is not fitted.

The queue has the same limits: a deadline for first tokens, `queue.tbt_ms` between tokens. It knows
what a router does: engines' metrics, every 5 s.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.progress import Progress

from loadtest.emulator.time_model import TimeModel
from loadtest.extras import need
from loadtest.markdown import table
from loadtest.pictures.look import draw
from loadtest.simulator import Halves, PoolSetup, Setup, Simulated, simulate
from loadtest.simulator.published import A800X8_70B, POOL_SPEED
from loadtest.simulator.rejection import LoadSample, Overload
from loadtest.simulator.setup import Rejection
from loadtest.simulator.simulation import TOO_LATE, TOO_SLOW
from loadtest.studies.measured import interrupt_on_sigterm, measured
from loadtest.timing import Timing
from loadtest.traces import read_workload
from loadtest.workload import Workload
from policies import create
from router.scheduling.waiting import QueueRules

RULES: Final[tuple[tuple[str, Rejection | QueueRules, int | None], ...]] = (
    ("baseline", Rejection(rule="after_prefill"), 4183),
    ("early rejection", Rejection(rule="on_arrival"), 3771),
    ("early rejection, prediction", Rejection(rule="predicted"), 3589),
    ("first tokens alone", Rejection(rule="prompts"), None),
    ("our queue", QueueRules(tbt_ms=100.0, max_wait_s=60.0), None),
)
"""Name, rule, and how many of 23,000 it refused there; None: it is no rule of theirs."""

_SLO: Final = Rejection(rule="prompts")  # the limits of all
_LOAD_INTERVAL_S: Final = 5.0  # between readings of engines' metrics, which the queue needs

NUM_PUBLISHED: Final = 23_000


class Case(Struct, frozen=True, kw_only=True):
    """How fast the trace is replayed, and how slow decoding is."""

    pace: float
    slowness: float  # of decoding, over the data sheet's
    longest: int | None = None  # prompt tokens; longer ones are left out. None: all are sent
    draw: int = 0  # of the moments within the 3 s to which the trace rounds arrivals

    @property
    def name(self) -> str:
        prompts = f", prompts up to {self.longest:,}" if self.longest else ""
        slowness = (
            f"{self.slowness:g} times as slow" if self.slowness != 1.0 else "as its data sheet"
        )
        draw = f"; draw {self.draw}" if self.draw else ""
        return f"{self.pace:g} times the pace{prompts}; decoding {slowness}{draw}"


_SHORT: Final = 30_000
"""Leaves 8,500 tokens in the mean, as the paper's trace has (7,590); ours has 12,035."""

CASES: Final = (
    *(Case(pace=2.0, slowness=4.6, draw=draw) for draw in range(4)),
    Case(pace=1.5, slowness=5.2),
    Case(pace=3.0, slowness=4.7, longest=_SHORT),
    Case(pace=2.0, slowness=1.0),
)
"""The first one is drawn, and its figures are given in full."""

NUM_EACH: Final = 8
NUM_TURNS: Final = 12_031  # the whole trace
_BIN_S: Final = 5.0
_DRAWN_S: Final = 900.0


class OverloadRun(Struct, frozen=True, kw_only=True):
    """One rule at one pace."""

    rule: str
    case: Case
    num_turns: int
    num_late_prompts: int  # refused before it was sent: prompts were computed too late
    num_slow_answers: int  # refused before it was sent: the answer would be too slow
    num_wasted: int  # refused after their prompt was computed
    num_wasted_tokens: int
    num_answered_tokens: int  # prompts' of those that were answered
    num_good: int  # answered, both times within their limits in the mean
    samples: tuple[LoadSample, ...]
    load_error: tuple[float, float] | None = None
    """Of `Overload.load_errors` mean and standard deviation; None: none is let in by that load."""

    @property
    def num_refused(self) -> int:
        return self.num_late_prompts + self.num_slow_answers + self.num_wasted


def slowed(slowness: float) -> TimeModel:
    """Make the papers' engine, with decoding so many times as slow as its data sheet says."""
    return replace(
        A800X8_70B,
        base_ms=slowness * A800X8_70B.base_ms,
        ms_per_decode=slowness * 0.05,
        ms_per_mtoken_context=slowness * 25.6,  # 327,680 bytes of KV a token over eight A800
    )


def setup_of(rule: Rejection | QueueRules, slowness: float) -> Setup:
    """Describe the fleet: halves, a pool between prefill instances, KV from peer to peer."""
    has_queue = isinstance(rule, QueueRules)
    return Setup(
        num_replicas=0,
        halves=Halves(num_prefill=NUM_EACH, num_decode=NUM_EACH, by_peers=True, always_apart=True),
        pool=PoolSetup(speed=POOL_SPEED),
        time_model=slowed(slowness),
        load=None,
        load_interval_s=_LOAD_INTERVAL_S if has_queue else math.inf,
        rejection=None if isinstance(rule, QueueRules) else rule,
        queue=rule if isinstance(rule, QueueRules) else None,
    )


def run(
    workload: Workload,
    rule: tuple[str, Rejection | QueueRules],
    case: Case,
    *,
    advance: Callable[[int], None] = lambda num: None,
) -> OverloadRun:
    """Replay a trace so many times as fast under one rule."""
    name, rejection = rule
    turns = tuple(
        [
            replace(turn, arrival_s=turn.arrival_s / case.pace, deadline_s=_SLO.slo_ttft_s)
            for turn in workload.turns
            if case.longest is None or turn.num_input_tokens <= case.longest
        ]
    )
    setup = setup_of(rejection, case.slowness)
    of_these = replace(workload, turns=turns)
    found = simulate(of_these, create("mooncake"), setup, label=name, advance=advance)
    overload = found.overload or _of_queue(found)
    errors = overload.load_errors
    good = [
        turn.ttft_s is not None
        and turn.ttft_s <= _SLO.slo_ttft_s
        and (turn.tbt_mean_s or 0.0) <= _SLO.slo_tbt_s
        for turn in found.run.turns
    ]
    return OverloadRun(
        rule=name,
        case=case,
        num_turns=len(turns),
        num_late_prompts=overload.num_late_prompts,
        num_slow_answers=overload.num_slow_answers,
        num_wasted=overload.num_wasted,
        num_wasted_tokens=overload.num_wasted_tokens,
        num_answered_tokens=found.num_prompt_tokens,
        num_good=sum(good),
        samples=overload.samples,
        load_error=(fmean(errors), pstdev(errors)) if errors else None,
    )


def _of_queue(found: Simulated) -> Overload:
    """Count what a queue has refused."""
    why = Counter(turn.error_message for turn in found.run.turns)
    return Overload(
        num_late_prompts=why[TOO_LATE],
        num_slow_answers=why[TOO_SLOW],
        num_wasted=0,
        num_wasted_tokens=0,
        samples=(),
    )


def correlation(samples: Sequence[LoadSample]) -> float:
    """Return how prefill load and decode load go together: -1 to 1; 0.0 where one is constant."""
    means = binned(samples)
    if len(means) < 2 or not means[:, 1].std() or not means[:, 2].std():
        return 0.0
    return float(np.corrcoef(means[:, 1], means[:, 2])[0, 1])


def binned(samples: Sequence[LoadSample]) -> Any:
    """Take the mean of each `_BIN_S`, shape (bins, 3): time, prefill load, decode load."""
    bins: dict[int, list[LoadSample]] = {}
    for each in samples:
        bins.setdefault(int(each.at_s / _BIN_S), []).append(each)
    return np.array(
        [
            (number * _BIN_S, fmean(s.prefill for s in of), fmean(s.decode for s in of))
            for number, of in sorted(bins.items())
        ]
    ).reshape(-1, 3)


def report(runs: Sequence[OverloadRun]) -> str:
    """Lay runs out: how many were refused, side by side with the paper; then the main case."""
    published = {name: num for name, _, num in RULES}
    base = published["baseline"] or 1
    cells = [f"{n / NUM_PUBLISHED:.1%}, {n / base:.2f}" if n else "" for n in published.values()]
    rows = [["published, 8P+8D at twice the pace", *cells]]
    for case in dict.fromkeys(each.case for each in runs):
        ours = {each.rule: each for each in runs if each.case == case}
        first = ours.get("baseline")
        cells = [_refused(ours[name], first) if name in ours else "" for name in published]
        rows.append([f"ours, {case.name}", *cells])
    parts = [
        "**Refused**, as a share of all requests, and over the baseline's; ours also those "
        f"answered within both limits. Ours: {runs[0].num_turns:,} requests.",
        table(["", *published], rows),
    ]
    main = [each for each in runs if each.case == runs[0].case]
    header = (
        "rule", "prompt too late", "answer too slow", "after prefill", "tokens in vain",
        "tokens answered", "within both limits", "prefill load", "decode load", "correlation",
        "load misjudged",
    )  # fmt: skip
    parts += [
        f"**Where and how**, {main[0].case.name}. Requests are refused before they are sent, or "
        "after their prompt was computed. Tokens are the prompt tokens of these, and of all "
        "answered requests. Loads are means with their standard deviation; the correlation is that "
        f"of both halves, over means of {_BIN_S:g} s. Misjudged is the decode load when a prompt "
        "was computed, minus the load by which it was admitted.",
        table(header, [_row(each) for each in main]),
    ]
    return "\n\n".join(parts)


def default_report(trace: Path) -> str:
    """Simulate as the command does, and lay the runs out; twenty minutes."""
    workloads = read(trace, NUM_TURNS)
    runs = [
        run(workloads[case.draw], (name, rule), case)
        for case, (name, rule, _) in product(CASES, RULES)
    ]
    return report(runs)


def read(trace: Path, num: int) -> dict[int, Workload]:
    """Read a trace's first requests, spread over the 3 s it rounds to, for each draw of a case.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    return {
        draw: read_workload(trace, max_requests=num, timing=Timing(spread_s=3.0, seed=draw))
        for draw in {case.draw for case in CASES}
    }


def _refused(each: OverloadRun, first: OverloadRun | None) -> str:
    ratio = f", {each.num_refused / first.num_refused:.2f}" if first and first.num_refused else ""
    good = each.num_good / each.num_turns
    return f"{each.num_refused / each.num_turns:.1%}{ratio}; {good:.1%}"


def _row(each: OverloadRun) -> tuple[str, ...]:
    means = binned(each.samples)
    loads = ["", ""]
    if len(means):
        loads = [f"{fmean(means[:, n]):.2f} ± {pstdev(means[:, n]):.2f}" for n in (1, 2)]
    return (
        each.rule,
        f"{each.num_late_prompts:,}",
        f"{each.num_slow_answers:,}",
        f"{each.num_wasted:,}",
        f"{each.num_wasted_tokens / 1e6:.1f}M",
        f"{each.num_answered_tokens / 1e6:.1f}M",
        f"{each.num_good:,}",
        *loads,
        f"{correlation(each.samples):+.2f}" if each.samples else "",
        f"{each.load_error[0]:+.2f} ± {each.load_error[1]:.2f}" if each.load_error else "",
    )


def draw_loads(runs: Sequence[OverloadRun], *, kind: str = "svg") -> bytes:
    """Draw the load of both halves over time, a panel for each rule."""

    def paint(figure: Any) -> None:
        panels = figure.subplots(len(runs), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
        for axis, each in zip(panels, runs, strict=True):
            means = binned(each.samples)
            shown = means[means[:, 0] <= _DRAWN_S]
            axis.plot(shown[:, 0] / 60, shown[:, 1], color="#0072B2", lw=1.4, label="prefill")
            axis.plot(shown[:, 0] / 60, shown[:, 2], color="#E69F00", lw=1.4, label="decode")
            axis.set_title(f"{each.rule}: {each.num_refused / each.num_turns:.1%} refused")
            axis.set_ylabel("load")
            axis.set_ylim(0.0, 1.2)
        panels[0].legend(loc="upper right", ncols=2)
        panels[-1].set_xlabel("minutes")

    return draw(paint, width=10.0, height=2.2 * len(runs) + 0.4, kind=kind)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print the tables, draw the picture; after Ctrl-C those of what is done."""
    asked = argparse.ArgumentParser(
        prog="python -m loadtest.studies.overload", description=(__doc__ or "").split("\n")[0]
    )
    asked.add_argument("--trace", type=Path, required=True, help="Mooncake's conversation trace")
    asked.add_argument("--requests", type=int, default=NUM_TURNS, help="its first ones")
    asked.add_argument("--json", type=Path, help="write the runs there, each when it is done")
    asked.add_argument("--read", type=Path, metavar="FILE", help="the runs of --json instead")
    asked.add_argument("--out", type=Path, help="directory for overload.svg")
    args = asked.parse_args(argv)
    if args.out is not None:
        need("matplotlib")
    if args.requests < 1:
        asked.error(f"--requests {args.requests}: must be at least 1")
    runs: list[OverloadRun] = []
    try:
        workloads = read(args.trace, args.requests)
        if args.read is not None:
            runs = msgspec.json.decode(args.read.read_bytes(), type=list[OverloadRun])
    except (OSError, ValueError) as exc:
        asked.error(str(exc))

    def measure(progress: Progress) -> None:
        interrupt_on_sigterm()
        num_turns = sum(len(workloads[case.draw].turns) for case in CASES)
        task = progress.add_task("", total=len(RULES) * num_turns)
        for case, (name, rule, _) in product(CASES, RULES):
            progress.update(task, description=f"{case.pace:g} times the pace: {name}")
            found = run(
                workloads[case.draw], (name, rule), case,
                advance=lambda num: progress.advance(task, num),
            )  # fmt: skip
            runs.append(found)
            if args.json is not None:
                args.json.write_bytes(msgspec.json.encode(runs) + b"\n")

    code = 0 if runs else measured(measure, Console(stderr=True))
    if runs:
        print(report(runs))
        if args.out is not None:
            theirs = [name for name, _, num in RULES if num is not None]
            drawn = [each for each in runs if each.case == runs[0].case and each.rule in theirs]
            (args.out / "overload.svg").write_bytes(draw_loads(drawn))
    return code


if __name__ == "__main__":  # pragma: no cover
    raise SystemExit(main())
