"""router.cli: what is wrong is one line; what runs ends cleanly.

`warmroute page`: a link that opens the live page.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import click
import pytest
from click.testing import Result

from loadtest.emulator.pool import EmulatedPool, PoolMaster
from policies.registry import POLICIES
from router import config
from router.cli import main
from router.cli.group import SUMMARIES
from tests.cli.running import REPLICA, on_a_terminal, run, said_at_start, serving
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import SECRET, SLOW, Engines, chat, on_stage, streamed, words
from tests.forks import python_command, python_environment
from tests.ports import free_port
from tests.waiting import until, until_ready

PATIENT = ("--wait", "60", "--set", "health.timeout_s=60")


# -- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "no replica given; say --replica http://HOST:PORT"),
        (("--replica", "foo"), "replicas[0].url: 'foo' is not a base URL; write http://HOST:PORT"),
        (("--replica", "http://me:pw@h"), "replicas[0].url: no user or password allowed"),
        ((*REPLICA, "--policy", "kv_awar"), "unknown policy: 'kv_awar'; did you mean 'kv_aware'?"),
        ((*REPLICA, "--policy-param", "alhpa=2"), "'alhpa'; did you mean 'alpha'?"),
        (
            (*REPLICA, "--policy-param", "alpha"),
            "--policy-param: policy.params: 'alpha' is not NAME=VALUE",
        ),
        ((*REPLICA, "--port", "99999"), "listen.port: must be at most 65535, not 99999"),
        ((*REPLICA, "--port", "18", "--admin-port", "18"), "admin.port: 18 is listen.port, too"),
        ((*REPLICA, "--share-port"), "listen.shared: needs redis.url (--redis)"),
        (
            (*REPLICA, "--set", "admin.replica_hosts=10.0.0.0/40"),
            "admin.replica_hosts: '10.0.0.0/40'",
        ),
        ((*REPLICA, "--set", "engine.key_hosts=a b"), "engine.key_hosts: 'a b' is not"),
        ((*REPLICA, "--log-level", "loud"), "log.level:"),
        ((*REPLICA, "--set", "forward.ca_file=/nowhere"), "forward.ca_file: No such file"),
        (
            (*REPLICA, "--set", "forward.ca_file=/dev/null"),
            "forward.ca_file: no certificates in it",
        ),
        (
            (*REPLICA, "--set", "tokens.chat_templates=m=/nowhere"),
            "tokens.chat_templates.m: '/nowhere'",
        ),
        ((*REPLICA, "-c", "/nowhere"), "/nowhere: No such file or directory"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(args: tuple[str, ...], said: str) -> None:
    """The line begins with the program's name and names the setting."""
    result = run("serve", *args)

    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert said in result.stderr
    assert "pw" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("listen: {prot: 1}", "unknown key 'listen.prot'; did you mean 'port'?"),
        ("replicas: [{url: 'http://h', events: ['h:1']}]", "'h:1' is not tcp://HOST:PORT"),
        ("replicas: [3]", "replicas[0]: must be a mapping, not 3"),
        ("replicas: 3", "replicas: must be a list, not 3"),
        ("replicas: http://h:1", "replicas: must be a list, not 'http://h:1'; write [http://h:1]"),
        ("log:\n\tlevel: info", "line 2: begins with a tab; YAML takes spaces only"),
        ("log: {decisions: 3}", "log.decisions: must be a file name"),
        ("listen: {port: [1]}", "listen.port: must be a number, not a list"),
        ("policy: {params: 3}", "policy.params: must be a mapping, not 3"),
        ("- a", "the top level must be a mapping of replicas, discovery, listen"),
        ("listen: !!python/object:os.system {}", "not YAML"),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_2(tmp_path: Path, text: str, said: str) -> None:
    """Unknown keys with the nearest known one, wrong values with their place."""
    file = tmp_path / "warmroute.yaml"
    file.write_text(text)
    result = run("serve", "-c", str(file), *(() if "replicas" in text else REPLICA))

    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ("serve", "--prot", "1"),
            "'--prot'. (Did you mean one of: '--host', '--port'",
        ),
        (("serve", "--port", "x"), "Invalid value for '--port': 'x' is not a valid integer."),
        (("serve", "-c", "/tmp"), "File '/tmp' is a directory."),
        (("serve", "extra"), "unexpected extra argument (extra)"),
        (("tenant-key",), "Missing argument 'NAME'"),
    ],
)
def test_wrong_usage_ends_in_one_clear_line_and_exit_2(args: tuple[str, ...], said: str) -> None:
    """After the usage."""
    result = run(*args)

    assert result.exit_code == 2
    assert said in result.stderr.splitlines()[-1]


