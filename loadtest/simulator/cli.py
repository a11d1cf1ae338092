"""`warmroute simulate`: options in, a table out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace
from rich.console import Console

from loadtest.engine_model.time_model import PRESETS
from loadtest.generated import Agents
from loadtest.output_options import json_option, output_option
from loadtest.simulator.arms import arms_of
from loadtest.simulator.rounds import simulate_rounds, write_runs
from loadtest.simulator.setup import Halves, PoolSetup, Setup, TierSetup, coarsened
from loadtest.simulator.table import as_json as as_json_text
from loadtest.simulator.table import tables_of
from loadtest.traces.options import load_workload, workload_options

_COUNT = click.IntRange(min=1)


class _Positive(click.FloatRange):
    """A finite number above 0."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return float(number)


_POSITIVE = _Positive(min=0.0, min_open=True)
_SETUP = Setup()


@click.command(context_settings={"max_content_width": 100, "show_default": True})
@workload_options
@click.option(
    "--policies",
    multiple=True,
    default=("all",),
    metavar="all|NAME[:PARAM=VALUE,...]",
    help="Repeatable, or with commas between: `--policies kv_aware:alpha=8,least_loaded`. "
    "queue.KEY=VALUE sets the router's queue. unlimited: kv_aware on caches that never evict, the "
    "limit of what a router can do.",
)
@click.option(
    "--rounds",
    type=_COUNT,
    default=1,
    help="Simulate each policy so often, with other bytes and a millisecond of jitter. "
    "`warmroute compare` needs two or more.",
)
@click.option(
    "--replicas",
    type=click.IntRange(min=0),
    help="Replicas that compute whole requests.  "
    f"[default: {_SETUP.num_replicas}; 0 with --prefill and --decode]",
)
@click.option("--prefill", type=_COUNT, metavar="N", help="Replicas that compute prompts only.")
@click.option(
    "--decode",
    type=_COUNT,
    metavar="N",
    help="Replicas that answer, from prompts computed by the others.",
)
@click.option(
    "--transfer-speed",
    type=_POSITIVE,
    metavar="K",
    help="Without a pool: reading a token from a prefill replica takes 1/K of the time to prefill "
    "it.  [default: 20]",
)
@click.option("--blocks", type=_COUNT, help="One replica's cache, in blocks.  [default: 3M tokens]")
@click.option(
    "--join-blocks",
    type=_COUNT,
    default=1,
    help="Join so many blocks of the workload to one: faster, hits are rounded down.",
)
@click.option(
    "--engine", type=click.Choice(list(PRESETS)), default=_SETUP.engine, help="Time model."
)
@click.option("--max-num-batched-tokens", type=_COUNT, default=_SETUP.max_num_batched_tokens)
@click.option("--max-num-seqs", type=_COUNT, default=_SETUP.max_num_seqs)
@click.option(
    "--pool-speed",
    type=_POSITIVE,
    metavar="K",
    help="Use a shared pool: reading a token takes 1/K of the time to prefill it.",
)
@click.option(
    "--pool-links",
    type=_POSITIVE,
    metavar="N",
    help="Replicas that read at full speed at once; more share it.  [default: half of them]",
)
@click.option("--pool-blocks", type=_COUNT, help="Capacity of the pool.  [default: unlimited]")
@click.option(
    "--cpu-blocks", type=_COUNT, help="Each replica has a CPU tier of so many blocks, as vLLM's."
)
@click.option(
    "--cpu-speed",
    type=_POSITIVE,
    metavar="K",
    help="Reading a token from it takes 1/K of the time to prefill it.  [default: 20]",
)
@click.option(
    "--load",
    type=_POSITIVE,
    default=_SETUP.load,
    help="Offered work divided by the fleet's capacity, both without any cache.",
)
@click.option(
    "--own-pace", is_flag=True, help="Keep the workload's arrival times; --load is ignored."
)
@click.option(
    "--loop",
    type=click.Choice(["auto", "open", "closed"]),
    default="auto",
    help="Turns come at their times (open), or after the turns they wait for (closed); auto: "
    "traces open, generated workloads closed.",
)
@click.option(
    "--no-decode", is_flag=True, help="Every reply is one token, as on prefill instances."
)
@click.option(
    "--event-lag",
    type=click.FloatRange(min=0.0),
    default=1000 * _SETUP.event_lag_s,
    metavar="MS",
    help="Time from a step's end until the router has its KV events.",
)
@click.option(
    "--routers", type=_COUNT, default=1, help="Routers; each request goes to one of them at random."
)
@click.option(
    "--note-lag",
    type=click.FloatRange(min=0.0),
    default=0.0,
    metavar="MS",
    help="Time until the other routers know of a request; inf: never.",
)
@click.option(
    "--slo-ttft", type=_POSITIVE, default=_SETUP.slo_ttft_s, metavar="S", help="Limit for goodput."
)
@click.option(
    "--slo-tbt",
    type=_POSITIVE,
    default=1000 * _SETUP.slo_tbt_s,
    metavar="MS",
    help="Limit for goodput: mean of the longest tenth of a turn's inter-token latencies.",
)
@json_option
@output_option(is_file=False, help="Write a run file of each run there, for `compare`.")
def simulate(
    policies: Sequence[str],
    rounds: int,
    seed: int,
    join_blocks: int,
    as_json: bool,
    out: Path | None,
    **options: Any,
) -> None:
    """Simulate a workload under every policy.

    Policies, queue, index and fleet are the live router's own code. Engines are the emulator's, in
    virtual time. Two simulations with the same --seed are equal.
    """
    given = {name: options.pop(name) for name in _OWN}
    try:
        arms = arms_of(policies)
        is_made = options["generate"] is not None
        workload = load_workload(seed=seed, **options)
        setup = _setup(seed, is_made, given)
        if options["live"] is not None or options["generate"] == "mixed":
            stop_s = options["seconds"] or Agents().span_s
            setup = replace(setup, load=None, stop_s=stop_s)
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
    if not workload.turns:
        raise click.UsageError(f"{workload.name}: no turns")
    console = Console(stderr=as_json)
    workload = coarsened(workload, join_blocks)
    results, is_complete = simulate_rounds(workload, arms, setup, rounds)
    if results:
        click.echo(as_json_text(results)) if as_json else console.print(*tables_of(results))
        if out is not None:
            try:
                write_runs(out, results)
            except OSError as exc:
                raise click.ClickException(f"cannot write: {exc}") from exc
    if not is_complete:
        total = len(arms) * rounds
        console.print(f"[yellow]stopped: {len(results)} of {total} simulations are done")
        raise SystemExit(1)


