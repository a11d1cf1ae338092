"""Runs of the grid as Markdown: per cell and variant, and real beside simulated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import fmean
from typing import Final, Literal

from msgspec import Struct

from loadtest.dev.studies.cells import Cell
from loadtest.dev.studies.grid_run import GridRun
from loadtest.markdown import table

BASELINE: Final = "session_hash"
NEAR: Final = 0.1
"""How far a simulation may be from the real run."""

_HEADER: Final = (
    "variant", "computed", "over baseline", "TTFT mean, s", "over baseline", "P99, s",
    "longest wait, s", "session mean, s", "over baseline", "longest, s", "exact", "moved",
    "router p99, ms",
)  # fmt: skip


def report(runs: Sequence[GridRun], baseline: str = BASELINE) -> str:
    """Lay runs out, one table for each cell, and one for all cells."""
    parts = []
    by_cell = {cell: [run for run in runs if run.cell == cell] for cell in _cells(runs)}
    for cell, of_cell in by_cell.items():
        parts += [f"### {cell.name}", _cell_table(of_cell, baseline)]
    if len(by_cell) > 1:
        parts += ["### In sum", sum_table(runs, baseline)]
    return "\n\n".join(parts)


def comparison(real: Sequence[GridRun], simulated: Sequence[GridRun]) -> str:
    """Compare computed tokens and times of real runs with their simulations."""
    rows, errors = [], []
    for cell in _cells(real):
        for arm in _arms(real):
            keys = {(run.cell, run.arm, run.seed) for run in simulated}
            ours = [r for r in real if r.cell == cell and r.arm == arm]
            ours = [r for r in ours if (r.cell, r.arm, r.seed) in keys]
            seeds = {run.seed for run in ours}
            theirs = [r for r in simulated if r.cell == cell and r.arm == arm and r.seed in seeds]
            if not ours or not theirs:
                continue
            tokens = _mean(ours, _computed), _mean(theirs, _computed)
            times = _mean(ours, _ttft), _mean(theirs, _ttft)
            errors.append(abs(tokens[1] / tokens[0] - 1.0))
            rows.append(
                [
                    cell.name,
                    f"`{arm}`",
                    f"{tokens[0]:,.0f}",
                    f"{tokens[1]:,.0f}",
                    f"{tokens[1] / tokens[0]:.2f}",
                    f"{times[0]:.2f}",
                    f"{times[1]:.2f}",
                    f"{times[1] / times[0]:.2f}",
                ]
            )
    header = [
        "cell", "variant", "computed: real", "simulated", "ratio", "TTFT mean, s: real",
        "simulated", "ratio",
    ]  # fmt: skip
    num_near = sum(error <= NEAR for error in errors)
    return (
        f"{table(header, rows)}\n\nComputed tokens are within {NEAR:.0%} in {num_near} of "
        f"{len(rows)} rows, {max(errors, default=0.0):.0%} off at worst."
    )


def ratios(
    runs: Sequence[GridRun], baseline: str, value: Callable[[GridRun], float], arm: str
) -> list[float]:
    """Divide a variant's values by the baseline's, seed by seed, cell by cell."""
    base: dict[tuple[Cell, int], list[float]] = {}
    for run in runs:
        if run.arm == baseline:
            base.setdefault((run.cell, run.seed), []).append(value(run))
    found = []
    for cell, seed in base:
        ours = [value(r) for r in runs if r.arm == arm and r.cell == cell and r.seed == seed]
        if ours and (mean := fmean(base[cell, seed])):
            found.append(fmean(ours) / mean)
    return found


class Sum(Struct, frozen=True, kw_only=True):
    """What a variant's runs come to. `waited_s` is the sum of all times to first token."""

    arm: str
    num_computed_tokens: int
    waited_s: float
    num_turns: int
    ttft_p99_s: float | None  # mean over the runs; None: not recorded
    ttft_longest_s: float | None
    session_mean_s: float | None
    session_longest_s: float | None

    @property
    def ttft_mean_s(self) -> float:
        """Mean time to first token; 0 if there is no turn."""
        return self.waited_s / self.num_turns if self.num_turns else 0.0


def sums(runs: Sequence[GridRun]) -> list[Sum]:
    """Sum over cells and seeds; only cells and seeds that every variant has."""
    arms = _arms(runs)
    done = {arm: {(run.cell, run.seed) for run in runs if run.arm == arm} for arm in arms}
    common = set.intersection(*done.values())
    found = []
    for arm in arms:
        ours = [run for run in runs if run.arm == arm and (run.cell, run.seed) in common]
        found.append(
            Sum(
                arm=arm,
                num_computed_tokens=sum(run.num_computed_tokens for run in ours),
                waited_s=sum(map(_waited, ours)),
                num_turns=sum(run.num_turns for run in ours),
                ttft_p99_s=_known_mean([run.ttft_p99_s for run in ours]),
                ttft_longest_s=_known_mean([run.ttft_longest_s for run in ours]),
                session_mean_s=_known_mean([_of_session(run, "mean_s") for run in ours]),
                session_longest_s=_known_mean([_of_session(run, "longest_s") for run in ours]),
            )
        )
    return found