def test_variables_are_checked_like_flags() -> None:
    """And the flag overrules them."""
    wrong = run("serve", *REPLICA, WARMROUTE_LISTEN_PORT="x")
    overruled = run("serve", *REPLICA, "--policy", "nope", WARMROUTE_POLICY_NAME="random")

    assert (wrong.exit_code, "listen.port" in wrong.stderr) == (2, True)
    assert (overruled.exit_code, "'nope'" in overruled.stderr) == (2, True)


# -- what helps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [("--help",), ("-h",), ("serve", "--help"), ("status", "-h")])
def test_help_is_there(args: tuple[str, ...]) -> None:
    """For the program and for each command."""
    result = run(*args)

    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_summary_is_what_the_command_says_of_itself(name: str) -> None:
    """`--help` prints a summary without importing the command, and it is the command's own."""
    command = main.get_command(click.Context(main), name)

    assert command is not None
    assert SUMMARIES[name] == command.get_short_help_str(limit=1000)


def test_help_imports_nothing_heavy() -> None:
    """`warmroute --help` lists every command, and imports neither loadtest nor a large library."""
    heavy = "{'aiohttp', 'httpx', 'loadtest', 'numpy', 'scipy', 'transformers'}"
    call = "main(['--help'], standalone_mode=False)"
    code = f"import sys; from router.cli import main; {call}; print({heavy} & set(sys.modules))"

    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )

    assert all(f"\n  {name} " in done.stdout for name in main.list_commands(click.Context(main)))
    assert done.stdout.splitlines()[-1] == "set()"


def test_options_are_listed_with_their_variables() -> None:
    """Key, flag, variable, default."""
    result = run("options")

    assert result.exit_code == 0
    for option in config.options():
        assert ".".join(option.path) in result.stdout
        assert (option.variable in result.stdout) != option.only_in_file


def test_policies_are_explained() -> None:
    """Every one of them."""
    result = run("policies")

    assert result.exit_code == 0
    assert set(POLICIES) <= set(result.stdout.splitlines())
    assert (
        "--policy-param alpha=4\n        Weight of the delay" in run("policies", "kv_aware").stdout
    )


def test_the_version_is_reported() -> None:
    """For bug reports."""
    assert re.fullmatch(r"warmroute \d+\.\d+\.\d+\S*\n", run("--version").stdout)


# -- asking the admin port ------------------------------------------------------------------------


async def test_the_admin_url_and_token_come_from_variables(tmp_path: Path) -> None:
    """A flag overrules its variable; a variable with the token overrules one with its file."""
    token = tmp_path / "token"
    token.write_text("t0ken")
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=token) as stage:

        async def asked(*args: str, **variables: str) -> Result:
            url = {"WARMROUTE_ADMIN_URL": stage.admin_url}
            return await asyncio.to_thread(run, "why", *args, **url, **variables)

        by_token = await asked(WARMROUTE_ADMIN_TOKEN="t0ken")
        by_file = await asked(WARMROUTE_ADMIN_TOKEN_FILE=str(token))
        by_flag = await asked("--token-file", str(token), WARMROUTE_ADMIN_TOKEN="wrong")
        wrong = await asked(WARMROUTE_ADMIN_TOKEN="wrong")
        missing = await asked()
        elsewhere = await asked("--admin", "http://127.0.0.1:9", WARMROUTE_ADMIN_TOKEN="t0ken")

    assert [each.exit_code for each in (by_token, by_file, by_flag)] == [0, 0, 0]
    assert wrong.exit_code == missing.exit_code == 1
    assert "it came from the variable WARMROUTE_ADMIN_TOKEN;" in wrong.stderr
    assert missing.stderr.startswith("Error: the admin token is ")
    assert (elsewhere.exit_code, "http://127.0.0.1:9" in elsewhere.stderr) == (1, True)
    assert "t0ken" not in elsewhere.output


