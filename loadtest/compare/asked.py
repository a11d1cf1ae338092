"""Make a job of the options on the command line: the setting, and where to run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import httpx
from msgspec import Struct

from loadtest.compare.arms import Arm, check_arms, parse_policies, parse_targets, parse_url
from loadtest.compare.options import ONLY, refuse_elsewhere, refuse_unlimited
from loadtest.compare.places import (
    Emulated,
    Engines,
    Place,
    Simulated,
    Targets,
    cache_tokens,
    written_blocks,
)
from loadtest.compare.setting import Place as PlaceName
from loadtest.compare.setting import Setting, make_order
from loadtest.engine_model.time_model import PRESETS
from loadtest.runner import ReplayOptions
from loadtest.runner.parameters import api_key
from loadtest.simulator import PoolSetup, Setup, TierSetup
from loadtest.traces.options import load_workload
from loadtest.workload import Workload

_EMULATED_BLOCK: Final = 16
_LOOK_S: Final = 10.0
_DEFAULT_REPLICAS: Final = 3


class Fleet(Struct, frozen=True, kw_only=True):
    """The options of simulated and emulated replicas, and of sending; None: the default."""

    replicas: int | None
    blocks: int | None
    engine: str
    pool_speed: float | None
    cpu_blocks: int | None
    speed: float
    load: float | None
    own_pace: bool


class Job(Struct, frozen=True, kw_only=True):
    """What is to be run."""

    setting: Setting
    workload: Workload
    options: ReplayOptions
    fleet: Fleet
    replicas: tuple[str, ...]  # base URLs of engines
    router_flags: tuple[str, ...]


def make_job(
    ctx: click.Context,
    *,
    baseline: str | None,
    slo: tuple[float | None, float | None],
    options: dict[str, Any],
) -> Job:
    """Check what was asked for and load the workload.

    Args:
        slo: Bounds on time to first token and on inter-token latency, in seconds.
        options: All others of `compare_options` and `workload_options`, by name.

    Raises:
        click.UsageError: options contradict each other, or nothing answers where something should.
        WorkloadError: the trace is wrong; the message names file, line and field.
    """
    arms, baseline = check_arms(
        [*parse_policies(options.pop("policies")), *parse_targets(options.pop("targets"))],
        baseline,
    )
    replicas = _replica_urls(options.pop("replica_texts"))
    place = name_place(simulate=options.pop("simulate"), replicas=replicas, arms=arms)
    refuse_elsewhere(ctx, place)
    refuse_unlimited(arms, place)
    given = {name: options.pop(name) for name in ONLY}
    fleet = Fleet(**{name: given[name] for name in Fleet.__struct_fields__})
    if fleet.cpu_blocks is not None and fleet.pool_speed is not None:
        raise click.UsageError("--cpu-blocks: not with --pool-speed")
    headers = dict(given["headers"])
    key = api_key(given["api_key_file"]) if place in ("engines", "targets") else None
    rounds = options.pop("rounds")
    seed = options.pop("seed")
    workload = load_workload(seed=seed, **options)
    if not workload.turns:
        raise click.UsageError(f"{workload.name}: no turns")
    sending = _replay_options(workload, given, headers, key, seed)
    _check_reachable(
        [*replicas, *(arm.url for arm in arms if arm.url)],
        headers | ({"Authorization": f"Bearer {key}"} if key else {}),
    )
    setting = Setting(
        place=place,
        arms=arms,
        baseline=baseline,
        order=make_order([arm.label for arm in arms], rounds, seed),
        workload=workload.name,
        num_turns=len(workload.turns),
        seed=seed,
        slo_ttft_s=slo[0],
        slo_tbt_s=slo[1],
        details=_details(place, workload, fleet, replicas),
    )
    mooncake = given["mooncake"]
    return Job(
        setting=setting,
        workload=workload,
        options=sending,
        fleet=fleet,
        replicas=replicas,
        router_flags=("--mooncake", mooncake) if mooncake else (),
    )


def name_place(*, simulate: bool, replicas: Sequence[str], arms: Sequence[Arm]) -> PlaceName:
    """Return where runs happen.

    Raises:
        click.UsageError: options contradict each other.
    """
    kinds = {arm.url is None for arm in arms}
    if len(kinds) == 2:
        raise click.UsageError(
            "--policies and --target exclude each other: compare one or the other"
        )
    if kinds == {False}:
        if simulate or replicas:
            raise click.UsageError("--target goes without --simulate and --replica")
        return "targets"
    if simulate and replicas:
        raise click.UsageError("--simulate and --replica contradict each other")
    if simulate:
        return "simulated"
    return "engines" if replicas else "emulated"


def make_place(job: Job, *, logs: Path) -> Place:
    """Make the place that the job's setting names.

    Args:
        logs: Directory for the logs of processes; made if there are any.
    """
    setting, workload, fleet = job.setting, job.workload, job.fleet
    match setting.place:
        case "simulated":
            return Simulated(workload, _setup(workload, fleet, setting.seed))
        case "emulated":
            return Emulated(
                workload,
                job.options,
                flags=lambda arm: _replica_flags(workload, fleet, setting.seed, arm),
                num_replicas=fleet.replicas or _DEFAULT_REPLICAS,
                has_pool=fleet.pool_speed is not None,
                logs=logs,
            )
        case "engines":
            return Engines(
                workload, job.options, urls=job.replicas, router_flags=job.router_flags, logs=logs
            )
        case "targets":
            return Targets(workload, job.options)


def _details(
    place: PlaceName, workload: Workload, fleet: Fleet, replicas: Sequence[str]
) -> dict[str, str | int | float | bool]:
    """Describe the place for the report."""
    if place == "targets":
        return {}
    if place == "engines":
        return {"engines": " ".join(replicas)}
    details: dict[str, str | int | float | bool] = {
        "replicas": fleet.replicas or _DEFAULT_REPLICAS,
        "engine": fleet.engine,
    }
    if place == "emulated":
        details["blocks"] = fleet.blocks or _fitting_blocks(workload, fleet)
        details["clock"] = f"{fleet.speed:g}:1"
    else:
        size = _setup(workload, fleet, 0).cache_blocks(workload.block_size)
        details["blocks"] = f"{size} of {workload.block_size} tokens"
        details["load"] = "own pace" if fleet.own_pace or fleet.load is None else fleet.load
    if fleet.pool_speed is not None:
        details["pool speed"] = fleet.pool_speed
    if fleet.cpu_blocks is not None:
        details["CPU tier of a replica, blocks"] = fleet.cpu_blocks
    return details


def _replica_urls(texts: Sequence[str]) -> tuple[str, ...]:
    """Check the base URLs of engines.

    Raises:
        click.BadParameter: one is none.
        click.UsageError: one is named twice.
    """
    urls = tuple(parse_url(text, "--replica") for text in texts)
    if len(set(urls)) < len(urls):
        raise click.UsageError("--replica: name each engine once")
    return urls


def _check_reachable(urls: Sequence[str], headers: dict[str, str]) -> None:
    """Ask every URL once before anything is sent.

    Raises:
        click.UsageError: nothing answers at one of them.
    """
    with httpx.Client(timeout=_LOOK_S, trust_env=False, headers=headers) as client:
        for url in urls:
            try:
                client.get(f"{url}/v1/models")
            except httpx.HTTPError as exc:
                raise click.UsageError(
                    f"nothing answers at {url} ({type(exc).__name__}); is it running, and is the "
                    "port the right one?"
                ) from exc


def _replay_options(
    workload: Workload, given: dict[str, Any], headers: dict[str, str], key: str | None, seed: int
) -> ReplayOptions:
    """Turn live options into those of a replay; the emulated clock speeds arrivals and waits up.

    Raises:
        click.UsageError: options contradict each other.
    """
    loop, rate, factor = given["loop"], given["request_rate"], given["load_factor"]
    if loop == "auto":
        loop = "closed" if any(turn.after for turn in workload.turns) else "open"
    if factor is not None and rate is not None:
        raise click.UsageError("--load-factor and --request-rate contradict each other")
    if loop == "closed" and rate is not None:
        raise click.UsageError("--request-rate needs the open loop: --loop open")
    pace = (factor or 1.0) * given["speed"]
    return ReplayOptions(
        seed=seed,
        loop=loop,
        rate=None if rate is None else rate * given["speed"],
        load_factor=None if rate is not None or pace == 1.0 else pace,
        concurrency=given["concurrency"],
        model=given["model"],
        salt=given["salt"],
        max_tokens=given["max_tokens"],
        headers=headers,
        session_header=given["session_header"] or None,
        api_key=key,
        timeout_s=given["timeout_s"],
        warm_up_turns=given["warm_up"][0],
        warm_up_s=given["warm_up"][1],
    )


def _setup(workload: Workload, fleet: Fleet, seed: int) -> Setup:
    defaults = Setup()
    return Setup(
        num_replicas=fleet.replicas or _DEFAULT_REPLICAS,
        num_blocks=fleet.blocks,
        engine=fleet.engine,
        pool=None if fleet.pool_speed is None else PoolSetup(speed=fleet.pool_speed),
        tier=None if fleet.cpu_blocks is None else TierSetup(num_blocks=fleet.cpu_blocks),
        load=None if fleet.own_pace else fleet.load or defaults.load,
        loop="closed" if any(turn.after for turn in workload.turns) else "open",
        seed=seed,
    )


def _replica_flags(workload: Workload, fleet: Fleet, seed: int, arm: Arm) -> list[str]:
    """Write the options of `warmroute emulate`; the same seed on all: replies do not depend on
    where a prompt goes.
    """
    num_blocks = fleet.blocks or _fitting_blocks(workload, fleet)
    if arm.is_unlimited:
        num_blocks = written_blocks(workload) * -(-workload.block_size // _EMULATED_BLOCK)
    flags: dict[str, Any] = {
        "preset": fleet.engine,
        "speed": fleet.speed,
        "block-size": _EMULATED_BLOCK,
        "num-gpu-blocks": num_blocks,
        "tick-ms": 5.0,  # a first token is at most this late; fewer wake-ups
        "seed": seed,
    }
    per_token_ms = PRESETS[fleet.engine].ms_per_prefill_token
    if fleet.pool_speed is not None:
        flags["ms-per-fetched-token"] = per_token_ms / fleet.pool_speed
    if fleet.cpu_blocks is not None:
        tier = TierSetup(num_blocks=fleet.cpu_blocks)
        flags |= {"cpu-blocks": tier.num_blocks, "ms-per-cpu-token": per_token_ms / tier.speed}
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def _fitting_blocks(workload: Workload, fleet: Fleet) -> int:
    num_tokens = cache_tokens(workload, fleet.replicas or _DEFAULT_REPLICAS)
    return round(num_tokens / _EMULATED_BLOCK) + 2