def sum_table(runs: Sequence[GridRun], baseline: str) -> str:
    """Lay the sums out, with their ratios to the baseline's."""
    found = sums(runs)
    base = next((each for each in found if each.arm == baseline), None)
    rows = [
        [
            f"`{each.arm}`",
            f"{each.num_computed_tokens:,}",
            _over(each.num_computed_tokens, base.num_computed_tokens if base else 0),
            f"{each.ttft_mean_s:.2f}" if each.num_turns else "",
            _over(each.waited_s, base.waited_s if base else 0),
            _seconds(each.ttft_p99_s),
            _seconds(each.ttft_longest_s),
            _seconds(each.session_mean_s),
            _over(each.session_mean_s or 0.0, (base and base.session_mean_s) or 0.0),
            _seconds(each.session_longest_s),
        ]
        for each in found
    ]
    has_sessions = any(each.session_mean_s is not None for each in found)
    num_columns = 10 if has_sessions else 5  # older files have no sessions
    return table(_HEADER[:num_columns], [row[:num_columns] for row in rows])


def _over(value: float, total: float) -> str:
    return f"{value / total:.2f}" if total else ""


def best_table(runs: Sequence[GridRun], arm: str, others: Collection[str]) -> str:
    """Divide a variant's figures by those of the best other variant, cell by cell."""
    rows = []
    for cell in _cells(runs):
        of_cell = [run for run in runs if run.cell == cell]
        by_arm = {name: [run for run in of_cell if run.arm == name] for name in (arm, *others)}
        if not by_arm[arm] or not any(by_arm[name] for name in others):
            continue
        row = [cell.name]
        for value in (_computed, _ttft, _p90):
            means = {name: _mean(ours, value) for name, ours in by_arm.items() if ours}
            own = means.pop(arm)
            best = min(means, key=lambda name: means[name])
            ratio = f"{own / means[best]:.2f} of" if means[best] else f"{own:g}; none with"
            row.append(f"{ratio} `{best}`")
        rows.append(row)
    return table(("cell", "computed", "TTFT mean", "P90"), rows)


def _cell_table(runs: Sequence[GridRun], baseline: str) -> str:
    rows = [
        _row(arm, [run for run in runs if run.arm == arm], runs, baseline) for arm in _arms(runs)
    ]
    rows.append(["each token once", f"{_mean(runs, _ideal):,.0f}", *[""] * (len(_HEADER) - 2)])
    caption = (
        f"Working set {_mean(runs, lambda run: run.working_set):.2f}, "
        f"{_mean(runs, lambda run: run.num_turns):,.0f} turns, "
        f"{_mean(runs, lambda run: run.num_prompt_tokens):,.0f} prompt tokens; "
        f"seeds {', '.join(map(str, sorted({run.seed for run in runs})))}."
    )
    return f"{table(_HEADER, rows)}\n\n{caption}"


def _row(
    arm: str, runs: Sequence[GridRun], all_runs: Sequence[GridRun], baseline: str
) -> list[str]:
    num_predicted = sum(run.num_predicted for run in runs)
    num_turns = sum(run.num_turns for run in runs)
    exact = f"{sum(run.num_exact for run in runs) / num_predicted:.0%}" if num_predicted else ""
    num_errors = sum(run.num_errors for run in runs)
    failed = f" ({num_errors} failed)" if num_errors else ""
    in_router = [run.router_p99_ms for run in runs if run.router_p99_ms is not None]
    return [
        f"`{arm}`{failed}",
        f"{_mean(runs, _computed):,.0f}",
        _spread(ratios(all_runs, baseline, _computed, arm)),
        f"{_mean(runs, _ttft):.2f}",
        _spread(ratios(all_runs, baseline, _ttft, arm)),
        _seconds(_known_mean([run.ttft_p99_s for run in runs])),
        _seconds(_known_mean([run.ttft_longest_s for run in runs])),
        _seconds(_known_mean([_of_session(run, "mean_s") for run in runs])),
        _spread(ratios(all_runs, baseline, _session, arm)),
        _seconds(_known_mean([_of_session(run, "longest_s") for run in runs])),
        exact,
        f"{sum(run.num_moved for run in runs) / num_turns:.0%}" if num_turns else "",
        f"{fmean(in_router):.1f}" if in_router else "",
    ]


def _known_mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None: there are no values, or one is not known."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _of_session(run: GridRun, field: Literal["mean_s", "longest_s"]) -> float | None:
    return None if run.sessions is None else getattr(run.sessions, field)


def _spread(values: Sequence[float]) -> str:
    """Write the mean of ratios with the least and the greatest of them."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _cells(runs: Iterable[GridRun]) -> list[Cell]:
    return list(dict.fromkeys(run.cell for run in runs))


def _arms(runs: Iterable[GridRun]) -> list[str]:
    return list(dict.fromkeys(run.arm for run in runs))


def _mean(runs: Sequence[GridRun], value: Callable[[GridRun], float]) -> float:
    return fmean(map(value, runs)) if runs else 0.0


def _computed(run: GridRun) -> float:
    return run.num_computed_tokens


def _ideal(run: GridRun) -> float:
    return run.num_ideal_tokens


def _ttft(run: GridRun) -> float:
    return run.ttft_mean_s


def _p90(run: GridRun) -> float:
    return run.ttft_p90_s


def _session(run: GridRun) -> float:
    return _of_session(run, "mean_s") or 0.0


def _waited(run: GridRun) -> float:
    return run.ttft_mean_s * (run.num_turns - run.num_errors)
