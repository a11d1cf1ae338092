"""Options of `warmroute compare` beside the workload, and the places that they apply to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from loadtest.compare.arms import UNLIMITED, Arm
from loadtest.compare.setting import Place
from loadtest.engine_model.time_model import PRESETS
from loadtest.output_options import output_option
from loadtest.runner.parameters import POSITIVE, sending_options

F = TypeVar("F", bound=Callable[..., Any])

_COUNT: Final = click.IntRange(min=1)
_DIRECTORY: Final = click.Path(path_type=Path, file_okay=False)

_COMPARISON: Final = (
    click.option(
        "--policies",
        multiple=True,
        metavar="A,B,…|all",
        help="Policies to compare, each as NAME or NAME:PARAM=VALUE,…; repeatable. unlimited: "
        "kv_aware on modelled caches that never evict, the limit of what a router can do.",
    ),
    click.option(
        "--target",
        "targets",
        multiple=True,
        metavar="NAME=URL",
        help="A variant: a base URL of anything that speaks OpenAI's API; repeatable.",
    ),
    click.option("--simulate", is_flag=True, help="Simulate the fleet: no process, no waiting."),
    click.option(
        "--replica",
        "replica_texts",
        multiple=True,
        metavar="URL",
        help="An engine that runs already, for policies to route to; repeatable. Without it and "
        "without --simulate, emulated replicas are started.",
    ),
    click.option(
        "--baseline",
        metavar="VARIANT",
        help="What the others are held against.  [default: the first]",
    ),
    click.option(
        "--rounds",
        type=_COUNT,
        default=4,
        help="Of all variants; an even number balances the order.",
    ),
    click.option("--slo-ttft", type=POSITIVE, metavar="S", help="For goodput: first token within."),
    click.option(
        "--slo-tbt",
        type=POSITIVE,
        metavar="S",
        help="For goodput: highest mean inter-token latency of a turn.",
    ),
    output_option(is_file=False, help="Keep runs, report.html and report.json there."),
    click.option(
        "--from",
        "source",
        type=_DIRECTORY,
        help="Run nothing: report again what is in a directory that was --output, whole or not.",
    ),
)

_FLEET: Final = (
    click.option("--replicas", type=_COUNT, help="Modelled fleets: how many.  [default: 3]"),
    click.option(
        "--blocks",
        type=_COUNT,
        help="Modelled fleets: one replica's cache; simulated blocks are the workload's, emulated "
        "ones of 16 tokens.  [default: 3M tokens simulated; emulated, together half of what the "
        "sessions write]",
    ),
    click.option(
        "--engine",
        type=click.Choice(list(PRESETS)),
        default="h100x4-70b",
        help="Modelled fleets: GPU and model.",
    ),
    click.option(
        "--pool-speed",
        type=POSITIVE,
        metavar="K",
        help="Modelled fleets: a shared pool; reading a token takes 1/K of the time to prefill it.",
    ),
    click.option(
        "--cpu-blocks",
        type=_COUNT,
        help="Modelled fleets: each replica has a CPU tier of so many blocks; not with a pool.",
    ),
    click.option(
        "--load",
        type=POSITIVE,
        default=0.9,
        help="Simulated: offered work over what the fleet could do without any cache.",
    ),
    click.option(
        "--own-pace", is_flag=True, help="Simulated: the workload's own arrival times instead."
    ),
    click.option(
        "--speed",
        type=POSITIVE,
        default=1.0,
        help="Emulated: clock of engines, arrivals and waits; SLOs stay on the wall's.",
    ),
    click.option("--mooncake", metavar="URL", help="Engines: HTTP address of their pool's master."),
)

_SENDING: Final = (
    click.option(
        "--loop",
        type=click.Choice(["auto", "open", "closed"]),
        default="auto",
        help="Live: turns at their arrival times, or after those before them; auto: closed if any "
        "waits for another.",
    ),
    click.option(
        "--session-header",
        default="x-session-id",
        metavar="NAME",
        help="Live: carries the session id; '': none is sent.",
    ),
)

_MODELLED: Final = frozenset[Place]({"simulated", "emulated"})
_LIVE: Final = frozenset[Place]({"emulated", "engines", "targets"})
_GIVEN: Final = frozenset[Place]({"engines", "targets"})

ONLY: Final[dict[str, frozenset[Place]]] = {
    **dict.fromkeys(("replicas", "blocks", "engine", "pool_speed", "cpu_blocks"), _MODELLED),
    **dict.fromkeys(("load", "own_pace"), frozenset[Place]({"simulated"})),
    "speed": frozenset({"emulated"}),
    "mooncake": frozenset({"engines"}),
    **dict.fromkeys(
        ("loop", "load_factor", "request_rate", "concurrency", "max_tokens", "session_header",
         "timeout_s", "warm_up"),
        _LIVE,
    ),
    **dict.fromkeys(("model", "headers", "api_key_file", "salt"), _GIVEN),
}  # fmt: skip
"""Options that apply to some places only; elsewhere they are refused."""


def compare_options(command: F) -> F:
    """Add all options but the workload's to a click command."""
    command = sending_options(command)
    for option in reversed((*_COMPARISON, *_FLEET, *_SENDING)):
        command = option(command)
    return command


def refuse_elsewhere(ctx: click.Context, place: Place) -> None:
    """Refuse options that would be ignored in a place.

    Raises:
        click.UsageError: one was given; names the places where it means something.
    """
    for name, places in ONLY.items():
        if _is_given(ctx, name) and place not in places:
            raise click.UsageError(_only_for(_flag(ctx, name), place, places))


def refuse_unlimited(arms: Iterable[Arm], place: Place) -> None:
    """Refuse the variant `unlimited` where caches have the size that they have.

    Raises:
        click.UsageError: it is asked for.
    """
    if place not in _MODELLED and any(arm.is_unlimited for arm in arms):
        said = _only_for(UNLIMITED, place, _MODELLED)
        raise click.UsageError(f"{said}; start engines with more blocks, and compare with --target")


def _only_for(what: str, place: Place, places: frozenset[Place]) -> str:
    return f"{what} means nothing for {place} runs, only for: {', '.join(sorted(places))}"


def refuse_with_from(ctx: click.Context) -> None:
    """Refuse whatever `--from` would ignore.

    Raises:
        click.UsageError: something was given beside it that is for runs.
    """
    for name in ctx.params:
        if _is_given(ctx, name) and name not in {"source", "baseline", "slo_ttft", "slo_tbt"}:
            raise click.UsageError(f"--from runs nothing: {_flag(ctx, name)} does not go with it")


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE


def _flag(ctx: click.Context, name: str) -> str:
    opts = next(param.opts for param in ctx.command.params if param.name == name)
    return next(opt for opt in opts if opt.startswith("--"))
