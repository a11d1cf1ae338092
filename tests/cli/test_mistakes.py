"""What people mistype, and what they are told."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import click
import pytest

from loadtest.generated import Agents
from loadtest.traces.mooncake import write_trace
from router import config
from router.cli import main
from tests.cli.running import beside, run
from tests.faults.stage import Engines, on_stage
from tests.loadtest.traces.samples import mooncake, write

# -- commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("statsu", "status"), ("serv", "serve"), ("comapre", "compare")],
)
def test_a_mistyped_command_suggests_the_right_one(typed: str, meant: str) -> None:
    result = run(typed)

    assert result.exit_code == 2
    assert f"No such command '{typed}'. Did you mean '{meant}'?" in result.stderr.splitlines()[-1]


def test_an_unlike_command_lists_all() -> None:
    result = run("xyzzy")

    assert "No such command 'xyzzy'. Commands: admin-token, check" in result.stderr


# -- the admin port ------------------------------------------------------------------------------


async def test_a_refused_token_names_the_file_or_variable_that_was_read(tmp_path: Path) -> None:
    token, other = tmp_path / "token", tmp_path / "other"
    token.write_text("t0ken")
    other.write_text("wr0ng")
    nobody = {"XDG_STATE_HOME": str(tmp_path / "nobody")}
    own = tmp_path / "own" / "warmroute" / "admin-token"
    own.parent.mkdir(parents=True)
    own.write_text("wr0ng")
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=token) as stage:

        async def said(*args: str, **variables: str) -> str:
            url = ("--admin", stage.admin_url)
            result = await asyncio.to_thread(run, "why", *url, *args, **nobody | variables)
            assert result.exit_code == 1
            assert "wr0ng" not in result.output
            return result.stderr

        by_flag = await said("--token-file", str(other))
        by_file = await said(WARMROUTE_ADMIN_TOKEN_FILE=str(other))
        by_variable = await said(WARMROUTE_ADMIN_TOKEN="wr0ng")
        by_default = await said(XDG_STATE_HOME=str(tmp_path / "own"))
        missing = await said()

    how = "give the router's own with --token-file FILE, or set WARMROUTE_ADMIN_TOKEN\n"
    of_file = f"Error: the admin token is wrong: it came from the file {other}; {how}"
    assert by_flag == by_file == of_file
    assert by_variable == (
        "Error: the admin token is wrong: it came from the variable WARMROUTE_ADMIN_TOKEN; " + how
    )
    assert by_default == f"Error: the admin token is wrong: it came from the file {own}; {how}"
    assert missing == (
        "Error: the admin token is missing: there is no "
        f"{tmp_path}/nobody/warmroute/admin-token; {how}"
    )


def test_a_token_file_that_does_not_exist_is_named() -> None:
    result = run("status", WARMROUTE_ADMIN_TOKEN_FILE="/nowhere")

    assert result.exit_code == 2
    named = "'WARMROUTE_ADMIN_TOKEN_FILE'", "'--token-file'"  # click before 8.5 names the option
    assert any(name in result.stderr for name in named)
    assert "'/nowhere' does not exist" in result.stderr


async def test_the_public_port_is_not_the_admin_port() -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        result = await asyncio.to_thread(run, "status", "--admin", stage.url)
        right = await beside(stage, "status")

    assert (result.exit_code, result.stderr) == (
        2,
        f"Error: {stage.url} is the public port of a router; --admin needs its admin port, which "
        "`warmroute serve` prints when it starts (8081 unless it is set)\n",
    )
    assert right.exit_code != 2


# -- policies and options ------------------------------------------------------------------------


def test_one_policy_is_shown_by_its_name() -> None:
    result = run("policies", "kv_aware")
    wrong = run("policies", "kv_awar")

    assert result.stdout.startswith("kv_aware\n    Choose the lowest cost")
    assert "\nrandom\n" not in result.stdout
    assert wrong.exit_code == 1
    assert "unknown policy: 'kv_awar'; did you mean 'kv_aware'?" in wrong.stderr


def test_options_are_filtered_by_name_then_by_description() -> None:
    by_name = run("options", "LISTEN_port").stdout
    by_words = run("options", "PYTHONHASHSEED").stdout
    none = run("options", "xyzzy")
    near = run("options", "quue")

    assert [line for line in by_name.splitlines() if line[0] != " "] == ["listen.port"]
    assert by_words
    assert len(by_words) < len(run("options").stdout) / 4
    assert (none.exit_code, "no option has 'xyzzy'" in none.stderr) == (1, True)
    assert "did you mean queue?" in near.stderr


def test_no_help_and_no_list_shows_pythons_own_words() -> None:
    context = click.Context(main)
    shown = [run("options").stdout, run("policies").stdout, run("schema").stdout]
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        more = ("--help-all",) if name in ("serve", "check") else ("--help",)
        shown.append(run(name, *more).stdout)
        if isinstance(command, click.Group):
            shown += [run(name, each, "--help").stdout for each in command.commands]

    found = [
        line for text in shown for line in text.splitlines() if re.search(r"\(\)|\bNone\b", line)
    ]
    assert found == []
    assert len(shown) > len(main.list_commands(context))


def test_a_default_is_written_as_people_write_it() -> None:
    lines = run("options").stdout.splitlines()
    defaults = {
        option.flag: next(line for line in lines if f"--{option.flag}   " in line).partition(
            "default: "
        )[2]
        for option in config.options()
        if option.flag
    }

    assert defaults["port"] == "8080"
    assert defaults["replica"] == "none"
    assert defaults["redis"] == "none"
    assert defaults["log-json"] == "off"


# -- tokenizers ----------------------------------------------------------------------------------


async def test_a_tokenizer_folder_that_does_not_exist_is_an_error_of_check() -> None:
    ports = ("--port", "0", "--admin-port", "0")
    async with Engines(1) as (engine,):
        flags = ("--replica", engine.url, "--tokens-models", "tiny=/nowhere")
        result = await asyncio.to_thread(run, "check", *flags, *ports, "--wait", "60", "--json")

    found = json.loads(result.stdout)["findings"]
    said = [each["text"] for each in found if each["level"] in ("error", "warning")]
    assert result.exit_code == 1
    assert any("there is no folder '/nowhere'" in text for text in said), said
    assert any("there is no folder '/nowhere' on this machine" in text for text in said), said


@pytest.mark.parametrize(
    "args",
    [
        ("simulate", "--generate", "agents", "--tokenizer", "/nowhere"),
        ("replay", "http://127.0.0.1:9", "--generate", "agents", "--tokenizer", "/nowhere"),
        ("emulate", "--model", "/nowhere"),
    ],
)
def test_a_folder_that_does_not_exist_is_refused_with_its_flag(args: tuple[str, ...]) -> None:
    result = run(*args)

    assert result.exit_code == 2
    assert re.search(rf"'{args[-2]}': (Path|Directory) '/nowhere' does not exist", result.stderr)


# -- -o and --json -------------------------------------------------------------------------------


def test_o_and_json_mean_the_same_in_every_command() -> None:
    """-o names what is written, --json prints JSON; both are in every command that writes."""
    context = click.Context(main)
    flags: dict[str, dict[str, click.Option]] = {}
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        each = command.commands if isinstance(command, click.Group) else {"": command}
        for sub, part in each.items():
            assert part is not None
            options = [one for one in part.params if isinstance(one, click.Option)]
            flags[f"{name} {sub}".strip()] = {opt: one for one in options for opt in one.opts}

    writes = {name for name, given in flags.items() if "-o" in given}
    assert writes == {
        "compare", "demo", "estimate", "redecide", "replay", "report", "simulate",
        "trace convert",
    }  # fmt: skip
    assert all({"-o", "--output"} <= set(flags[name]) for name in writes)
    assert all(given["--json"].is_flag for given in flags.values() if "--json" in given)
    assert {"estimate", "redecide", "report", "simulate", "trace describe"} <= {
        name for name, given in flags.items() if "--json" in given
    }


def test_an_estimate_prints_json_or_writes_it(tmp_path: Path) -> None:
    trace = tmp_path / "agents.jsonl"
    write_trace(Agents(num_sessions=3, num_turns=2).workload(), trace)
    args = ("estimate", str(trace), "--replicas", "2", "--cache-tokens", "500000")

    printed = run(*args[:1], "--json", *args[1:])
    written = run(*args, "-o", str(tmp_path / "out.json"))

    assert [each.exit_code for each in (printed, written)] == [0, 0], printed.output
    assert json.loads(printed.stdout)["workload"] == "agents.jsonl"
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(printed.stdout)


def test_records_after_json_are_not_written_over(tmp_path: Path) -> None:
    """`report --json decisions.jsonl` reads the records."""
    records = tmp_path / "decisions.jsonl"
    records.write_text("{}\n")

    result = run("report", "--json", str(records))

    assert result.exit_code == 2
    assert records.read_text() == "{}\n"
    assert "decisions.jsonl" in result.output


# -- traces --------------------------------------------------------------------------------------


def test_a_trace_is_named_with_or_without_its_flag(tmp_path: Path) -> None:
    path = str(write(tmp_path / "t.jsonl", [mooncake(n, 1000, [1, n + 5]) for n in range(10)]))

    plain = run("trace", "describe", path, "--json")
    flagged = run("trace", "describe", "--trace", path, "--json")
    twice = run("trace", "describe", path, "--trace", path)
    converted = run("trace", "convert", path, "-o", str(tmp_path / "o.jsonl"))
    nowhere = run("trace", "describe", "/nowhere.jsonl")

    assert json.loads(plain.stdout) == json.loads(flagged.stdout)
    assert (twice.exit_code, "name the trace once" in twice.stderr) == (2, True)
    assert converted.exit_code == 0
    assert nowhere.exit_code == 2
    assert "/nowhere.jsonl" in nowhere.stderr
