"""`warmroute estimate`: options in, a table and a verdict out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from loadtest.engine_model.time_model import PRESETS
from loadtest.estimate.saving import (
    MIN_SESSIONS,
    NO_DIFFERENCE,
    ROUTINGS,
    WARMROUTE,
    Saving,
    Traffic,
    less,
    savings_of,
    traffic_of,
)
from loadtest.output_options import JsonCommand, json_options
from loadtest.simulator import PoolSetup, Setup
from loadtest.traces.errors import WorkloadError
from loadtest.traces.reading import read_workload
from loadtest.workload import Workload

SCHEMA = "warmroute.estimate/1"
_COUNT = click.IntRange(min=1)


@click.command(cls=JsonCommand, context_settings={"max_content_width": 100, "show_default": True})
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
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="K",
    help="With a Mooncake pool: reading a token takes 1/K of the time to compute it.",
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0.0, min_open=True),
    default=1.0,
    metavar="K",
    help="Let sessions start K times as fast: what happens if the traffic grows.",
)
@click.option("--skip-bad", is_flag=True, help="Leave bad lines out and count them.")
@json_options()
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
        raise click.ClickException(str(exc)) from exc
    workload = _paced(workload, speed)
    setup = Setup(
        num_replicas=replicas,
        num_blocks=max(1, cache_tokens // workload.block_size),
        engine=engine,
        pool=None if pool_speed is None else PoolSetup(speed=pool_speed),
        load=None,
        loop="closed",
    )
    traffic = traffic_of(workload)
    longest = max(turn.num_input_tokens + turn.num_output_tokens for turn in workload.turns)
    if longest > cache_tokens:
        raise click.UsageError(
            f"--cache-tokens is {cache_tokens:,}, and a request has {longest:,} tokens; "
            "allowed: at least as many"
        )
    savings = _simulated(workload, setup)
    found = {
        "schema": SCHEMA,
        "workload": file.name,
        "replicas": replicas,
        "cache_tokens": cache_tokens,
        "engine": engine,
        "traffic": traffic,
        "savings": savings,
    }
    written = msgspec.json.format(msgspec.json.encode(found))
    if as_json:
        click.echo(written)
    else:
        report = _report(file, traffic, savings, setup, cache_tokens)
        Console().print(*report, sep="\n", highlight=False)
    if json_file is not None:
        try:
            json_file.write_bytes(written)
        except OSError as exc:
            raise click.ClickException(f"cannot write: {exc}") from exc


def _paced(workload: Workload, speed: float) -> Workload:
    """Move the starts of sessions together; pauses between turns stay."""
    turns = [
        msgspec.structs.replace(turn, arrival_s=turn.arrival_s / speed) for turn in workload.turns
    ]
    return msgspec.structs.replace(workload, turns=tuple(turns))


def _simulated(workload: Workload, setup: Setup) -> list[Saving]:
    columns = (TextColumn("simulating"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(workload.turns) * len(ROUTINGS))
        return savings_of(workload, setup, lambda num: progress.advance(task, num))


def _report(
    file: Path, traffic: Traffic, savings: Sequence[Saving], setup: Setup, cache_tokens: int
) -> list[Table | str]:
    seen = 1 - traffic.num_new_tokens / traffic.num_prompt_tokens
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
    return [
        f"{file.name}: {traffic.num_turns:,} requests in {traffic.num_sessions:,} sessions",
        f"{traffic.num_prompt_tokens:,} prompt tokens, {seen:.0%} of them seen before",
        f"{setup.num_replicas} replicas ({setup.engine}), "
        f"each with {cache_tokens:,} tokens of cache",
        table,
        *_verdict(traffic, savings),
        "[dim]Simulated from cold caches. Trust the order more than the numbers.",
    ]


def _verdict(traffic: Traffic, savings: Sequence[Saving]) -> list[str]:
    """Return what warmroute saves over the better of the others, by tokens recomputed."""
    if traffic.num_sessions < MIN_SESSIONS:
        return [
            f"{traffic.num_sessions} sessions are too few to say what warmroute saves: record at "
            f"least {MIN_SESSIONS}."
        ]
    ours = next(each for each in savings if each.routing == WARMROUTE)
    others = [each for each in savings if each.routing != WARMROUTE]
    best = min(others, key=lambda each: each.num_computed_tokens)
    sooner = less(ours.ttft_mean_s, best.ttft_mean_s)
    if abs(less(ours.num_computed_tokens, best.num_computed_tokens)) < NO_DIFFERENCE:
        if abs(sooner) < NO_DIFFERENCE:
            return [
                f"warmroute saves nothing here: with this traffic a {best.routing} does as well.",
                "It starts to save when conversations exceed the caches: try --speed 2.",
            ]
        saved = f"recomputes about as many prompt tokens as a {best.routing},"
    else:
        share = less(ours.num_recomputed_tokens, best.num_recomputed_tokens)
        num_tokens = abs(best.num_recomputed_tokens - ours.num_recomputed_tokens)
        saved = (
            f"recomputes {abs(share):.0%} {'fewer' if share >= 0 else 'more'} "
            f"prompt tokens than a {best.routing} ({num_tokens:,}),"
        )
    return [
        f"warmroute {saved}",
        f"and its mean TTFT is {abs(sooner):.0%} {'lower' if sooner >= 0 else 'higher'}.",
    ]