def test_serve_takes_the_variables_of_other_commands() -> None:
    """A shell that has them set can start a router."""
    result = run("serve", WARMROUTE_ADMIN_URL="http://x", WARMROUTE_ADMIN_TOKEN="t")

    assert "no replica given" in result.stderr


@pytest.mark.parametrize(
    "admin", ["http://127.0.0.1:9", "127.0.0.1:9", "foo", "http://h:x", "http://"]
)
def test_a_command_without_a_router_says_so(admin: str) -> None:
    """In one line; an address without a scheme is taken as http."""
    result = run("why", "--admin", admin)
    url = admin if "://" in admin else f"http://{admin}"

    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {url}: ")
    assert "is `warmroute serve` running" in result.stderr


async def test_another_server_at_the_admin_url_is_an_error() -> None:
    """Whatever answers there, with JSON or without."""
    pages: list[object] = [(404, "nothing"), (200, "<html>"), (404, '{"detail":"x"}'), (404, "[]")]
    async with FakeEngine() as other:
        for page in pages:
            other.pages["/admin/replicas"] = page
            result = await asyncio.to_thread(run, "replicas", "list", "--admin", other.url)

            assert result.exit_code == 1, page
            assert result.stderr.endswith("not the admin port of `warmroute serve`\n"), page


# -- processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["--port", "--admin-port"])
async def test_a_port_in_use_is_one_line_and_exit_2(which: str) -> None:
    """Nothing was served."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ports = {"--port": "0", "--admin-port": "0"} | {which: port}
        flags = [part for pair in ports.items() for part in pair]
        async with serving(*REPLICA, *flags) as process:
            _, log = await process.communicate()

    assert process.returncode == 2
    lines = [line for line in log.decode().splitlines() if "[transformers]" not in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"Error: cannot listen on 127.0.0.1:{port}: ")


def bound_to(port: int) -> set[str]:
    """List the IPv4 addresses that something listens on at a port, as the kernel says."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    pairs = [fields[1].split(":") for fields in rows if fields[3] == "0A"]
    return {
        socket.inet_ntoa(int(host, 16).to_bytes(4, sys.byteorder))
        for host, at in pairs
        if int(at, 16) == port
    }


@pytest.mark.parametrize(
    ("flags", "host", "is_said"),
    [((), "127.0.0.1", False), (("--host", "0.0.0.0"), "0.0.0.0", True)],
)
async def test_it_listens_on_loopback_unless_it_is_told_otherwise(
    flags: tuple[str, ...], host: str, is_said: bool
) -> None:
    """The first line has the address that is bound; the log says who needs no key."""
    ports = ("--port", "0", "--admin-port", "0")
    async with serving(*REPLICA, *ports, *flags, host=None) as process:
        line = await said_at_start(process)
        found = re.match(r"warmroute listens on http://(\S+):(\d+) ", line)
        assert found is not None, line
        bound = bound_to(int(found[2]))
        process.terminate()
        _, log = await process.communicate()

    assert found[1] == host
    assert bound == {host}
    assert (b"clients need no key" in log) == is_said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_when_answers_are_finished(
    number: signal.Signals, tmp_path: Path
) -> None:
    """A stream in flight gets its end and its record; no other client is let in; exit 0."""
    records = tmp_path / "decisions.jsonl"
    async with (
        Engines(1, time_model=SLOW) as (engine,),
        serving(
            *("--replica", engine.url, "--port", "0", "--admin-port", "0"),
            *("--decision-log", str(records), "--log-json"),
            is_fork=number == signal.SIGINT,
        ) as process,
        aiohttp.ClientSession() as client,
    ):
        line = await said_at_start(process)
        found = re.search(r"listens on (http://\S+) \(admin: (http://\S+)\)", line)
        assert found is not None, line
        await until_ready(client, found[1])
        body = streamed(chat(words(1), max_tokens=30, ignore_eos=True))
        async with client.post(found[1] + "/v1/chat/completions", json=body) as answer:
            first = await answer.content.readany()
            process.send_signal(signal.SIGHUP)  # ends nothing
            process.send_signal(number)
            rest = await answer.read()
        _, log = await process.communicate()
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(found[1] + "/healthz")

    assert process.returncode == 0
    assert (first + rest).endswith(b"data: [DONE]\n\n")
    assert b"Traceback" not in log
    assert b"nothing to reload" in log
    assert b'"message":"routed"' in log
    assert json.loads(records.read_text())["outcome"] == "ok"


