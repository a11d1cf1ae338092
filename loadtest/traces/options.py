"""The workload on a command line, the same for every command that takes one.

    @click.command()
    @workload_options
    def replay(**options: Any) -> None:
        workload = load_workload(**options)

`seed` is among the options: a command that needs it too names it as a parameter of its own and
hands it on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import click
from msgspec.structs import replace
from rich.console import Console

from loadtest.generated import GENERATORS
from loadtest.generated.agents import Pauses
from loadtest.timing import Timing, scaled
from loadtest.traces.errors import WorkloadError
from loadtest.traces.reading import read_workload
from loadtest.workload import Workload

F = TypeVar("F", bound=Callable[..., Any])

_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "sessions": ("num_sessions", "num_bursts"),
    "turns": ("num_turns",),
    "siblings": ("num_siblings",),
    "context_tokens": ("num_context_tokens",),
    "shared_tokens": ("num_shared_tokens",),
    "scale_tokens": ("scale_tokens",),
    "live": ("num_live",),
    "seconds": ("span_s",),
    "pauses": ("pauses",),
    "rate": ("rate",),
    "block_size": ("block_size",),
}
"""Option to the field of a generator that it sets, whichever the generator has."""

_FOR_ALL: Final = frozenset({"rate", "block_size"})  # of traces, too
_FOR_TRACES: Final = {"skip_bad": False, "spread": 0.0}
_COUNT: Final = click.IntRange(min=1)
_POSITIVE: Final = click.FloatRange(min=0.0, min_open=True)

_OPTIONS: Final = (
    click.option(
        "--trace",
        type=click.Path(path_type=Path, dir_okay=False),
        help="A recorded workload: Mooncake's lines, decision records or messages, JSON Lines.",
    ),
    click.option("--skip-bad", is_flag=True, help="Leave bad lines out and count them."),
    click.option(
        "--spread",
        type=click.FloatRange(min=0.0),
        default=0.0,
        show_default=True,
        metavar="SECONDS",
        help="Spread arrivals over a window; 3 for Mooncake's traces, which are rounded to 3 s.",
    ),
    click.option(
        "--tokenizer",
        type=click.Path(path_type=Path, exists=True),
        help="A tokenizer.json or its directory, to count text and to write it (`replay --api "
        "chat`). [default: bundled]",
    ),
    click.option(
        "--generate",
        type=click.Choice(list(GENERATORS)),
        help="A generated workload: agents with tools, chats of persons, both (mixed), or bursts "
        "of siblings that share a new prefix.",
    ),
    click.option("--sessions", type=_COUNT, help="Sessions to generate; for siblings: bursts."),
    click.option("--turns", type=_COUNT, help="Turns of a session; the median for agents."),
    click.option(
        "--live", type=_COUNT, help="Agents at work at any time: one starts when another ends."
    ),
    click.option(
        "--seconds", type=_POSITIVE, help="How long --live agents are at work. [default: 600]"
    ),
    click.option(
        "--pauses",
        type=click.Choice(get_args(Pauses)),
        help="Waits of agents: tools, 5.2 s in the median, or short, 0.3 s (P90 10 s).",
    ),
    click.option("--siblings", type=_COUNT, help="Siblings in one burst."),
    click.option("--context-tokens", type=_COUNT, help="Tokens that one burst shares."),
    click.option(
        "--shared-tokens", type=_COUNT, help="Tokens of the prompt that all sessions share."
    ),
    click.option(
        "--scale-tokens",
        type=_POSITIVE,
        help="Scales all token counts of agents and chats; 0.1 is a tenth.",
    ),
    click.option(
        "--rate",
        type=_POSITIVE,
        help="Sessions (siblings: bursts) started per second, as a Poisson process; inf: all at "
        "once. For a trace: only if it has no times.",
    ),
    click.option("--requests", type=_COUNT, help="Only the first N requests."),
    click.option(
        "--block-size", type=_COUNT, help="Tokens of a block. [default: the format's own, or 512]"
    ),
    click.option(
        "--scale-time",
        type=_POSITIVE,
        default=1.0,
        show_default=True,
        help="Stretch arrivals and waits; 0.5: twice as fast.",
    ),
    click.option(
        "--seed", type=int, default=0, show_default=True, help="Seed of everything that is drawn."
    ),
)


def workload_options(command: F) -> F:
    """Add the options that `load_workload` takes to a click command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def load_workload(
    *,
    trace: Path | None = None,
    generate: str | None = None,
    requests: int | None = None,
    scale_time: float = 1.0,
    seed: int = 0,
    console: Console | None = None,
    **options: Any,
) -> Workload:
    """Read or generate what a command line asks for, with a spinner on a terminal.

    Raises:
        click.UsageError: The options do not go together.
        WorkloadError: The trace is wrong; the message names file, line and field.
    """
    if (trace is None) == (generate is None):
        raise click.UsageError(f"give either --trace FILE or --generate {'|'.join(GENERATORS)}")
    given = {name: value for name, value in options.items() if value is not None}
    _check_numbers({**given, "scale_time": scale_time})
    unknown = given.keys() - _FIELDS.keys() - _FOR_TRACES.keys() - {"tokenizer"}
    if unknown:
        raise TypeError(f"no workload options: {', '.join(sorted(unknown))}")
    if trace is not None:
        timing = Timing(
            spread_s=given.get("spread", 0.0),
            rate=given.get("rate", Timing().rate),
            scale_time=scale_time,
            seed=seed,
        )
        return _read(trace, given, requests, timing, console or Console(stderr=True))
    assert generate is not None
    with (console or Console(stderr=True)).status(f"generating {generate}"):
        return scaled(_generate(generate, given, requests, seed), scale_time)


def _check_numbers(given: dict[str, Any]) -> None:
    """Refuse what is a float but no number; an infinite rate starts everything at once."""
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            if name == "rate" and value > 0:
                continue
            raise click.UsageError(f"{_flags([name])} is {value}; allowed: a finite number")


def _read(
    trace: Path,
    given: dict[str, Any],
    requests: int | None,
    timing: Timing,
    console: Console,
) -> Workload:
    made = [name for name in given if name in _FIELDS.keys() - _FOR_ALL]
    if made:
        raise click.UsageError(f"{_flags(made)} only with --generate")
    with console.status(f"reading {trace.name}"):
        return read_workload(
            trace,
            skip_bad=given.get("skip_bad", False),
            max_requests=requests,
            block_size=given.get("block_size"),
            tokenizer=given.get("tokenizer"),
            timing=timing,
        )


def _generate(name: str, given: dict[str, Any], requests: int | None, seed: int) -> Workload:
    read = [key for key, unset in _FOR_TRACES.items() if given.get(key, unset) != unset]
    if read:
        raise click.UsageError(f"{_flags(read)} only with --trace")
    generator = GENERATORS[name]
    fields: dict[str, Any] = {"seed": seed}
    for key, value in given.items():
        field = next((f for f in _FIELDS.get(key, ()) if f in generator.__struct_fields__), None)
        if field is not None:
            fields[field] = value
        elif key in _FIELDS:
            raise click.UsageError(f"--generate {name} has no {_flags([key])}")
    workload = generator(**fields).workload()
    return replace(workload, turns=workload.turns[:requests])


def _flags(names: list[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


__all__ = ["WorkloadError", "load_workload", "workload_options"]
