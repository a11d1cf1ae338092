"""One flag for each configuration key, and help that shows the most used ones first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click

from router import config as configuration
from router.config import SECTIONS, Option

_FIRST: Final = (
    ("replicas",),
    ("listen", "port"),
    ("admin", "port"),
    ("policy", "name"),
    ("queue", "mode"),
    ("redis", "url"),
    ("log", "level"),
)
"""Keys whose flags `--help` shows, after --config; `--help-all` shows the others."""

METAVARS: Final = {
    "replicas": "URL",
    "discovery.dns": "HOST:PORT",
    "discovery.dns_servers": "ADDRESS:PORT",
    "discovery.hosts": "PATTERN",
    "discovery.kubernetes": "[NAMESPACE/]SERVICE[:PORT]",
    "discovery.kubernetes_api": "URL",
    "discovery.kubernetes_credentials": "DIRECTORY",
    "listen.host": "ADDRESS",
    "listen.trusted": "NETWORK",
    "admin.host": "ADDRESS",
    "admin.hosts": "HOST",
    "admin.replica_hosts": "PATTERN",
    "policy.name": "NAME",
    "tokens.chat_templates": "MODEL=FILE",
    "tokens.chat_template_kwargs": "MODEL=JSON",
    "tokens.content_formats": "MODEL=[auto|string|openai]",
    "tokens.models": "MODEL=PATH",
    "tokens.reasoning_effort_maps": "MODEL=JSON",
    "tokens.start_dates": "MODEL=DATE",
    "tokens.tokenizer_modes": "MODEL=MODE",
    "hash.seeds": "SEED",
    "engine.key_hosts": "PATTERN",
    "mooncake.master": "URL",
    "forward.routes": "ROUTE",
    "forward.client_fields": "FIELD",
    "forward.trusted_proxies": "NETWORK",
    "session.headers": "HEADER",
    "session.parent_headers": "HEADER",
    "redis.url": "URL",
    "redis.username": "NAME",
    "redis.sentinels": "HOST:PORT",
    "redis.sentinel_service": "NAME",
    "redis.namespace": "NAME",
}
_UNITS: Final = {
    "_s": "SECONDS",
    "_ms": "MILLISECONDS",
    "_bytes": "BYTES",
    "_tokens": "TOKENS",
    "_chars": "CHARACTERS",
    "port": "PORT",
}
_HELP_ALL: Final = "help_all"
_ARGUMENTS: Final = "arguments"


class _ListedChoice(click.Choice[str]):
    """Shows and completes the allowed values; the loader refuses others, with the key's name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)


class ConfigCommand(click.Command):
    """A command whose help shows the most used flags, and all of them with `--help-all`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show every option, in groups.",
            )
        )

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        given = tuple(args)
        ctx = super().make_context(info_name, args, parent, **extra)
        ctx.meta[_ARGUMENTS] = given
        return ctx

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups."""
        names = {_parameter(option): option for option in configuration.options()}
        first: list[click.Parameter] = []
        own: list[click.Parameter] = []
        sections: dict[str, list[click.Parameter]] = {name: [] for name in SECTIONS}
        for parameter in self.get_params(ctx):
            option = names.get(parameter.name or "")
            if option is None:
                (first if parameter.name == "config_file" else own).append(parameter)
            elif option.path in _FIRST:
                first.append(parameter)
            elif not option.only_in_file:
                sections[option.path[0]].append(parameter)
        order = ["config_file", *("__".join(path) for path in _FIRST)]
        first.sort(key=lambda parameter: order.index(parameter.name or ""))
        _write(ctx, formatter, "Most used options", first)
        _write(ctx, formatter, "Options", own)
        if ctx.meta.get(_HELP_ALL):
            for name, parameters in sections.items():
                _write(ctx, formatter, f"{SECTIONS[name]} ({name})", parameters)
        else:
            rest = sum(map(len, sections.values()))
            formatter.write_paragraph()
            formatter.write_text(f"{rest} more options: {ctx.command_path} --help-all")


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add one flag per configuration key to a command."""
    for option in reversed(configuration.options()):
        command = _flag(option)(command)
    return click.option(
        "-c",
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="WARMROUTE_CONFIG",
        help="YAML file; flags and WARMROUTE_… variables overrule it.",
    )(command)


def given_arguments() -> tuple[str, ...]:
    """Return the arguments of the command that runs, as they were typed."""
    found: tuple[str, ...] = click.get_current_context().meta[_ARGUMENTS]
    return found


def load(config_file: Path | None, flags: dict[str, Any]) -> configuration.Config:
    """Read the configuration with the flags that were given.

    Raises:
        ConfigError: it is wrong; the message names the flag, variable or line.
    """
    given: dict[tuple[str, ...], Any] = {}
    for option in configuration.options():
        value = flags.get(_parameter(option))
        if value is None or value == ():
            continue
        if option.mapping:
            value = configuration.pairs(option, list(value))
        elif option.joined:
            value = ",".join(value)
        given[option.path] = list(value) if isinstance(value, tuple) else value
    return configuration.load(config_file, os.environ, given)


def _parameter(option: Option) -> str:
    return "__".join(option.path)


def _flag(option: Option) -> Callable[[Any], Any]:
    text = option.description
    if _has_default(option):
        text += f"  [default: {default_text(option)}]"
    attributes: dict[str, Any] = {"help": text, "default": None, "hidden": option.only_in_file}
    name = f"--{option.flag}"
    if option.kind is bool:
        name = f"--{option.flag}/--no-{option.flag}"
    elif option.kind is None or option.joined:
        attributes |= {"multiple": True, "metavar": _metavar(option)}
    elif option.choices:
        attributes |= {"type": _ListedChoice(option.choices)}
    else:
        attributes |= {"type": option.kind, "metavar": _metavar(option)}
    return click.option(name, _parameter(option), **attributes)


def _metavar(option: Option) -> str:
    known = METAVARS.get(".".join(option.path))
    if known is not None:
        return known
    if option.mapping:
        return "NAME=VALUE"
    if option.is_file:
        return "FILE"
    units = (unit for end, unit in _UNITS.items() if option.path[-1].endswith(end))
    return next(units, "TEXT" if option.kind is str else "NUMBER")


def _has_default(option: Option) -> bool:
    return option.default not in (None, (), {}, "")


def default_text(option: Option) -> str:
    """Write a default as people write the value; "none": there is none."""
    default = option.default if _has_default(option) else "none"
    if isinstance(default, tuple):
        return ", ".join(default)
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _show_all(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _write(
    ctx: click.Context,
    formatter: click.HelpFormatter,
    heading: str,
    parameters: Sequence[click.Parameter],
) -> None:
    rows = list(_rows(ctx, parameters))
    if rows:
        with formatter.section(heading):
            formatter.write_dl(rows)


def _rows(ctx: click.Context, parameters: Sequence[click.Parameter]) -> Iterator[tuple[str, str]]:
    for parameter in parameters:
        row = parameter.get_help_record(ctx)
        if row is not None:
            yield row
