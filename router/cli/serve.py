"""Commands about a configuration: `serve` it, `check` it, list its `options` and `policies`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from policies.registry import POLICIES
from router import config as configuration
from router.config.secrets import read_secret
from router.errors import ConfigError

_WIDE = 160  # columns, where the width of the screen is not known


def _config_options(command: Any) -> Any:
    """Give a command one flag per configuration key."""
    for option in reversed(list(configuration.options())):
        text = option.description
        if option.default not in (None, (), {}, ""):
            shown = option.default
            text += f"  [default: {', '.join(shown) if isinstance(shown, tuple) else shown}]"
        attributes: dict[str, Any] = {"help": text, "default": None}
        name = f"--{option.flag}"
        if option.kind is bool:
            name = f"--{option.flag}/--no-{option.flag}"
        elif option.kind is None or option.joined:
            attributes |= {"multiple": True}
            attributes |= {"metavar": "NAME=VALUE" if option.mapping else option.flag.upper()}
        else:
            attributes |= {"type": option.kind}
        command = click.option(name, "__".join(option.path), **attributes)(command)
    return click.option(
        "-c",
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="WARMROUTE_CONFIG",
        help="YAML file; flags and WARMROUTE_… variables overrule it.",
    )(command)


def _load(config_file: Path | None, flags: dict[str, Any]) -> configuration.Config:
    given: dict[tuple[str, ...], Any] = {}
    for option in configuration.options():
        value = flags.get("__".join(option.path))
        if value is None or value == ():
            continue
        if option.mapping:
            value = configuration.pairs(option, list(value))
        elif option.joined:
            value = ",".join(value)
        given[option.path] = list(value) if isinstance(value, tuple) else value
    return configuration.load(config_file, os.environ, given)


def _require_replicas(config: configuration.Config) -> None:
    if not config.replicas and not config.may_grow:
        raise ConfigError(
            "no replica given; say --replica http://HOST:PORT for each vLLM server, or "
            "--allow-empty to add them at the admin API",
            param="replicas",
        )


@click.command()
@_config_options
def serve(config_file: Path | None, **flags: Any) -> None:
    """Route requests to vLLM replicas; needs nothing but --replica URL.

    Model, tokenizer, block size, capacity, event endpoints and hash contract are found out from
    the replicas themselves. Every option is also a key of the YAML file and a WARMROUTE_… variable
    (`warmroute options` lists them).
    """

    def load() -> configuration.Config:
        config = _load(config_file, flags)
        _require_replicas(config)
        return config

    try:
        config = load()
        from router import run  # late: `--help` should not import an HTTP stack

        run.serve(config, load, config_file)
    except ConfigError as error:
        click.echo(f"warmroute: {error.message}", err=True)
        sys.exit(2)


@click.command()
@_config_options
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0.1, 600),
    default=10.0,
    show_default=True,
    help="seconds to wait for answers; what is silent by then is reported as such",
)
@click.option("--json", "as_json", is_flag=True, help="for machines")
def check(config_file: Path | None, wait_s: float, as_json: bool, **flags: Any) -> None:
    """Say what `serve` would find with the same options, what is wrong, and what to do about it.

    Nothing is changed: no request goes to a model, no lease is taken, Redis is only read, ports
    are tried and left. Engines are asked about themselves, for a replay of their events and for
    the tokens of a short sample; the Mooncake master for its figures and keys.

    Exit status: 0 all is well (notes are well), 1 something is wrong, 2 the configuration is.
    """
    try:
        config = _load(config_file, flags)
        _require_replicas(config)
        password = _redis_password(config)
    except ConfigError as error:
        click.echo(f"warmroute: {error.message}", err=True)
        sys.exit(2)
    import asyncio  # late, as in `serve`
    import logging

    from rich.console import Console

    from router import check as checking

    def waiting(awaited: list[str]) -> None:
        click.echo(f"waiting for {', '.join(awaited)} …", err=True)

    logging.getLogger("router").addHandler(logging.NullHandler())  # the report says it all
    try:
        report = asyncio.run(
            checking.check(
                config,
                redis_password=password,
                admin_token=_admin_token(config),
                wait_s=wait_s,
                on_waiting=waiting,
            )
        )
    except KeyboardInterrupt:
        sys.exit(130)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        checking.render(
            report, Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
        )
    sys.exit(0 if report.is_well else 1)


def _redis_password(config: configuration.Config) -> str | None:
    """Read the password of Redis; what is wrong with its file is a finding of the check."""
    try:
        return configuration.redis_password(config.redis, os.environ)
    except ConfigError:
        return None


def _admin_token(config: configuration.Config) -> str | None:
    """Read the token of a router that may run here; it is not made here."""
    from router.http.admin_token import default_file

    try:
        return read_secret(config.admin.token_file or default_file(os.environ), "admin.token_file")
    except ConfigError:
        return None


@click.command()
def options() -> None:
    """List every configuration key with its flag, variable and default."""
    for option in configuration.options():
        click.echo(".".join(option.path))
        click.echo(f"    {option.description}")
        click.echo(f"    --{option.flag}   {option.variable}   default: {option.default}")


@click.command()
def policies() -> None:
    """List the routing policies: what each does, its formula and parameters."""
    for name, policy in sorted(POLICIES.items()):
        click.secho(name, bold=True)
        click.echo("    " + "\n    ".join((policy.__doc__ or "").strip().splitlines()) + "\n")
