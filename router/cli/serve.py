"""Commands about a configuration: `serve` it, `check` it, list its `options` and `policies`.

`tenant-key` adds a client key to the tenants' file that a configuration names.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct

from policies.refusals import meant
from policies.registry import POLICIES
from router import config as configuration
from router.base.errors import ConfigError
from router.cli.banner import greeter
from router.cli.config_options import (
    ConfigCommand,
    config_options,
    default_text,
    given_arguments,
    load,
)
from router.cli.terminal import drawing, drawn, refuse
from router.config.loader import json_schema

_WIDE = 160  # columns, where the width of the screen is not known


def _require_replicas(config: configuration.Config) -> None:
    if not config.replicas and not config.may_grow:
        raise ConfigError(
            "no replica given; say --replica http://HOST:PORT for each vLLM server, or "
            "--allow-empty to add them at the admin API",
            param="replicas",
        )


@click.command(cls=ConfigCommand)
@config_options
def serve(config_file: Path | None, settings: tuple[str, ...], **flags: Any) -> None:
    """Route requests to vLLM replicas.

    Only --replica URL is required. The router asks the replicas for everything else: model,
    tokenizer, block size, cache size and event endpoints. Every setting is a key of the YAML file,
    a WARMROUTE_… variable and --set KEY=VALUE (`warmroute options` lists them).
    """

    def read() -> configuration.Config:
        config = load(config_file, settings, flags)
        _require_replicas(config)
        return config

    try:
        config, arguments = read(), given_arguments()
        from router import run  # late: `--help` should not import an HTTP stack

        run.serve(config, read, config_file, greet=greeter(config, arguments))
    except ConfigError as error:
        refuse(error)


@click.command(cls=ConfigCommand)
@config_options
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0.1, 600),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time to wait for answers; what is silent by then is reported as such.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def check(
    config_file: Path | None,
    settings: tuple[str, ...],
    wait_s: float,
    as_json: bool,
    **flags: Any,
) -> None:
    """Check replicas, events, tokenizer, Redis and ports.

    Give it the options of `serve`. It reports what `serve` would find, what is wrong, and which
    flag to set.

    Nothing is changed: no request goes to a model, no lease is taken, Redis is only read, ports
    are tried and left. Engines are asked about themselves, for a replay of their events and for
    the tokens of a short sample. The Mooncake master is asked for its figures and keys.

    Exit status: 0 all is well (notes are well), 1 something is wrong, 2 the configuration is.
    """
    import asyncio  # late, as in `serve`
    import logging

    from router import check as checking

    logging.getLogger("router").addHandler(logging.NullHandler())  # the report says it all
    try:
        config = load(config_file, settings, flags)
        _require_replicas(config)
        password = configuration.redis_password(config.redis, os.environ)
        report = asyncio.run(checking.check(config, redis_password=password, wait_s=wait_s))
    except ConfigError as error:
        refuse(error)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        console = drawing(_WIDE)
        checking.render(report, console)
        click.echo(drawn(console).rstrip("\n"))
    sys.exit(0 if report.is_well else 1)


@click.command()
@click.argument("words", metavar="[FILTER]...", nargs=-1)
def options(words: tuple[str, ...]) -> None:
    """List every configuration key: option, variable, default.

    FILTER shows only keys with this text in their name, option or variable. If there are none, it
    shows those with the text in their description.
    """
    every = configuration.options()
    shown = [option for option in every if _has(_names(option), words)]
    shown = shown or [option for option in every if _has(option.description, words)]
    if not shown:
        parts = {part for option in every for part in option.key.split(".")}
        near = [each for word in words for each in difflib.get_close_matches(word, parts, n=1)]
        raise click.ClickException(
            f"no option has {' and '.join(map(repr, words))} in its name or description; "
            + (f"did you mean {' '.join(near)}? " if near else "")
            + "`warmroute options` lists all"
        )
    for option in shown:
        click.echo(option.key)
        click.echo(f"    {option.description}")
        how = f"{option.argument}{'' if option.flag else '=…'}   {option.variable}"
        how = "only in the file" if option.only_in_file else how
        click.echo(f"    {how}   default: {default_text(option)}")


def _names(option: configuration.Option) -> str:
    return f"{option.key} {option.argument} {option.variable}"


def _has(text: str, words: tuple[str, ...]) -> bool:
    return all(word.lower() in text.lower() for word in words)


@click.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file.

    Editors check and complete a file with it. Its first line is then
    `# yaml-language-server: $schema=warmroute.schema.json`.
    """
    click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


def _lines_of(policy: type[Struct]) -> list[str]:
    """Return a policy's description, and a line for each parameter."""
    lines = inspect.cleandoc(policy.__doc__ or "(no description)").splitlines()
    described = msgspec.json.schema(policy)["$defs"][policy.__name__]["properties"]
    for field in msgspec.structs.fields(policy):
        text = described[field.name].get("description", "")
        lines += ["", f"--policy-param {field.name}={field.default:g}", f"    {text}"]
    return [lines[0], *(f"    {line}".rstrip() for line in lines[1:])]


@click.command()
@click.argument("name", required=False)
def policies(name: str | None) -> None:
    """List the routing policies and their parameters.

    NAME shows only this policy.
    """
    if name is not None and name not in POLICIES:
        raise click.ClickException(
            f"unknown policy: {name!r}{meant(name, POLICIES)} (allowed: {', '.join(POLICIES)})"
        )
    for each in sorted(POLICIES) if name is None else (name,):
        policy = POLICIES[each]
        click.secho(each, bold=True)
        click.echo("    " + "\n".join(_lines_of(policy)) + "\n")


@click.command("tenant-key")
@click.argument("name")
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Tenants' file to add it to; created if there is none.",
)
def tenant_key(name: str, file: Path | None) -> None:
    """Create a client key for the tenant NAME.

    The key is printed once and kept nowhere. The file (`tenants.file`) has its SHA-256 only. No
    slow hash is needed: a key has 256 random bits, which nothing guesses. With --file the tenant
    must be new; for a further key of a known tenant, add the printed digest to its keys.
    """
    from router.tenants.tenants import add, make

    try:
        if file is None:
            created, entry = make(name)
        else:
            created, entry = add(file, name), None
    except ConfigError as error:
        refuse(error)
    click.echo(created)
    click.echo(f"{name}: the key is shown this once", err=True)
    if entry is not None:
        click.echo(f"for the tenants' file:\n{entry.rstrip()}", err=True)