async def test_a_configuration_is_read_again_at_sighup(tmp_path: Path) -> None:
    """What may change does; what may not, and what is broken, is refused with its key."""
    file = tmp_path / "warmroute.yaml"

    def write(*lines: str) -> None:
        file.write_text("\n".join(("listen: {host: 127.0.0.1, port: 0}", *lines)))

    async with Engines(2) as (a, b):
        write("admin: {port: 0}", f"replicas: [{a.url}]")
        async with serving("--config", str(file), "--log-json") as process:
            assert process.stderr is not None
            await said_at_start(process)
            logged = b""
            for lines, said in (
                ((f"replicas: [{b.url}]", "policy: {name: random}"), b"replicas, policy.name"),
                ((f"replicas: [{b.url}]", "index: {mode: redis}"), b"needs redis.url"),
                ((f"replicas: [{b.url}]", "limits: {body_bytes: 1}"), b"limits.body_bytes"),
                (("replicas: [",), b"not YAML"),
            ):
                write("admin: {port: 0}", *lines)
                process.send_signal(signal.SIGHUP)
                async with asyncio.timeout(60):
                    while said not in logged:
                        logged += await process.stderr.readline()
            process.send_signal(signal.SIGINT)
            _, rest = await process.communicate()

    assert process.returncode == 0
    assert logged.count(b'"not reloaded"') == 3
    assert b"Traceback" not in logged + rest


async def test_a_router_whose_log_nobody_reads_serves_and_ends() -> None:
    """Its stderr is a full pipe. Lines are lost, no answer is, and SIGTERM ends it in time."""
    port, admin_port = free_port(), free_port()
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    async with Engines(1) as (engine,), aiohttp.ClientSession() as client:
        ports = ("--port", str(port), "--admin-port", str(admin_port))
        process = await asyncio.create_subprocess_exec(
            *(*python_command(), "-m", "router.cli", "serve", "--set", "admin.open=true", *ports),
            *("--replica", engine.url),
            stderr=theirs,
            env=python_environment() | {"WARMROUTE_LISTEN_DRAIN_GRACE_S": "0.1"},
        )
        os.close(theirs)
        url = f"http://127.0.0.1:{port}"

        async def is_up() -> bool:
            with suppress(aiohttp.ClientConnectorError):
                async with client.get(url + "/readyz") as answer:
                    return answer.status == 200
            return False

        try:
            await until(is_up)
            for number in range(40):  # a line each
                async with client.post(
                    url + "/v1/chat/completions", json=chat(words(number))
                ) as answer:
                    assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(ours)


# -- check ---------------------------------------------------------------------------------------


async def check(*args: str, **kwargs: str) -> Result:
    """Run `check` beside the loop that it looks at; its ports are any."""
    ports = ("--port", "0", "--admin-port", "0")
    return await asyncio.to_thread(run, "check", *ports, *args, **kwargs)


