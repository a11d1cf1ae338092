"""The command line: options become a replica, mistakes a message.

Options that contradict each other are refused; times add up.
"""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from loadtest.emulator.cli import emulate
from loadtest.emulator.options import TINY_MODEL, EmulatorOptions
from loadtest.engine_model.time_model import PRESETS, StepWork, TimeModel
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


def test_the_longest_sequence_is_what_model_and_cache_allow(tmp_path: Path) -> None:
    """The smaller of the model's positions and the usable blocks; a nested text config counts."""
    assert EmulatorOptions(num_gpu_blocks=11, block_size=16).model_len() == 160
    assert EmulatorOptions(model_dir=tmp_path).model_len() == 131_072
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 99}}')
    assert EmulatorOptions(model_dir=tmp_path).model_len() == 99
    assert EmulatorOptions(max_model_len=50).model_len() == 50


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_gpu_blocks": 10, "max_model_len": 1000}, "max_model_len"),
        ({"block_size": 0}, "must be positive"),
        ({"speed": 0.0}, "must be positive"),
        ({"cpu_blocks": -1}, "cpu_blocks"),
        ({"ms_per_cpu_token": -0.1}, "cpu_blocks"),
        ({"cpu_blocks": 9, "pool": "http://127.0.0.1:9"}, "cpu_blocks"),
        ({"cpu_blocks": 9, "sliding_window": 64}, "cpu_blocks"),
        ({"cpu_blocks": 9, "eagle": True}, "cpu_blocks"),
        ({"cpu_blocks": 9, "lookahead": 1}, "cpu_blocks"),
    ],
)
def test_contradictions_are_refused(wrong: dict[str, Any], said: str) -> None:
    """A sequence or a number that cannot be, and a CPU tier that vLLM would not have."""
    with pytest.raises(ValueError, match=said):
        EmulatorOptions(**wrong).model_len()


def test_a_step_costs_the_sum_of_its_parts() -> None:
    """Each parameter times what it counts, in seconds."""
    model = TimeModel(
        base_ms=1.0,
        ms_per_prefill_token=0.1,
        ms_per_mtoken2=2.0,
        ms_per_decode=0.5,
        ms_per_mtoken_context=10.0,
    )
    work = StepWork(
        num_prefill_tokens=100,
        num_prefill_pairs=1e6,
        num_decodes=4,
        num_decode_context_tokens=200_000,
    )

    assert model.step_s(work) == pytest.approx(1e-3 * (1.0 + 10.0 + 2.0 + 2.0 + 2.0))
    assert PRESETS["instant"].step_s(work) == 0.0
