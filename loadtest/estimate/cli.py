"""`warmroute estimate`: the same requests under each kind of routing, on a fleet like yours.

It is a preset of `warmroute simulate`, with a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

import click
import msgspec
from msgspec import Struct
from msgspec.structs import replace
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from loadtest.engine_model.time_model import PRESETS
from loadtest.output_options import json_options
from loadtest.simulator import PoolSetup, Setup, Simulated
from loadtest.simulator.arms import Arm
from loadtest.simulator.rounds import simulate_rounds
from loadtest.traces.errors import WorkloadError
from loadtest.traces.reading import read_workload
from loadtest.workload import Workload

SCHEMA: Final = "warmroute.estimate/1"
WARMROUTE: Final = "warmroute"
ROUTINGS: Final = (
    Arm(label="round robin", policy="round_robin"),
    Arm(label="session hash", policy="session_hash"),
    Arm(label=WARMROUTE, policy="kv_aware"),
)
"""What other routers do by default, and warmroute."""
MIN_SESSIONS: Final = 20  # of fewer, a single one decides
NO_DIFFERENCE: Final = 0.03  # two simulations of like policies differ by as much
_COUNT = click.IntRange(min=1)
_POSITIVE = click.FloatRange(min=0.0, min_open=True)


class Saving(Struct, frozen=True, kw_only=True):
    """One kind of routing.

    `num_recomputed_tokens` were computed though some replica had computed them before;
    `prefill_s` is how long replicas computed prompts, summed over all of them.
    """

    routing: str
    num_computed_tokens: int
    num_recomputed_tokens: int
    hit_ratio: float
    ttft_mean_s: float
    ttft_p90_s: float
    prefill_s: float


@click.command(context_settings={"max_content_width": 100, "show_default": True})
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--replicas", type=_COUNT, default=2, help="Replicas of your fleet.")
@click.option(
    "--cache-tokens",
    type=_COUNT,
    default=400_000,
    metavar="TOKENS",
    help="Cache of one replica. vLLM logs it at the start as `GPU KV cache size`.",
)
@click.option(
    "--engine",
    type=click.Choice([name for name in PRESETS if name != "instant"]),
    default="h100-8b",
    help="GPU and model whose speed is simulated.",
)
@click.option(
    "--pool-speed",
    type=_POSITIVE,
    metavar="K",
    help="With a Mooncake pool: reading a token takes 1/K of the time to compute it.",
)
@click.option(
    "--speed",
    type=_POSITIVE,
    default=1.0,
    metavar="K",
    help="Let sessions start K times as fast: what happens if the traffic grows.",
)
@click.option("--skip-bad", is_flag=True, help="Leave bad lines out and count them.")
@json_options
def estimate(
    file: Path,
    replicas: int,
    cache_tokens: int,
    engine: str,
    pool_speed: float | None,
    speed: float,
    skip_bad: bool,
    as_json: bool,
    json_file: Path | None,
) -> None:
    """Estimate how much warmroute would save on your traffic.

    FILE has decision records of a router (`log.decisions`) or a trace. The same requests are
    simulated under round robin, a session hash and warmroute, on a fleet like yours.
    """
    try:
        workload = read_workload(file, skip_bad=skip_bad)
    except WorkloadError as exc:
        raise click.UsageError(str(exc)) from exc
    longest = max(turn.num_input_tokens + turn.num_output_tokens for turn in workload.turns)
    if longest > cache_tokens:
        raise click.UsageError(
            f"--cache-tokens is {cache_tokens:,}, and a request has {longest:,} tokens; "
            "allowed: at least as many"
        )
    paced = [replace(turn, arrival_s=turn.arrival_s / speed) for turn in workload.turns]
    workload = replace(workload, turns=tuple(paced))
    setup = Setup(
        num_replicas=replicas,
        num_blocks=max(1, cache_tokens // workload.block_size),
        engine=engine,
        pool=None if pool_speed is None else PoolSetup(speed=pool_speed),
        load=None,
        loop="closed",
    )
    num_new_tokens = new_tokens(workload)
    num_sessions = len({turn.session_id for turn in workload.turns})
    results, is_complete = simulate_rounds(workload, ROUTINGS, setup)
    if not is_complete:
        raise click.Abort
    savings = [_saving(simulated, num_new_tokens) for simulated in results]
    found = {
        "schema": SCHEMA,
        "workload": file.name,
        "replicas": replicas,
        "cache_tokens": cache_tokens,
        "engine": engine,
        "traffic": {
            "num_turns": len(workload.turns),
            "num_sessions": num_sessions,
            "num_prompt_tokens": workload.num_input_tokens,
            "num_new_tokens": num_new_tokens,
            "span_s": workload.span_s,
        },
        "savings": savings,
    }
    written = msgspec.json.format(msgspec.json.encode(found))
    if as_json:
        click.echo(written)
    else:
        seen = 1 - num_new_tokens / workload.num_input_tokens
        Console().print(
            f"{file.name}: {len(workload.turns):,} requests in {num_sessions:,} sessions",
            f"{workload.num_input_tokens:,} prompt tokens, {seen:.0%} of them seen before",
            f"{replicas} replicas ({engine}), each with {cache_tokens:,} tokens of cache",
            _table(savings),
            *_verdict(num_sessions, savings),
            "[dim]Simulated from cold caches. Trust the order more than the numbers.",
            sep="\n",
            highlight=False,
        )
    if json_file is not None:
        try:
            json_file.write_bytes(written)
        except OSError as exc:
            raise click.ClickException(f"cannot write: {exc}") from exc


def new_tokens(workload: Workload) -> int:
    """Count what is new in each prompt: blocks that no earlier prompt had."""
    seen: set[int] = set()
    num_new = 0
    for turn in workload.turns:
        known = [*takewhile(seen.__contains__, turn.hash_ids)]
        seen.update(turn.hash_ids)
        num_new += max(0, turn.num_input_tokens - len(known) * workload.block_size)
    return num_new


def _saving(simulated: Simulated, num_new_tokens: int) -> Saving:
    summary = simulated.summary
    return Saving(
        routing=simulated.run.info.label,
        num_computed_tokens=summary.num_computed_tokens,
        num_recomputed_tokens=max(0, summary.num_computed_tokens - num_new_tokens),
        hit_ratio=summary.hit_ratio,
        ttft_mean_s=summary.ttft_mean_s,
        ttft_p90_s=summary.ttft_p90_s,
        prefill_s=sum(use.prefill_ratio for use in simulated.replicas) * simulated.span_s,
    )


def _table(savings: Sequence[Saving]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for column in ("routing", "cache hits", "recomputed", "prefill", "TTFT mean", "P90"):
        table.add_column(column, justify="left" if column == "routing" else "right")
    for each in savings:
        table.add_row(
            each.routing,
            f"{each.hit_ratio:.0%}",
            f"{each.num_recomputed_tokens:,}",
            f"{each.prefill_s:,.0f} s",
            f"{each.ttft_mean_s:.2f} s",
            f"{each.ttft_p90_s:.2f} s",
            style="bold" if each.routing == WARMROUTE else None,
        )
    return table


def _verdict(num_sessions: int, savings: Sequence[Saving]) -> list[str]:
    """Say what warmroute saves over the best of the others, by recomputed tokens and by TTFT."""
    if num_sessions < MIN_SESSIONS:
        return [
            f"{num_sessions} sessions are too few to say what warmroute saves: record at "
            f"least {MIN_SESSIONS}."
        ]
    *others, ours = savings
    best = min(others, key=lambda each: each.num_computed_tokens)
    soonest = min(others, key=lambda each: each.ttft_mean_s)
    sooner = _less(ours.ttft_mean_s, soonest.ttft_mean_s)
    if abs(_less(ours.num_computed_tokens, best.num_computed_tokens)) < NO_DIFFERENCE:
        if abs(sooner) < NO_DIFFERENCE:
            return [
                f"warmroute saves nothing here: with this traffic a {best.routing} does as well.",
                "It starts to save when conversations exceed the caches: try --speed 2.",
            ]
        saved = f"recomputes about as many prompt tokens as a {best.routing},"
    else:
        share = _less(ours.num_recomputed_tokens, best.num_recomputed_tokens)
        num_tokens = abs(best.num_recomputed_tokens - ours.num_recomputed_tokens)
        saved = (
            f"recomputes {abs(share):.0%} {'fewer' if share >= 0 else 'more'} "
            f"prompt tokens than a {best.routing} ({num_tokens:,}),"
        )
    return [
        f"warmroute {saved}",
        f"and its mean TTFT is {abs(sooner):.0%} {'lower' if sooner >= 0 else 'higher'} than with "
        f"a {soonest.routing}.",
    ]


def _less(ours: float, others: float) -> float:
    """Return by which share `ours` is below `others`; negative: it is above."""
    return 1.0 - ours / others if others else 0.0
