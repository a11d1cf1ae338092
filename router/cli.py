"""The command line. Commands that need more than the router (emulate, demo, …) are entry points
of the group `warmroute.commands`, loaded when called: router does not import loadtest.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import click

from policies.registry import POLICIES
from router import config as configuration
from router.errors import ConfigError

COMMANDS = "warmroute.commands"


class _Group(click.Group):
    """A group whose further commands are found by name and imported late."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(
            {*super().list_commands(ctx), *(e.name for e in entry_points(group=COMMANDS))}
        )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for entry in entry_points(group=COMMANDS, name=cmd_name):
            command: click.Command = entry.load()
            return command
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            known = ", ".join(self.list_commands(ctx))
            raise click.UsageError(f"{exc.message} Commands: {known}.", ctx) from exc


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("warmroute"), message="warmroute %(version)s")
def main() -> None:
    """Cache-aware routing in front of vLLM: every turn goes where its KV cache is.

    \b
    Try it without a GPU:       warmroute demo
    In front of two engines:    warmroute serve --replica http://HOST:8001 --replica http://HOST:8002
    """


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
        elif option.kind is None:
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
        given[option.path] = list(value) if isinstance(value, tuple) else value
    return configuration.load(config_file, os.environ, given)


@main.command()
@_config_options
def serve(config_file: Path | None, **flags: Any) -> None:
    """Route requests to vLLM replicas; needs nothing but --replica URL.

    Model, tokenizer, block size, capacity, event endpoints and hash contract are found out from
    the replicas themselves. Every option is also a key of the YAML file and a WARMROUTE_… variable
    (`warmroute options` lists them).
    """
    try:
        config = _load(config_file, flags)
        if not config.replicas:
            raise ConfigError(
                "no replica given; say --replica http://HOST:PORT for each vLLM server",
                param="replicas",
            )
        from router import lifecycle  # late: `--help` should not import an HTTP stack

        lifecycle.serve(config)
    except ConfigError as error:
        click.echo(f"warmroute: {error.message}", err=True)
        sys.exit(2)


@main.command()
def options() -> None:
    """List every configuration key with its flag, variable and default."""
    for option in configuration.options():
        click.echo(".".join(option.path))
        click.echo(f"    {option.description}")
        click.echo(f"    --{option.flag}   {option.variable}   default: {option.default}")


@main.command()
def policies() -> None:
    """List the routing policies: what each does, its formula and parameters."""
    for name, policy in sorted(POLICIES.items()):
        click.secho(name, bold=True)
        click.echo("    " + "\n    ".join((policy.__doc__ or "").strip().splitlines()) + "\n")


@main.command()
@click.argument("file", type=click.File("rb"))
@click.option("--admin", default="http://127.0.0.1:8081", show_default=True, help="admin base URL")
@click.option("--token-file", type=click.Path(path_type=Path, exists=True), help="admin token")
@click.option("--json", "as_json", is_flag=True, help="the raw answer")
def explain(file: Any, admin: str, token_file: Path | None, as_json: bool) -> None:
    """Say where the request in FILE (a JSON body, - for stdin) would go now, and why."""
    import httpx

    from router.explaining import table

    headers = {"Content-Type": "application/json"}
    try:
        if token_file is not None:
            headers["Authorization"] = f"Bearer {token_file.read_text().strip()}"
        answer = httpx.post(
            f"{admin}/admin/explain", content=file.read(), headers=headers, timeout=30.0
        )
        told = answer.json()
        failed = None if answer.status_code == 200 else str(told["error"]["message"])
    except OSError as exc:
        raise click.ClickException(f"{token_file}: {exc.strerror}") from exc
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise click.ClickException(
            f"{admin}: {exc}; is `warmroute serve` running, with this admin port?"
        ) from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise click.ClickException(f"{admin}: not the admin port of `warmroute serve`") from exc
    if failed is not None:
        raise click.ClickException(failed)
    click.echo(json.dumps(told, indent=2) if as_json else table(told).rstrip("\n"))


# transformers announces at import that there is no torch; here that is meant.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

if __name__ == "__main__":
    main()
