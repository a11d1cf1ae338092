"""Flags of configuration keys, `--set` for all keys, and help that shows the most used first."""

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

_OWN: Final = ("config_file", "settings")
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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; an option that is a key without a flag is refused with `--set`."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as exc:
            name = exc.option_name.removeprefix("--").removeprefix("no-").replace("-", "_")
            keys = [each for each in _without_flag() if "_".join(each.path).startswith(name)]
            if len(keys) != 1 and name not in ("_".join(each.path) for each in keys):
                raise
            message = f"No such option: {exc.option_name}. Use --set {keys[0].key}=VALUE."
            raise click.NoSuchOption(exc.option_name, message, ctx=ctx) from exc

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups."""
        names = {_parameter(option): option for option in configuration.options() if option.flag}
        first: list[click.Parameter] = []
        own: list[click.Parameter] = []
        sections: dict[str, list[click.Parameter]] = {name: [] for name in SECTIONS}
        for parameter in self.get_params(ctx):
            option = names.get(parameter.name or "")
            if option is None:
                (first if parameter.name in _OWN else own).append(parameter)
            elif option.path in _FIRST:
                first.append(parameter)
            else:
                sections[option.path[0]].append(parameter)
        order = ["config_file", *("__".join(path) for path in _FIRST), "settings"]
        first.sort(key=lambda parameter: order.index(parameter.name or ""))
        _write(ctx, formatter, "Most used options", first)
        _write(ctx, formatter, "Options", own)
        rest = sum(map(len, sections.values()))
        how = f"{rest} more options: {ctx.command_path} --help-all"
        if ctx.meta.get(_HELP_ALL):
            for name, parameters in sections.items():
                _write(ctx, formatter, f"{SECTIONS[name]} ({name})", parameters)
            how = (
                f"{len(_without_flag())} keys have no option of their own: --set KEY=VALUE, with "
                "VALUE as in the key's variable. `warmroute options` lists all keys."
            )
        formatter.write_paragraph()
        formatter.write_text(how)


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--config`, `--set` and the flags of configuration keys to a command."""
    for option in reversed(configuration.options()):
        if option.flag:
            command = _flag(option)(command)
    command = click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set any key (`warmroute options` lists them); repeatable.",
    )(command)
    return click.option(
        "-c",
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="WARMROUTE_CONFIG",
        help="YAML file; options and WARMROUTE_… variables overrule it.",
    )(command)


def given_arguments() -> tuple[str, ...]:
    """Return the arguments of the command that runs, as they were typed."""
    found: tuple[str, ...] = click.get_current_context().meta[_ARGUMENTS]
    return found


def load(
    config_file: Path | None, settings: Sequence[str], flags: dict[str, Any]
) -> configuration.Config:
    """Read the configuration with `--set` and the flags that were given.

    Raises:
        ConfigError: it is wrong; the message names the flag, variable or line.
    """
    values = {option.path: flags.get(_parameter(option)) for option in configuration.options()}
    given = {
        path: list(value) if isinstance(value, tuple) else value
        for path, value in values.items()
        if value not in (None, ())
    }
    return configuration.load(config_file, os.environ, given, settings)


def _without_flag() -> list[Option]:
    return [each for each in configuration.options() if not each.flag and not each.only_in_file]


def _parameter(option: Option) -> str:
    return "__".join(option.path)


def _flag(option: Option) -> Callable[[Any], Any]:
    text = option.description
    if _has_default(option):
        text += f"  [default: {default_text(option)}]"
    attributes: dict[str, Any] = {"help": text, "default": None}
    if option.kind is bool:
        name = f"--{option.flag}/--no-{option.flag}"
        return click.option(name, _parameter(option), **attributes)
    if option.repeats:
        attributes["multiple"] = True
    elif option.choices:
        attributes["type"] = _ListedChoice(option.choices)
    else:
        attributes["type"] = option.kind
    metavar = option.metavar or None
    return click.option(f"--{option.flag}", _parameter(option), metavar=metavar, **attributes)


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