_OWN = (
    "replicas", "prefill", "decode", "transfer_speed", "blocks", "engine",
    "max_num_batched_tokens", "max_num_seqs", "pool_speed", "pool_links",
    "pool_blocks", "cpu_blocks", "cpu_speed", "load", "own_pace", "loop", "no_decode", "event_lag",
    "routers", "note_lag", "slo_ttft", "slo_tbt",
)  # fmt: skip


def _setup(seed: int, is_made: bool, given: dict[str, Any]) -> Setup:
    """Return the setup of options.

    Raises:
        click.UsageError: Options contradict each other.
        ValueError: A number is too small.
    """
    pool = None
    if given["pool_speed"] is not None:
        pool = PoolSetup(
            speed=given["pool_speed"],
            num_links=given["pool_links"],
            capacity_blocks=given["pool_blocks"],
        )
    elif given["pool_links"] is not None or given["pool_blocks"] is not None:
        raise click.UsageError("--pool-links and --pool-blocks only with --pool-speed")
    halves = _halves(given)
    if given["max_num_seqs"] > given["max_num_batched_tokens"]:
        raise click.UsageError("--max-num-seqs is above --max-num-batched-tokens")
    loop = given["loop"]
    if loop == "auto":
        loop = "closed" if is_made else "open"
    return Setup(
        num_replicas=_num_whole(given["replicas"], halves),
        halves=halves,
        num_blocks=given["blocks"],
        engine=given["engine"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        max_num_seqs=given["max_num_seqs"],
        pool=pool,
        tier=_tier(given),
        load=None if given["own_pace"] else given["load"],
        loop=loop,
        decodes=not given["no_decode"],
        event_lag_s=given["event_lag"] / 1000,
        num_routers=given["routers"],
        note_lag_s=given["note_lag"] / 1000,
        slo_ttft_s=given["slo_ttft"],
        slo_tbt_s=given["slo_tbt"] / 1000,
        seed=seed,
    )


def _tier(given: dict[str, Any]) -> TierSetup | None:
    """Return the replicas' CPU tiers. None: there are none."""
    num_blocks, speed = given["cpu_blocks"], given["cpu_speed"]
    if num_blocks is None:
        if speed is not None:
            raise click.UsageError("--cpu-speed only with --cpu-blocks")
        return None
    if given["pool_speed"] is not None or given["prefill"] is not None:
        raise click.UsageError("--cpu-blocks: not with --pool-speed, --prefill and --decode")
    made = TierSetup(num_blocks=num_blocks)
    return made if speed is None else replace(made, speed=speed)


def _num_whole(given: int | None, halves: Halves | None) -> int:
    """Count the replicas that compute whole requests."""
    if given is None:
        return _SETUP.num_replicas if halves is None else 0
    if not given and halves is None:
        raise click.UsageError("--replicas 0 only beside --prefill and --decode")
    return given


def _halves(given: dict[str, Any]) -> Halves | None:
    num_prefill, num_decode, speed = (
        given[name] for name in ("prefill", "decode", "transfer_speed")
    )
    if (num_prefill is None) != (num_decode is None):
        raise click.UsageError("--prefill and --decode need each other")
    if num_prefill is None:
        if speed is not None:
            raise click.UsageError("--transfer-speed only with --prefill and --decode")
        return None
    if given["no_decode"]:
        raise click.UsageError("--decode and --no-decode contradict each other")
    if speed is not None and given["pool_speed"] is not None:
        raise click.UsageError("--transfer-speed is without a pool: with one, KV goes through it")
    found = Halves(num_prefill=num_prefill, num_decode=num_decode)
    return found if speed is None else replace(found, speed=speed)
