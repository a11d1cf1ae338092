"""`warmroute experiments`: the experiments of a running router."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from router import config as configuration
from router.base.errors import ConfigError
from router.cli.admin import Admin, admin_options, echo_json
from router.cli.terminal import drawing, drawn, refuse


@click.group()
def experiments() -> None:
    """List, start, ramp, stop and remove experiments.

    An order holds for all routers that share the Redis of the one that is asked.
    """


def _show(fields: Any, admin: Admin) -> None:
    """Print what the admin port answered about experiments."""
    listed = fields["experiments"] if "experiments" in fields else [fields]
    echo_json(fields) if admin.as_json else click.echo(table(listed).rstrip("\n"))


@experiments.command("list")
@click.argument("name", required=False)
@admin_options
def list_experiments(name: str | None, admin: Admin) -> None:
    """Show all experiments, or NAME."""
    path = "experiments" + (f"/{quote(name, safe='')}" if name else "")
    _show(admin.ask("GET", path), admin)


@experiments.command("start")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@admin_options
def start_experiment(file: Path, admin: Admin) -> None:
    """Start the experiment in FILE (YAML or JSON)."""
    try:
        tree = configuration.experiment_file(file)
    except ConfigError as error:
        refuse(error)
    _show(admin.ask("POST", "experiments", tree), admin)


@experiments.command("ramp")
@click.argument("name")
@click.argument("shares", nargs=-1, required=True, metavar="VARIANT=SHARE...")
@admin_options
def ramp_experiment(name: str, shares: tuple[str, ...], admin: Admin) -> None:
    """Set the shares of the variants of NAME.

    For example: `warmroute experiments ramp alpha control=0.5 greedy=0.5`. Variants that are not
    named keep theirs; the definition's own ramp is over.
    """
    wanted: dict[str, float] = {}
    for pair in shares:
        arm, _, share = pair.partition("=")
        try:
            wanted[arm] = float(share)
        except ValueError as exc:
            raise click.UsageError(f"{pair!r} is not VARIANT=SHARE, a share from 0 to 1") from exc
    path = f"experiments/{quote(name, safe='')}/ramp"
    _show(admin.ask("POST", path, {"shares": wanted}), admin)


@experiments.command("stop")
@click.argument("name")
@click.option("--variant", "arm", metavar="NAME", help="Stop only this variant.")
@click.option("--arm", "old_name", hidden=True)
@click.option("--reason", help="The reason, for the log and for other people.")
@admin_options
def stop_experiment(
    name: str, arm: str | None, old_name: str | None, reason: str | None, admin: Admin
) -> None:
    """End NAME, which stays listed.

    Its traffic is the default policy's again.
    """
    order = {key: value for key, value in (("arm", arm or old_name), ("reason", reason)) if value}
    path = f"experiments/{quote(name, safe='')}/stop"
    _show(admin.ask("POST", path, order), admin)


@experiments.command("remove")
@click.argument("name")
@admin_options
def remove_experiment(name: str, admin: Admin) -> None:
    """End NAME and remove it from the list."""
    path = f"experiments/{quote(name, safe='')}"
    fields = admin.ask("DELETE", path)
    click.echo(json.dumps(fields) if admin.as_json else f"{name} is removed")


def table(experiments: list[dict[str, Any]]) -> str:
    """Draw each experiment: its definition, its status, and a row for each variant."""
    from rich.table import Table  # late: `--help` should not wait for it

    console = drawing()
    if not experiments:
        console.print("no experiments; start one: warmroute experiments start FILE")
    for experiment in experiments:
        console.print(_head(experiment), style="bold")
        for line in _lines(experiment):
            console.print("  " + line)
        grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for name in ("  variant", "policy", "share", "guardrails"):
            grid.add_column(name)
        for arm in experiment["arms"]:
            grid.add_row(*_row(arm))
        console.print(grid)
    return drawn(console)


def _head(experiment: dict[str, Any]) -> str:
    definition = experiment["definition"]
    models = ", ".join(definition["models"]) or "all models"
    return f"{experiment['name']}: {experiment['standing']}, {definition['design']}, {models}"


def _lines(experiment: dict[str, Any]) -> Iterator[str]:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(experiment["started_at"]))
    yield f"since {began}"
    if experiment["ended"] is not None:
        yield f"ended: {experiment['ended']['reason']}"
    if experiment["overruled_by"] is not None:
        yield f"waits: {experiment['overruled_by']!r} claimed this traffic first"
    slot = experiment["slot"]
    if slot is not None:
        left_s = max(0.0, slot["ends_at"] - time.time())
        yield f"slot {slot['number']}: {slot['arm'] or 'no variant'}, {left_s:.0f} s left"


def _row(arm: dict[str, Any]) -> tuple[str, ...]:
    params = "".join(f":{name}={value}" for name, value in arm["params"].items())
    control = " (control)" if arm["is_control"] else ""
    share = f"{arm['share']:.1%}" if arm["stopped"] is None else "stopped"
    return f"  {arm['name']}{control}", arm["policy"] + params, share, _guardrails(arm)


def _guardrails(arm: dict[str, Any]) -> str:
    """Return how near each guardrail is to a stop, or the reason of the stop."""
    if arm["stopped"] is not None:
        return str(arm["stopped"]["reason"])
    texts = [
        f"{each['guardrail']} {max(0.0, each['log_wealth'] / each['needed']):.0%} "
        f"of {each['num_samples']:,}"
        for each in arm["guardrails"]
    ]
    return ", ".join(texts) or "none"
