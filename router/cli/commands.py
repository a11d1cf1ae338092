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
from urllib.parse import quote

import click

from policies.registry import POLICIES, create
from router import config as configuration
from router.config.hosts import HostRules
from router.errors import ConfigError
from router.experiments.definition import Experiment
from router.http.admin_token import default_file

COMMANDS = "warmroute.commands"

_WIDE = 160  # columns, where nobody says how wide the screen is


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
    Is everything as it should? warmroute check, with the same options
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


def _require_replicas(config: configuration.Config) -> None:
    if not config.replicas and not (config.admin.allow_empty or config.redis.is_configured):
        raise ConfigError(
            "no replica given; say --replica http://HOST:PORT for each vLLM server, or "
            "--allow-empty to add them at the admin API",
            param="replicas",
        )


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
        _require_replicas(config)
        from router import assembly as lifecycle  # late: `--help` should not import an HTTP stack

        lifecycle.serve(config)
    except ConfigError as error:
        click.echo(f"warmroute: {error.message}", err=True)
        sys.exit(2)


@main.command()
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
        create(config.policy.name, config.policy.params)
        password = _redis_password(config)
    except (ConfigError, ValueError) as error:
        text = error.message if isinstance(error, ConfigError) else f"policy: {error}"
        click.echo(f"warmroute: {text}", err=True)
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
            checking.check(config, redis_password=password, wait_s=wait_s, on_waiting=waiting)
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


@main.command()
def options() -> None:
    """List every configuration key with its flag, variable and default."""
    for option in configuration.options():
        click.echo(".".join(option.path))
        click.echo(f"    {option.description}")
        click.echo(f"    --{option.flag}   {option.variable}   default: {option.default}")


@main.command()
@click.argument("name")
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="tenants' file to add it to; made if there is none",
)
def key(name: str, file: Path | None) -> None:
    """Make a client key for the tenant NAME. It is printed once, and kept nowhere.

    The file (`tenants.file`) has its SHA-256 only. No slow hash is needed: a key has 256 random
    bits, which nothing guesses. With --file the tenant must be new; for a further key of one that
    is there, add the digest that is printed to its keys.
    """
    from router.tenants import entries

    try:
        if file is None:
            made, entry = entries.make(name)
        else:
            made, entry = entries.add(file, name), None
    except ConfigError as error:
        click.echo(f"warmroute: {error.message}", err=True)
        sys.exit(2)
    click.echo(made)
    click.echo(f"{name}: the key is shown this once", err=True)
    if entry is not None:
        click.echo(f"for the tenants' file:\n{entry.rstrip()}", err=True)


@main.command()
def policies() -> None:
    """List the routing policies: what each does, its formula and parameters."""
    for name, policy in sorted(POLICIES.items()):
        click.secho(name, bold=True)
        click.echo("    " + "\n    ".join((policy.__doc__ or "").strip().splitlines()) + "\n")


def _admin_options(command: Any) -> Any:
    """Give a command what it needs to ask the admin port."""
    command = click.option("--json", "as_json", is_flag=True, help="the raw answer")(command)
    command = click.option(
        "--token-file",
        type=click.Path(path_type=Path, exists=True),
        help="admin token; default: the one that a router of yours made on this machine",
    )(command)
    return click.option(
        "--admin", default="http://127.0.0.1:8081", show_default=True, help="admin base URL"
    )(command)


def _ask(
    method: str,
    path: str,
    content: bytes | None,
    *,
    admin: str,
    token_file: Path | None,
    timeout_s: float = 30.0,
) -> Any:
    """Ask the admin port of a running router.

    Raises:
        click.ClickException: it is not there, or refuses; the message says why.
    """
    import httpx

    headers = {"Content-Type": "application/json"}
    token_file = token_file or _own_token(admin)
    try:
        if token_file is not None:
            headers["Authorization"] = f"Bearer {token_file.read_text().strip()}"
        answer = httpx.request(
            method, f"{admin}/admin/{path}", content=content, headers=headers, timeout=timeout_s
        )
        told = answer.json()
        failed = None if answer.is_success else str(told["error"]["message"])
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
    return told


def _own_token(admin: str) -> Path | None:
    """Find the token that `serve` made for this user; it is sent to this machine alone."""
    try:
        is_here = HostRules(["loopback", "localhost"]).refused([admin]) is None
    except ValueError:  # no URL at all: said when it is asked
        return None
    file = default_file(os.environ)
    return file if is_here and file.exists() else None


