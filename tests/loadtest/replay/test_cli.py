"""`warmroute replay`: options, the report, the file, interruption, mistakes."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from click.testing import CliRunner, Result

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from loadtest.engine_model.time_model import PRESETS, TimeModel
from loadtest.replay.cli import command
from loadtest.results import TurnResult
from loadtest.runner import RunWriter, read_run

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 60.0
TRACE = [
    {"timestamp": 20 * n, "input_length": 512 * 2, "output_length": 3, "hash_ids": [0, n + 1]}
    for n in range(6)
]


class InThread:
    """An emulator in a thread of its own, for a command that has a loop of its own."""

    def __init__(self, options: EmulatorOptions) -> None:
        self._options = options
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()))
        self._loop: asyncio.AbstractEventLoop
        self._over: asyncio.Event
        self.url = ""

    def __enter__(self) -> InThread:
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(PATIENCE_S)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        async with Emulator(self._options) as emulator:
            self.url = emulator.url
            self._ready.set()
            await self._over.wait()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with InThread(EmulatorOptions(time_model=PRESETS["instant"])) as engine:
        yield engine.url


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    return str(path)


def run(*arguments: str, **environ: str) -> Result:
    return CliRunner(env={"OPENAI_API_KEY": ""} | environ).invoke(command, arguments)


def test_every_option_has_a_help_text() -> None:
    """--help lists them all."""
    result = run("--help")

    assert result.exit_code == 0
    assert "--session-header" in result.output
    for option in command.params[1:]:
        assert getattr(option, "help", None), option.name


def test_a_trace_is_replayed_and_kept(url: str, trace: str, tmp_path: Path) -> None:
    """Open loop over a trace: a table, progress, a run file with every turn, status 0."""
    out = tmp_path / "run.jsonl"

    result = run(
        f"{url}/v1", "--trace", trace, "--scale-time", "0.25", "--warm-up", "1", "--label", "me",
        "--salt", "s", "-o", str(out), "--seed", "5",
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    assert "6 turns, 6,144 prompt tokens, open loop over 0:00" in result.stderr
    assert "6/6" in result.stderr
    for words in ("me: trace.jsonl, open loop", "5 (and 1 to warm up)", "TTFT", "Every turn:"):
        assert words in result.stdout
    kept = read_run(out)
    assert kept.info.is_complete
    assert (kept.info.label, kept.info.seed, kept.info.loop) == ("me", 5, "open")
    assert kept.info.settings["trace"] == trace
    assert [turn.is_warm_up for turn in kept.turns].count(True) == 1
    assert [turn.num_prompt_tokens for turn in kept.turns] == [1024] * 6
    due = sorted(turn.due_s or 0.0 for turn in kept.turns)
    assert due == pytest.approx([0.005 * n for n in range(6)])


def test_agents_in_closed_loop(url: str) -> None:
    """Generated sessions go turn after turn, and most of every prompt is found in the cache."""
    result = run(
        url, "--generate", "agents", "--sessions", "2", "--turns", "3", "--scale-tokens", "0.02",
        "--block-size", "16", "--loop", "closed", "--scale-time", "0.001", "--rate", "inf",
        "--concurrency", "2", "--session-header", "x-session-id", "--api", "chat",
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    assert "closed loop" in result.stdout
    assert "words of the bundled tokenizer" in result.stderr


def test_the_key_is_sent_and_never_shown(url: str, trace: str, tmp_path: Path) -> None:
    """From the file or from the environment; in no output and no run file."""
    key = tmp_path / "key"
    key.write_text("sk-s3cret\n")
    out = tmp_path / "run.jsonl"

    from_file = run(url, "--trace", trace, "--api-key-file", str(key), "-o", str(out))
    from_environ = run(url, "--trace", trace, OPENAI_API_KEY="sk-s3cret")

    assert (from_file.exit_code, from_environ.exit_code) == (0, 0)
    for text in (from_file.output, from_environ.output, out.read_text()):
        assert "s3cret" not in text


def test_failed_turns_are_status_1(url: str, trace: str) -> None:
    """Turns that the target refuses: the run reports them, and its status is 1."""
    result = run(url, "--trace", trace, "--extra-body", '{"temperature": -1}')

    assert result.exit_code == 1
    assert "http_400" in result.stdout


def test_turns_that_are_too_long_are_announced(url: str, tmp_path: Path) -> None:
    """Turns that the model's context cannot hold are counted, and then refused."""
    line = TRACE[1] | {"input_length": 512 * 1000, "hash_ids": list(range(1000))}
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (*TRACE[:2], line)))

    result = run(url, "--trace", str(path))

    assert "Note: 1 turns are longer than the model's" in result.stderr
    assert "http_400" in result.stdout