async def test_check_says_that_all_is_well() -> None:
    """To people and to machines, with status 0."""
    async with Engines(1) as (engine,):
        table = await check("--replica", engine.url)
        as_json = await check("--replica", engine.url, "--json")

    assert (table.exit_code, as_json.exit_code) == (0, 0), table.output
    assert "replica r1" in table.stdout
    assert "all is well" in table.stdout
    assert json.loads(as_json.stdout)["well"] is True
    assert table.stderr == as_json.stderr == ""


async def error_of(first: str, second: str, master: str) -> Any:
    """Check two replicas in a pool; return the one error found."""
    urls = ("--replica", first, "--replica", second)
    result = await check(*urls, "--mooncake", master, "--json", *PATIENT)
    findings = json.loads(result.stdout)["findings"]
    assert result.exit_code == 1
    (found,) = [each for each in findings if each["level"] == "error"]
    return found


async def test_check_finds_halves_that_have_no_roles() -> None:
    """A producer in a pool shows that it is one, and what to write is said."""
    async with PoolMaster(EmulatedPool()) as master:
        async with (
            Engines(1, pool=master.url, kv_role="producer") as (producer,),
            Engines(1, pool=master.url, kv_role="consumer") as (consumer,),
        ):
            found = await error_of(producer.url, consumer.url, master.url)

    assert (found["subject"], found["about"]) == ("replica r1", "role")
    assert found["text"] == "it reports role prefill, but is used as both"
    assert "role: decode for the replicas that answer its prompts" in found["hint"]


async def test_check_finds_kv_of_two_data_types_in_one_pool() -> None:
    """Engines name the objects alike, and could not read each other's."""
    async with PoolMaster(EmulatedPool()) as master:
        async with (
            Engines(1, pool=master.url) as (wide,),
            Engines(1, pool=master.url, kv_cache_dtype="fp8") as (narrow,),
        ):
            found = await error_of(wide.url, narrow.url, master.url)

    assert (found["subject"], found["about"]) == ("pool", "data types")


async def test_check_says_what_is_wrong_with_status_1() -> None:
    """No engine there, and a wrong password; the password is not shown."""
    result = await check(*REPLICA, "--json", WARMROUTE_REDIS_PASSWORD="s3cret")

    assert result.exit_code == 1
    assert "refused the connection" in result.stdout
    assert "s3cret" not in result.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "no replica given"),
        ((*REPLICA, "--policy-param", "alhpa=2"), "'alhpa'; did you mean 'alpha'?"),
        ((*REPLICA, "--wait", "0"), "Invalid value for '--wait'"),
        ((*REPLICA, "--wiat", "1"), "No such option '--wiat'"),
    ],
)
async def test_check_refuses_a_wrong_setting_with_status_2(
    args: tuple[str, ...], said: str
) -> None:
    """As `serve` does; nothing is looked at."""
    result = await check(*args)

    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_check_says_that_it_changes_nothing() -> None:
    """And what its status means."""
    text = " ".join(run("check", "--help").stdout.split())

    assert "Nothing is changed: no request goes to a model" in text
    assert "Exit status: 0 all is well" in text


async def test_check_ends_quietly_on_ctrl_c() -> None:
    """With status 130 and no traceback; what it waits for was printed."""
    arrived = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            *(*python_command(), "-m", "router.cli", "check", "--replica", url, "--wait", "300"),
            *("--set", "health.timeout_s=300"),
            env=python_environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            await arrived.wait()
            process.send_signal(signal.SIGINT)
            stdout, stderr = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()

    assert process.returncode == 130
    assert b"Traceback" not in stderr
    assert stdout == b""


async def test_only_a_terminal_gets_the_token(tmp_path: Path) -> None:
    """A log, a pipe or a file gets the plain address."""
    token = tmp_path / "token"
    token.write_text(f"{SECRET}-token\n")
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=token) as stage:
        command = ("page", "--admin", stage.admin_url, "--token-file", str(token))
        shown = await asyncio.to_thread(on_a_terminal, *command)
        piped = await asyncio.to_thread(run, *command)

    assert shown.strip() == f"{stage.admin_url}/#token={SECRET}-token"
    assert piped.output == f"{stage.admin_url}/\n"
