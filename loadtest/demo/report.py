"""What is left when the runs are over: a table, plain words, and JSON.

The JSON is `results.json` (schema below, `schema_version` changes with it) and one
`turns-POLICY-SEED.jsonl` per run with every turn (`loadtest.results.TurnResult`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from loadtest.demo.run import Run, Sample
from loadtest.demo.workload import NUM_REPLICAS, TOKENS_PER_TOKEN, Plan, Workload
from loadtest.machine import Machine, this_machine
from loadtest.results import Summary, TurnResult, summarize
from loadtest.statistics import MEASURES, Comparison, Round, compare, num_differing_tokens
from loadtest.statistics.words import paragraphs
from loadtest.tables import bullets, figures_table
from loadtest.words import milliseconds, ratio, thousands

SCHEMA_VERSION: Final = 2
_COMPARED: Final = ("mean TTFT", "mean turn", "recomputed tokens")
_LATE_S: Final = 0.05  # a driver this late at its P99 blurs times; quiet, it is late by 10 ms
_OURS: Final = "kv_aware"


class RunReport(Struct, frozen=True, kw_only=True):
    """One policy with one seed; tokens are emulated ones, times wall-clock seconds.

    `recomputed_tokens` is per replica, by the engines' own counters. `prediction_exact_ratio`:
    turns whose cached tokens the router predicted to the token; None: it predicted none.
    """

    policy: str
    seed: int
    summary: Summary
    recomputed_tokens: tuple[int, ...]
    imbalance: float  # the busiest replica's recomputed tokens : the mean
    prediction_exact_ratio: float | None
    cache_views: dict[str, str]
    router_ms_p50: float | None
    driver_lag_p99_s: float
    start_up_s: float
    elapsed_s: float
    cpu_s: dict[str, float | None]
    samples: list[Sample]


class Report(Struct, frozen=True, kw_only=True):
    """The whole demo. `least_tokens`: what even one unlimited cache would have to compute.

    The machine's load average is that of the end.
    """

    schema_version: int = SCHEMA_VERSION
    workload: Workload
    seeds: tuple[int, ...]
    plans: tuple[Plan, ...]
    machine: Machine
    runs: list[RunReport]
    comparisons: list[Comparison]
    least_tokens: int
    num_differing_prompts: int
    num_errors: int


def make_report(
    workload: Workload, seeds: Sequence[int], plans: Sequence[Plan], runs: Sequence[Run]
) -> Report:
    """Sum up all runs; comparisons are of every policy with `kv_aware`, or with the last one."""
    reports = [_report_run(run) for run in runs]
    by_seed = {seed: [run for run in runs if run.seed == seed] for seed in seeds}
    return Report(
        workload=workload,
        seeds=tuple(seeds),
        plans=tuple(plans),
        machine=replace(this_machine(), load_average=os.getloadavg()[0]),
        runs=reports,
        comparisons=_compare_all(runs),
        least_tokens=sum(least_tokens(same[-1].results) for same in by_seed.values() if same),
        num_differing_prompts=sum(
            max(num_differing_tokens([run.results for run in same])) for same in by_seed.values()
        ),
        num_errors=sum(report.summary.num_errors for report in reports),
    )


def least_tokens(results: Sequence[TurnResult]) -> int:
    """Estimate what an unlimited cache, shared by all replicas, would leave to compute.

    Of a turn that is what its prompt has beyond the last one and its reply. A first turn counts
    beyond what the engine found cached at best: the shared preamble, or the parent's context,
    which is that of the parent's turn before the fork. Replies count as cached.
    """
    turns = {(turn.session_id, turn.number): turn for turn in results if turn.error is None}
    first = min(
        (t.num_prompt_tokens or 0 for (_, n), t in turns.items() if n == 0),
        default=0,
    )
    total = first  # the shared preamble once, with the shortest task
    for (session_id, number), turn in turns.items():
        prompt = turn.num_prompt_tokens or 0
        if number > 0:
            before = turns.get((session_id, number - 1))
        elif "." in session_id:
            parent, fork, _ = session_id.rsplit(".", 2)
            before = turns.get((parent, int(fork) - 1))
        else:
            total += prompt - first
            continue
        if before is not None:
            known = (before.num_prompt_tokens or 0) + (before.num_output_tokens or 0)
            total += max(0, prompt - known)
    return total


def write_json(report: Report, runs: Sequence[Run], out: Path) -> None:
    """Write `results.json` and the turns of every run."""
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (out / "results.json").write_bytes(encoded + b"\n")
    for run in runs:
        lines = b"".join(msgspec.json.encode(turn) + b"\n" for turn in run.results)
        (out / f"turns-{run.policy}-{run.seed}.jsonl").write_bytes(lines)


def table(report: Report) -> Table:
    """Build the result table, at most 100 columns wide; one row per run.

    `turn` is a whole turn on average, up to its last token; `busiest` compares the replica that
    computed most prompt tokens with the mean.
    """
    built = figures_table(
        "policy", "TTFT mean", "p50", "p90", "p99", "turn", "hit", "recomputed", "busiest"
    )
    for run in report.runs:
        summary = run.summary
        name = run.policy if len(report.seeds) == 1 else f"{run.policy} #{run.seed}"
        built.add_row(
            name,
            milliseconds(summary.ttft_mean_s),
            milliseconds(summary.ttft_p50_s),
            milliseconds(summary.ttft_p90_s),
            milliseconds(summary.ttft_p99_s),
            milliseconds(summary.total_mean_s),
            ratio(summary.hit_ratio),
            thousands(summary.num_recomputed_tokens),
            f"{run.imbalance:.2f} x",
        )
    built.add_row("unlimited cache", *[""] * 6, f"≥ {thousands(report.least_tokens)}", "")
    return built


def words(report: Report) -> list[str]:
    """Describe what was measured and what limits it, one paragraph each."""
    said = [*paragraphs(report.comparisons), *_caveats(report)]
    speed = report.workload.speed
    if report.comparisons:
        said.append("In brackets: 95 % intervals, by session; with several seeds, each is a round.")
    said.append(
        f"Replicas are emulated and time is scaled: the modelled GPUs' clock runs {speed:g} times "
        f"as fast, so 100 ms here stand for {speed * 0.1:g} s there; one token stands for "
        f"{TOKENS_PER_TOKEN}. Router and driver run in real time: theirs weighs {speed:g} times "
        "as much as in front of GPUs. The session id goes along in every run; only session_* "
        "policies read it."
    )
    return said


def show(report: Report, console: Console) -> None:
    """Print table and words."""
    console.print()
    console.print(table(report))
    console.print(Group(Text(), bullets(words(report))))


def _report_run(run: Run) -> RunReport:
    good = [turn for turn in run.results if turn.error is None]
    loads = run.samples[-1].loads if run.samples else ()
    first = run.samples[0].loads if run.samples else ()
    recomputed = tuple(
        load.num_recomputed_tokens - before.num_recomputed_tokens
        for load, before in zip(loads, first, strict=True)
    )
    mean = sum(recomputed) / len(recomputed) if recomputed else 0
    predicted = [turn for turn in good if turn.predicted is not None]
    exact = sum(
        turn.predicted is not None and turn.predicted.gpu == turn.num_cached_tokens
        for turn in predicted
    )
    router_ms = sorted(turn.router_ms for turn in good if turn.router_ms is not None)
    return RunReport(
        policy=run.policy,
        seed=run.seed,
        summary=summarize(run.results),
        recomputed_tokens=recomputed,
        imbalance=max(recomputed) / mean if mean else 1.0,
        prediction_exact_ratio=exact / len(predicted) if predicted else None,
        cache_views=run.cache_views,
        router_ms_p50=router_ms[len(router_ms) // 2] if router_ms else None,
        driver_lag_p99_s=run.driver_lag_p99_s,
        start_up_s=run.start_up_s,
        elapsed_s=run.elapsed_s,
        cpu_s=run.cpu_s,
        samples=run.samples,
    )


def _compare_all(runs: Sequence[Run]) -> list[Comparison]:
    policies = list(dict.fromkeys(run.policy for run in runs))
    ours = _OURS if _OURS in policies else policies[-1]
    compared: list[Comparison] = []
    for baseline in policies:
        if baseline == ours:
            continue
        pairs = [
            (mine, theirs)
            for mine in runs
            for theirs in runs
            if (mine.policy, theirs.policy) == (ours, baseline) and mine.seed == theirs.seed
        ]
        late = any(run.driver_lag_p99_s > _LATE_S for pair in pairs for run in pair)
        rounds = [Round(ours=mine.results, theirs=theirs.results) for mine, theirs in pairs]
        for measure in (MEASURES[name] for name in _COMPARED):
            found = compare(
                measure,
                ours,
                baseline,
                rounds,
                same_sessions=False,  # every seed draws its own
                blurred="the driver was late" if late and measure.is_time else "",
            )
            if found is not None:
                compared.append(found)
    return compared


def _caveats(report: Report) -> list[str]:
    """List what limits these numbers."""
    said: list[str] = []
    if report.num_errors:
        kinds = sorted({kind for run in report.runs for kind in run.summary.errors})
        said.append(f"{report.num_errors} turns FAILED ({', '.join(kinds)}); see turns-*.jsonl.")
    if report.num_differing_prompts:
        said.append(
            f"{report.num_differing_prompts} turns had another prompt under another policy: "
            "the runs are not strictly comparable."
        )
    late = max((run.driver_lag_p99_s for run in report.runs), default=0.0)
    if late > _LATE_S:
        load = report.machine.load_average
        busy = (
            "" if load is None else f", load average {load:.1f} on {report.machine.num_cpus} CPUs"
        )
        said.append(
            f"This machine was busy: the driver itself was up to {milliseconds(late)} late "
            f"(p99{busy}). Token counts hold, times do not."
        )
    unsure = sorted(
        {
            f"{run.policy}: {replica} {view}"
            for run in report.runs
            for replica, view in run.cache_views.items()
            if view != "exact"
        }
    )
    if unsure:
        said.append(f"The router did not know every cache exactly: {', '.join(unsure)}.")
    return said


def settings(workload: Workload, plan: Plan) -> list[str]:
    """Describe what is about to run, in lines of at most 100 columns."""
    cache = plan.cache_tokens * TOKENS_PER_TOKEN
    written = plan.written_tokens * TOKENS_PER_TOKEN
    return [
        f"{workload.num_sessions} coding agents and {plan.num_sub_agents} sub-agents, "
        f"{plan.num_turns} turns (the longest session {plan.longest_turns}), seed {workload.seed}",
        f"{NUM_REPLICAS} emulated replicas (Llama 3.1 70B on 4 x H100 each), caches of "
        f"{thousands(cache)} tokens; the agents write {thousands(written)}",
        f"scaled: clock {workload.speed:g}:1, tokens {TOKENS_PER_TOKEN}:1; same sessions and cold "
        "caches for every policy",
    ]
