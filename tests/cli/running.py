"""Run commands in this process, or as processes of their own."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import click
from click.testing import CliRunner, Result

from router.cli import main
from tests.faults.stage import Stage
from tests.forks import python_command, python_environment

REPLICA = ("--replica", "http://127.0.0.1:9")


def run(*args: str, **kwargs: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(main, args, env=kwargs)


async def beside(stage: Stage, *args: str) -> Result:
    """Run a command beside a router, as a script does."""
    return await asyncio.to_thread(run, *args, "--admin", stage.admin_url)


def on_a_terminal(*args: str, **variables: str) -> str:
    """Run a command whose output is a terminal; return what it wrote there."""
    ours, theirs = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "100", **variables}
    with subprocess.Popen(
        [sys.executable, "-m", "router.cli", *args], env=environment, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        written = b""
        try:
            while part := os.read(ours, 65536):
                written += part
        except OSError:  # the other side is closed: Linux reports EIO
            pass
        finally:
            os.close(ours)
        process.wait(60)
    return written.decode()


@asynccontextmanager
async def serving(
    *args: str, is_fork: bool = True, host: str | None = "127.0.0.1"
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `warmroute serve` as a process of its own.

    Args:
        host: To listen on; None: the default.
        is_fork: It ends without taking modules apart; what is left open then is not reported.
    """
    listens = ("--host", host) if host is not None else ()
    own = {"PYTHONWARNINGS": "error::ResourceWarning"}
    python = python_command() if is_fork else [sys.executable]
    environment = python_environment() if is_fork else os.environ | own
    process = await asyncio.create_subprocess_exec(
        *(*python, "-m", "router.cli", "serve", *listens, "--set", "admin.open=true", *args),
        stderr=asyncio.subprocess.PIPE,
        env=environment | {"WARMROUTE_LISTEN_DRAIN_GRACE_S": "0.1"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said_at_start(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    return (await process.stderr.readline()).decode()


def commands() -> Iterator[tuple[str, click.Command]]:
    """List every command and subcommand with its whole name."""
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {sub}", each) for sub, each in command.commands.items())