def test_what_was_measured_is_not_written_over(url: str, trace: str, tmp_path: Path) -> None:
    """A file that is there stays, unless --overwrite says otherwise."""
    out = tmp_path / "run.jsonl"
    out.write_text("precious")

    refused = run(url, "--trace", trace, "-o", str(out))
    kept = out.read_text()
    replaced = run(url, "--trace", trace, "-o", str(out), "--overwrite")

    assert (refused.exit_code, kept) == (2, "precious")
    assert "--overwrite replaces it" in refused.output
    assert replaced.exit_code == 0
    assert len(read_run(out).turns) == 6


def test_a_full_disk_ends_the_run(
    url: str, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured until then is kept and reported; the status is 1."""
    out = tmp_path / "run.jsonl"
    add = RunWriter.add

    def full_at_third(writer: RunWriter, result: TurnResult) -> None:
        if out.read_bytes().count(b"\n") == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(writer, result)

    monkeypatch.setattr(RunWriter, "add", full_at_third)

    result = run(url, "--trace", trace, "-o", str(out), "--scale-time", "10")

    assert result.exit_code == 1
    assert "cannot be written (No space left on device)" in result.stderr
    assert "PARTIAL" in result.stdout
    assert len(read_run(out).turns) == 2
    assert not read_run(out).info.is_complete


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["127.0.0.1:1"], "write it like http://127.0.0.1:1"),
        (["http://127.0.0.1:1"], "is it running"),
        (["URL", "--model", "gpt"], "does not serve 'gpt', but tiny: see --model"),
        (["URL", "--header", "nonsense"], "NAME: VALUE"),
        (["URL", "--header", "a b: c"], "NAME: VALUE"),
        (["URL", "--warm-up", "-3"], "-3 is not in the range"),
        (["URL", "--extra-body", "{"], "is not JSON"),
        (["URL", "--extra-body", "[1]"], "is no JSON object"),
        (["URL", "--request-rate", "1", "--loop", "closed"], "needs the open loop"),
        (["URL", "--request-rate", "0"], "0 is not in the range"),
        (["URL", "--timeout", "-1"], "is not in the range"),
        (["URL", "--api-key-file", "/nowhere"], "/nowhere: No such file"),
        (["URL", "-o", "/nowhere/run.jsonl"], "/nowhere/run.jsonl: No such file"),
        (["URL", "--tokenizer", "/nowhere", "--api", "chat"], "/nowhere"),
    ],
)
def test_mistakes_are_explained(url: str, trace: str, arguments: list[str], words: str) -> None:
    """Exit status 2, what is wrong, and no traceback; nothing was sent."""
    given = [url if argument == "URL" else argument for argument in arguments]

    result = run(*given, "--trace", trace)

    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_a_bad_trace_is_status_2(url: str, trace: str, tmp_path: Path) -> None:
    """The line and the field of a bad trace are named; without a workload there is nothing."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(TRACE[0]) + "\n" + json.dumps(TRACE[1] | {"input_length": -1}) + "\n")

    wrong = run(url, "--trace", str(bad))
    missing = run(url)

    assert (wrong.exit_code, missing.exit_code) == (2, 2)
    assert "line 2" in wrong.output
    assert "input_length" in wrong.output
    assert "--generate" in missing.output


def test_interrupted_runs_report_what_there_is(tmp_path: Path) -> None:
    """Ctrl-C ends it within moments: a partial file, a report, status 1."""
    out = tmp_path / "run.jsonl"
    slow = EmulatorOptions(time_model=TimeModel(base_ms=1.0))
    lines = [line | {"timestamp": 1000 * n} for n, line in enumerate(TRACE * 50)]
    trace = tmp_path / "long.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code = "from loadtest.replay.cli import command; command()"
    with InThread(slow) as engine:
        process = subprocess.Popen(
            [sys.executable, "-c", code, engine.url, "--trace", str(trace), "--scale-time", "0.1",
             "-o", str(out)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OPENAI_API_KEY": ""},
        )  # fmt: skip
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s and process.poll() is None:
            if out.exists() and out.read_bytes().count(b"\n") > 3:
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=PATIENCE_S)[0].decode()

    assert process.returncode == 1, output
    assert "PARTIAL: interrupted at " in output
    assert "Traceback" not in output
    kept = read_run(out)
    assert not kept.info.is_complete
    assert kept.info.note in output
    assert 3 <= len(kept.turns) < 300
