"""The command line: options become a replica, mistakes a message."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from loadtest.emulator.cli import emulate
from loadtest.emulator.options import TINY_MODEL
from tests.forks import python_command, python_environment

ROOT = Path(__file__).resolve().parents[2]


def test_every_option_has_a_help_text() -> None:
    """--help lists them all with their defaults."""
    result = CliRunner().invoke(emulate, ["--help"])

    assert result.exit_code == 0
    assert "--num-gpu-blocks" in result.output
    assert all(param.help for param in emulate.params)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-gpu-blocks", "2", "--max-model-len", "9999"], "num_gpu_blocks is 2"),
        (["--lora", "nopath"], "is not NAME=PATH"),
        (["--preset", "abacus"], "h100-8b"),
        (["--model", "/nowhere"], "does not exist"),
        (["--script", "/nowhere"], "--script /nowhere"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str) -> None:
    """Exit status 2 and what is wrong."""
    result = CliRunner().invoke(emulate, arguments)

    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize("flag", ["--port", "--events-port", "--replay-port", "--serve-pool"])
def test_a_taken_port_is_explained(flag: str) -> None:
    """Exit status 1 and one line, with the port and the flag that names another one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        result = CliRunner().invoke(emulate, [flag, str(port)])

    assert (result.exit_code, result.output) == (
        1,
        f"Error: cannot listen on 127.0.0.1:{port}: Address already in use; name another port with "
        f"{flag} (0: any)\n",
    )


def test_a_folder_without_a_tokenizer_is_explained(tmp_path: Path) -> None:
    result = CliRunner().invoke(emulate, ["--model", str(tmp_path)])

    assert result.exit_code == 2
    assert f"--model {tmp_path} has no tokenizer.json" in " ".join(result.output.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--preset", "instant", "--no-events"],
        ["--model", str(TINY_MODEL), "--lora", "a=/b", "--preset", "a100-8b", "--base-ms", "1"],
    ],
)
async def test_it_says_when_it_is_ready_and_ends_cleanly_on_interrupt(
    arguments: list[str],
) -> None:
    """One line with the address; a request; Ctrl-C; exit status 0 and nothing else said."""
    process = await asyncio.create_subprocess_exec(
        *python_command(),
        "-m",
        "loadtest.emulator",
        *arguments,
        cwd=ROOT,
        env=python_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None

    line = (await process.stdout.readline()).decode()

    found = re.match(r"emulating (\S+) at (http://[\d.:]+);", line)
    assert found, line
    async with httpx.AsyncClient(base_url=found[2]) as http:
        body = {"prompt": "x", "max_tokens": 1}
        assert (await http.post("/v1/completions", json=body)).json()["model"] == found[1]
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert (process.returncode, out) == (0, b"")
    assert b"Traceback" not in err