@main.command()
def token() -> None:
    """Print the admin token that `serve` made for you on this machine, for curl."""
    file = default_file(os.environ)
    try:
        click.echo(file.read_text().strip())
    except OSError as exc:
        raise click.ClickException(
            f"{file}: {exc.strerror}; `warmroute serve` without --admin-token-file makes it"
        ) from exc


@main.command()
@click.argument("file", type=click.File("rb"))
@click.option("--tenant", help="as this tenant's request: with its cache salt, its models")
@_admin_options
def explain(
    file: Any, tenant: str | None, admin: str, token_file: Path | None, as_json: bool
) -> None:
    """Say where the request in FILE (a JSON body, - for stdin) would go now, and why."""
    from router.cli.explain import table

    path = f"explain?tenant={quote(tenant, safe='')}" if tenant is not None else "explain"
    told = _ask("POST", path, file.read(), admin=admin, token_file=token_file)
    click.echo(json.dumps(told, indent=2) if as_json else table(told).rstrip("\n"))


@main.command()
@click.argument("route")
@click.argument("params", nargs=-1, metavar="[PARAM=VALUE]...")
@click.option("--replica", "names", multiple=True, help="only this one, repeatable; default: all")
@_admin_options
def control(
    route: str,
    params: tuple[str, ...],
    names: tuple[str, ...],
    admin: str,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Give engines an order, e.g. `control reset_prefix_cache` or `control sleep level=1`.

    ROUTE is an engine's route: reset_prefix_cache, reset_mm_cache, reset_encoder_cache, sleep,
    wake_up, is_sleeping, release_kv_cache_memory, pause, resume, is_paused, start_profile,
    stop_profile, load_lora_adapter, unload_lora_adapter. Most exist on engines with
    VLLM_SERVER_DEV_MODE=1 only.

    Careful: `sleep` (from level 1 on), `pause` and `reset_prefix_cache reset_external=true` at one
    replica empty the whole pool that it shares with others. Requests sent to a replica that sleeps
    or is paused wait: drain it first.
    """
    order: dict[str, Any] = {"route": route, "params": {}}
    for pair in params:
        name, equals, value = pair.partition("=")
        if not equals:
            raise click.UsageError(f"{pair!r} is not PARAM=VALUE")
        order["params"][name] = value
    if names:
        order["replicas"] = list(names)
    told = _ask(
        "POST",
        "control",
        json.dumps(order).encode(),
        admin=admin,
        token_file=token_file,
        timeout_s=90.0,
    )
    if as_json:
        click.echo(json.dumps(told, indent=2))
    for each in () if as_json else told["replicas"]:
        answer = json.dumps(each["answer"]) if each["answer"] is not None else ""
        click.echo(f"{each['name']}: {each['error'] or each['status']} {answer}".rstrip())
    if any(each["error"] for each in told["replicas"]):
        sys.exit(1)


@main.group()
def replicas() -> None:
    """List, add, drain and remove replicas of a running router (of all that share its Redis)."""


@replicas.command("list")
@_admin_options
def list_replicas(admin: str, token_file: Path | None, as_json: bool) -> None:
    """Show every replica: whether it is used, what it has in flight, how well it is known."""
    from router.cli.replicas import table

    told = _ask("GET", "replicas", None, admin=admin, token_file=token_file)
    click.echo(json.dumps(told, indent=2) if as_json else table(told).rstrip("\n"))


@replicas.command("add")
@click.argument("url")
@click.option("--name", help="in metrics and headers; default: the next free r1, r2, …")
@click.option("--events", multiple=True, help="KV event endpoint, one per rank")
@click.option("--replay", multiple=True, help="replay endpoint, one per rank")
@_admin_options
def add_replica(
    url: str,
    name: str | None,
    events: tuple[str, ...],
    replay: tuple[str, ...],
    admin: str,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Add the vLLM server at URL."""
    order = {"url": url, "name": name, "events": events, "replay": replay}
    content = json.dumps({key: value for key, value in order.items() if value}).encode()
    told = _ask("POST", "replicas", content, admin=admin, token_file=token_file)
    click.echo(json.dumps(told) if as_json else f"{told['name']}: {told['url']}")


@replicas.command("drain")
@click.argument("name")
@_admin_options
def drain_replica(name: str, admin: str, token_file: Path | None, as_json: bool) -> None:
    """Send NAME no new requests; those in flight end."""
    _drain(name, True, admin, token_file, as_json)


@replicas.command("undrain")
@click.argument("name")
@_admin_options
def undrain_replica(name: str, admin: str, token_file: Path | None, as_json: bool) -> None:
    """Send NAME requests again."""
    _drain(name, False, admin, token_file, as_json)


def _drain(name: str, draining: bool, admin: str, token_file: Path | None, as_json: bool) -> None:
    content = json.dumps({"draining": draining}).encode()
    path = f"replicas/{quote(name, safe='')}/drain"
    told = _ask("POST", path, content, admin=admin, token_file=token_file)
    said = "gets no new requests" if draining else "gets requests again"
    click.echo(json.dumps(told) if as_json else f"{name} {said}")


@replicas.command("remove")
@click.argument("name")
@click.option("--now", is_flag=True, help="do not wait for its answers in flight")
@_admin_options
def remove_replica(
    name: str, now: bool, admin: str, token_file: Path | None, as_json: bool
) -> None:
    """Let NAME go, when its answers in flight are done."""
    path = f"replicas/{quote(name, safe='')}" + ("?now=1" if now else "")
    told = _ask("DELETE", path, None, admin=admin, token_file=token_file)
    said = "is removed" if now else "is removed as soon as its answers in flight are done"
    click.echo(json.dumps(told) if as_json else f"{name} {said}")


@main.group()
def experiments() -> None:
    """List, start, ramp, stop and remove experiments of a running router (of all that share its
    Redis)."""


def _told(told: Any, as_json: bool) -> None:
    """Print what the admin port told about experiments."""
    from router.cli.experiments import table

    listed = told["experiments"] if "experiments" in told else [told]
    click.echo(json.dumps(told, indent=2) if as_json else table(listed).rstrip("\n"))


@experiments.command("list")
@click.argument("name", required=False)
@_admin_options
def list_experiments(name: str | None, admin: str, token_file: Path | None, as_json: bool) -> None:
    """Show every experiment, or NAME: its arms, their shares, what speaks against them."""
    path = "experiments" + (f"/{quote(name, safe='')}" if name else "")
    _told(_ask("GET", path, None, admin=admin, token_file=token_file), as_json)


@experiments.command("start")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@_admin_options
def start_experiment(file: Path, admin: str, token_file: Path | None, as_json: bool) -> None:
    """Start the experiment that FILE (YAML or JSON) defines."""
    try:
        tree = configuration.read_yaml(file, Experiment)
        configuration.experiment_of(tree)
    except ConfigError as error:
        click.echo(f"warmroute: {file}: {error.message.removeprefix(f'{file}: ')}", err=True)
        sys.exit(2)
    content = json.dumps(tree, default=str).encode()
    _told(_ask("POST", "experiments", content, admin=admin, token_file=token_file), as_json)


@experiments.command("ramp")
@click.argument("name")
@click.argument("shares", nargs=-1, required=True, metavar="ARM=SHARE...")
@_admin_options
def ramp_experiment(
    name: str, shares: tuple[str, ...], admin: str, token_file: Path | None, as_json: bool
) -> None:
    """Set the shares of arms of NAME, e.g. `ramp alpha control=0.5 greedy=0.5`.

    Arms that are not named keep theirs; the definition's own ramp is over.
    """
    wanted: dict[str, float] = {}
    for pair in shares:
        arm, _, share = pair.partition("=")
        try:
            wanted[arm] = float(share)
        except ValueError as exc:
            raise click.UsageError(f"{pair!r} is not ARM=SHARE, a share from 0 to 1") from exc
    content = json.dumps({"shares": wanted}).encode()
    path = f"experiments/{quote(name, safe='')}/ramp"
    _told(_ask("POST", path, content, admin=admin, token_file=token_file), as_json)


@experiments.command("stop")
@click.argument("name")
@click.option("--arm", help="stop this arm only")
@click.option("--reason", help="why, for the log and for others")
@_admin_options
def stop_experiment(
    name: str,
    arm: str | None,
    reason: str | None,
    admin: str,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """End NAME: its traffic is the default policy's again. It stays listed until it is removed."""
    order = {"arm": arm, "reason": reason}
    content = json.dumps({key: value for key, value in order.items() if value}).encode()
    path = f"experiments/{quote(name, safe='')}/stop"
    _told(_ask("POST", path, content, admin=admin, token_file=token_file), as_json)


@experiments.command("remove")
@click.argument("name")
@_admin_options
def remove_experiment(name: str, admin: str, token_file: Path | None, as_json: bool) -> None:
    """End NAME, and forget it."""
    path = f"experiments/{quote(name, safe='')}"
    told = _ask("DELETE", path, None, admin=admin, token_file=token_file)
    click.echo(json.dumps(told) if as_json else f"{name} is removed")


# transformers announces at import that there is no torch; here that is meant.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
