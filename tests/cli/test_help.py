"""Help that a stranger can read: groups, choices, units, names; completion; colour."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from router import config
from router.cli import main
from router.cli.group import GROUPS
from tests.cli.running import commands, on_a_terminal

COLUMNS = 80


def run(*args: str) -> str:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    return result.stdout


def sections(text: str) -> dict[str, list[str]]:
    """Split a help text into its headings and the flags or names below each."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        heading = re.fullmatch(r"(\S.*):", line)
        if heading is not None:
            found[heading[1]] = []
        elif found and re.match(r"  \S", line):
            list(found.values())[-1].append(line.split()[0].rstrip(","))
    return found


# -- groups --------------------------------------------------------------------------------------


def with_flags() -> list[config.Option]:
    return [option for option in config.options() if option.flag]


@pytest.mark.parametrize("command", ["serve", "check"])
def test_help_shows_the_flags_that_matter_and_where_the_others_are(command: str) -> None:
    """In this order, and with what only this command takes."""
    text = run(command, "--help")
    shown = sections(text)

    assert shown["Most used options"] == [
        "-c", "--replica", "--port", "--admin-port", "--policy", "--queue", "--redis",
        "--log-level", "--set",
    ]  # fmt: skip
    assert shown["Options"][-2:] == ["--help-all", "-h"]
    assert ("--wait" in shown["Options"]) == (command == "check")
    rest = len(with_flags()) - len(shown["Most used options"]) + 2
    assert text.endswith(f"{rest} more options: warmroute {command} --help-all\n")


def test_help_all_shows_every_flag_once_in_the_group_of_its_section() -> None:
    """Each group is a section of the configuration file."""
    shown = sections(run("serve", "--help-all"))
    flags = [flag for members in shown.values() for flag in members]

    assert len(flags) == len(set(flags))
    assert {f"--{option.flag}" for option in with_flags()} <= set(flags)
    for option in with_flags():
        heading = f"{config.SECTIONS[option.path[0]]} ({option.path[0]})"
        assert f"--{option.flag}" in (*shown.get(heading, ()), *shown["Most used options"])


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("--forward-max-tries", "forward.max_tries"),
        ("--no-events-enabled", "events.enabled"),
        ("--early", "early.mode"),
        ("--discovery-dns", "discovery.dns"),
    ],
)
def test_a_key_without_a_flag_names_set(option: str, setting: str) -> None:
    result = CliRunner().invoke(main, ["serve", option, "3"])

    assert result.exit_code == 2
    assert f"No such option: {option}. Use --set {setting}=VALUE." in result.stderr


def test_every_section_has_a_heading() -> None:
    """A section that is added needs one."""
    assert list(config.SECTIONS) == list(config.Config.__struct_fields__)


def test_commands_are_grouped_and_every_one_is_listed() -> None:
    """No group names a command that is not there."""
    shown = sections(run("--help"))
    del shown["Options"]

    assert sorted(name for members in shown.values() for name in members) == main.list_commands(
        click.Context(main)
    )
    assert set(shown) == set(GROUPS)


# -- summaries, choices, units -------------------------------------------------------------------


@pytest.mark.parametrize("args", [(), *((name,) for name in ("replicas", "trace"))])
def test_summaries_fit_in_80_columns(args: tuple[str, ...]) -> None:
    """None is cut off."""
    _, *lines = run(*args, "--help").splitlines()

    assert max(map(len, lines)) <= COLUMNS
    assert not [line for line in lines if line.endswith("...")]


def test_no_option_shows_a_bare_type_where_it_can_say_more() -> None:
    """A number has a unit or a range, a file is FILE, an address is URL or HOST:PORT."""
    bare = {"TEXT", "INTEGER", "FLOAT", "PATH", "INTEGER RANGE", "FLOAT RANGE"}
    context = click.Context(main)
    shown = [
        (name, parameter.make_metavar(context))
        for name, command in commands()
        if name in ("serve", "check") or command.callback.__module__.startswith("router.")
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.is_flag
    ]

    assert [each for each in shown if each[1] in bare - {"TEXT"}] == []
    assert {metavar for _, metavar in shown} >= {"URL", "FILE", "SECONDS", "PORT"}


def test_every_choice_is_shown() -> None:
    """A key with a closed set of values shows them."""
    text = " ".join(run("serve", "--help-all").split())

    for option in config.options():
        if option.choices and option.flag:
            assert f"--{option.flag} [{'|'.join(option.choices)}]" in text


# -- completion ----------------------------------------------------------------------------------


def completed(*words: str) -> list[str]:
    """Ask as bash does after TAB."""
    environment = os.environ | {
        "_WARMROUTE_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(("warmroute", *words)),
        "COMP_CWORD": str(len(words)),
    }
    code = "from router.cli import main; main(prog_name='warmroute')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_completion_knows_commands_flags_and_values() -> None:
    """Values of a closed set, too."""
    assert completed("se") == ["serve"]
    assert "--replica" in completed("serve", "--re")
    assert completed("serve", "--queue", "o") == ["on", "off"]
    assert completed("replicas", "un") == ["undrain"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_a_script_for_each_shell(shell: str) -> None:
    """The script of docs/configuration.md."""
    code = "from router.cli import main; main(prog_name='warmroute')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"_WARMROUTE_COMPLETE": f"{shell}_source"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert "_WARMROUTE_COMPLETE=" in done.stdout


# -- colour --------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [("--help",), ("policies",), ("serve",)])
def test_colour_is_for_terminals_and_no_color_turns_it_off(args: tuple[str, ...]) -> None:
    """Help, output and errors."""
    assert "\x1b[" in on_a_terminal(*args)
    assert "\x1b" not in on_a_terminal(*args, NO_COLOR="1")
    assert "\x1b" not in CliRunner().invoke(main, args).output
