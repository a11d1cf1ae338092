"""Report the runs: one sentence, a table, plain words, and JSON.

The JSON is `results.json` (schema below, `schema_version` changes with it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from loadtest.demo.run import Run
from loadtest.demo.workload import NUM_REPLICAS, TOKENS_PER_TOKEN, Plan, Workload
from loadtest.machine import Machine, this_machine
from loadtest.results import Summary, TurnResult, summarize
from loadtest.statistics import MEASURES, Comparison, Round, compare, num_differing_tokens
from loadtest.statistics.words import paragraphs
from loadtest.tables import bullets, figures_table
from loadtest.words import duration, percent, ratio, thousands

SCHEMA_VERSION: Final = 3
_COMPARED: Final = ("recomputed tokens", "mean TTFT", "mean turn")
_OURS: Final = "kv_aware"


class RunReport(Struct, frozen=True, kw_only=True):
    """One policy with one seed; tokens are emulated ones, times virtual seconds.

    `recomputed_tokens` is per replica, by the engines' own counts. `prediction_exact_ratio`:
    turns whose cached tokens the router predicted to the token; None: it predicted none.
    """

    policy: str
    seed: int
    summary: Summary
    recomputed_tokens: dict[str, int]
    imbalance: float  # the busiest replica's recomputed tokens : the mean
    prediction_exact_ratio: float | None
    cache_views: dict[str, str]
    elapsed_s: float


class Report(Struct, frozen=True, kw_only=True):
    """The whole demo. `least_tokens`: what even one unlimited cache would have to compute."""

    schema_version: int = SCHEMA_VERSION
    workload: Workload
    seeds: tuple[int, ...]
    plans: tuple[Plan, ...]
    machine: Machine
    headline: str
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
        machine=this_machine(),
        headline=headline(reports),
        runs=reports,
        comparisons=_compare_all(runs),
        least_tokens=sum(least_tokens(same[-1].results) for same in by_seed.values() if same),
        num_differing_prompts=sum(
            max(num_differing_tokens([run.results for run in same])) for same in by_seed.values()
        ),
        num_errors=sum(report.summary.num_errors for report in reports),
    )


def headline(runs: Sequence[RunReport]) -> str:
    """Write the verdict in one sentence: recomputed tokens against every other policy."""
    totals: Counter[str] = Counter()
    for run in runs:
        totals[run.policy] += run.summary.num_recomputed_tokens
    ours = _ours(list(totals))
    parts = [
        f"{_difference(totals[ours], tokens)} {name}"
        for name, tokens in sorted(totals.items(), key=lambda item: item[1])
        if name != ours and tokens
    ]
    if not parts:
        return f"{ours} recomputes {thousands(totals[ours])} prompt tokens"
    parts[0] = parts[0].replace(" than", " prompt tokens than", 1)
    return f"{ours} recomputes {' and '.join(parts)}"


def _difference(ours: int, theirs: int) -> str:
    share = ours / theirs - 1
    if abs(share) < 0.005:
        return "no fewer and no more than"
    return f"{percent(abs(share))} {'fewer' if share < 0 else 'more'} than"


def _ours(policies: Sequence[str]) -> str:
    """Choose the policy that the others are held against."""
    return _OURS if _OURS in policies else policies[-1]


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


def write_json(report: Report, out: Path) -> None:
    """Write `results.json`."""
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (out / "results.json").write_bytes(encoded + b"\n")


def table(report: Report) -> Table:
    """Build the result table, at most 100 columns wide; one row per run.

    `turn` is a whole turn on average, up to its last token; `busiest` compares the replica that
    computed most prompt tokens with the mean.
    """
    built = figures_table(
        "policy", "recomputed", "hit", "TTFT mean", "p50", "p90", "p99", "turn", "busiest"
    )
    for run in report.runs:
        summary = run.summary
        name = run.policy if len(report.seeds) == 1 else f"{run.policy} #{run.seed}"
        built.add_row(
            name,
            thousands(summary.num_recomputed_tokens),
            ratio(summary.hit_ratio),
            duration(summary.ttft_mean_s),
            duration(summary.ttft_p50_s),
            duration(summary.ttft_p90_s),
            duration(summary.ttft_p99_s),
            duration(summary.total_mean_s),
            f"{run.imbalance:.2f} x",
        )
    built.add_row("unlimited cache", f"≥ {thousands(report.least_tokens)}", *[""] * 7)
    return built


def words(report: Report) -> list[str]:
    """Describe what was measured and what limits it, one paragraph each."""
    said = [*paragraphs(report.comparisons), *_caveats(report)]
    if report.comparisons:
        said.append("In brackets: 95 % intervals, by session; with several seeds, each is a round.")
    said.append(
        "Time is virtual: a busy machine changes no figure. Replicas are emulated: a step takes as "
        f"long as data sheets say, and one token stands for {TOKENS_PER_TOKEN}. Router and network "
        "take no time. The session id is sent in every run; only session_* policies read it."
    )
    return said


def show(report: Report, console: Console) -> None:
    """Print the verdict, the table and the words."""
    console.print(Text(f"{report.headline}.", style="bold"))
    console.print()
    console.print(table(report))
    console.print(Group(Text(), bullets(words(report))))


def _report_run(run: Run) -> RunReport:
    good = [turn for turn in run.results if turn.error is None]
    recomputed: Counter[str] = Counter(dict.fromkeys(run.ended.cache_views, 0))
    for turn in good:
        recomputed[turn.replica or "?"] += turn.num_recomputed_tokens
    total = sum(recomputed.values())
    predicted = [turn for turn in good if turn.predicted is not None]
    exact = sum(
        turn.predicted is not None and turn.predicted.gpu == turn.num_cached_tokens
        for turn in predicted
    )
    return RunReport(
        policy=run.policy,
        seed=run.seed,
        summary=summarize(run.results),
        recomputed_tokens=dict(recomputed),
        imbalance=max(recomputed.values()) / total * len(recomputed) if total else 1.0,
        prediction_exact_ratio=exact / len(predicted) if predicted else None,
        cache_views=run.ended.cache_views,
        elapsed_s=run.ended.elapsed_s,
    )


def _compare_all(runs: Sequence[Run]) -> list[Comparison]:
    policies = list(dict.fromkeys(run.policy for run in runs))
    ours = _ours(policies)
    compared: list[Comparison] = []
    for baseline in policies:
        if baseline == ours:
            continue
        rounds = [
            Round(ours=mine.results, theirs=theirs.results)
            for mine in runs
            for theirs in runs
            if (mine.policy, theirs.policy) == (ours, baseline) and mine.seed == theirs.seed
        ]
        for measure in (MEASURES[name] for name in _COMPARED):
            # Every seed draws its own sessions.
            found = compare(measure, ours, baseline, rounds, same_sessions=False)
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
        f"virtual time, tokens {TOKENS_PER_TOKEN}:1; same sessions and cold caches for each policy",
    ]
