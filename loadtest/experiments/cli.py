"""`warmroute report` and `warmroute redecide`.

Exit status: 0 done; 1 the experiment is broken, or records are decided otherwise now; 2 the input
is wrong; 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console

from loadtest.experiments.records import RecordsError
from loadtest.extras import MissingExtra, need
from loadtest.output_options import json_options

_METRICS: Final = ("ttft", "tbt", "total", "waited", "computed", "cached", "pool", "errors", "gone")
_WIDE: Final = 160  # columns, if the width of the screen is unknown


class _Share(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """A share: 5 %, 5%, 0.05."""

    name = "share"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return a share above 0 and below 1."""
        try:
            text = str(value).strip()
            share = float(text.rstrip("% ")) / 100 if text.endswith("%") else float(text)
        except ValueError:
            self.fail(f"{value!r} is not a share such as 5% or 0.05", param, ctx)
        if not 0 < share < 1:
            self.fail(f"{value!r} is not between 0 and 100 %", param, ctx)
        return share


@click.command()
@click.argument("files", metavar="RECORDS...", nargs=-1, required=True)
@click.option("--experiment", "name", help="Which one; needed where records are of several.")
@click.option("--trial", metavar="ID", help="Which definition of it; default: the newest.")
@click.option(
    "--metric",
    type=click.Choice(_METRICS),
    default="ttft",
    show_default=True,
    help="What decides. Choose before you look; the tables show all.",
)
@click.option(
    "--effect",
    type=_Share(),
    default="10%",
    show_default=True,
    help="A difference worth finding (points, for shares); tunes the sequence, sets the needs.",
)
@click.option(
    "--margin",
    type=_Share(),
    default="5%",
    show_default=True,
    help="A difference too small to matter; within it variants are called equivalent.",
)
@click.option(
    "--alpha",
    type=_Share(),
    default="0.05",
    show_default=True,
    help="Chance of a wrong verdict, with any number of looks.",
)
@click.option("--skip-bad", is_flag=True, help="Leave out and count lines that are no records.")
@json_options
def report(
    files: tuple[str, ...],
    name: str | None,
    trial: str | None,
    metric: str,
    effect: float,
    margin: float,
    alpha: float,
    skip_bad: bool,
    as_json: bool,
    json_file: Path | None,
) -> None:
    """Report which variant of a live experiment is better.

    RECORDS are decision records (`log.decisions`) of all routers: files, globs or directories,
    plain or .gz. Look as often as you like, also while it runs: the verdict holds at every look.

    \b
    warmroute report decisions-*.jsonl --experiment lighter-alpha
    warmroute report records/ --metric total -o report.json
    """
    with _ending_in_order("reading records"):
        need("scipy")  # now, and not after minutes of reading
        from loadtest.experiments.comparison import Options  # late: numpy
        from loadtest.experiments.records import load
        from loadtest.experiments.report import make_report, show

        options = Options(metric=metric, alpha=alpha, effect=effect, margin=margin)
        records = load(files, skip_bad=skip_bad)
        made = make_report(records, name=name, trial=trial, options=options)
        written = msgspec.json.format(msgspec.json.encode(made), indent=1)
        if json_file is not None:
            _write(json_file, written)
    click.echo(written) if as_json else show(made, _console())
    sys.exit(0 if made.is_sound else 1)


@click.command()
@click.argument("files", metavar="RECORDS...", nargs=-1, required=True)
@click.option(
    "--policy",
    metavar="NAME[:PARAM=VALUE…]",
    help="Also ask this policy.",
)
@click.option("--skip-bad", is_flag=True, help="Leave out and count lines that are no records.")
@json_options
def redecide(
    files: tuple[str, ...],
    policy: str | None,
    skip_bad: bool,
    as_json: bool,
    json_file: Path | None,
) -> None:
    """Decide recorded requests again.

    A record holds all that its policy saw, so the same policy must choose the same. With --policy,
    also what another one would have chosen, and what it would have gained by prediction.
    """
    from policies.naming import label_of, parse

    try:
        other = parse(policy) if policy is not None else None
    except ValueError as exc:
        raise click.BadParameter(str(exc), param_hint="--policy") from exc
    with _ending_in_order("deciding again"):
        from loadtest.experiments.records import resolve
        from loadtest.experiments.redecide import redecide as decide_again
        from loadtest.experiments.redecide import show

        label = label_of(other) if other is not None else ""
        found = decide_again(resolve(files), other=other, other_label=label, skip_bad=skip_bad)
        written = msgspec.json.format(msgspec.json.encode(found), indent=1)
        if json_file is not None:
            _write(json_file, written)
    click.echo(written) if as_json else show(found, _console())
    sys.exit(0 if found.agrees else 1)


@contextmanager
def _ending_in_order(what: str) -> Iterator[None]:
    """Show what is going on; turn errors and Ctrl-C into a message and a status."""
    try:
        with Console(stderr=True).status(what):
            yield
    except (RecordsError, MissingExtra) as exc:
        click.echo(f"Error: {exc}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo("Interrupted; nothing was written", err=True)
        sys.exit(130)


def _write(path: Path, content: bytes) -> None:
    """Write a file.

    Raises:
        RecordsError: it cannot be written.
    """
    try:
        path.write_bytes(content)
    except OSError as exc:
        raise RecordsError(f"cannot write {path}: {exc.strerror}") from exc


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDE)
