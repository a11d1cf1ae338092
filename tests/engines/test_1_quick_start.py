"""The README's quick start as it is printed, and every vLLM flag that the documents name."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from loadtest.dev import docs
from tests.docs_blocks import MODEL, ROOT, VLLM_FLAGS, blocks
from tests.engines.harness import Engine, Router, all_up, engine_python
from tests.forks import python_command

DOCUMENTS: Final = {str(path.relative_to(ROOT)): path.read_text() for path in docs.documents()}

_TIMEOUT_S: Final = 240
_GPU: Final = "CUDA_VISIBLE_DEVICES"
_PARSERS: Final = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
print(json.dumps({
    "flags": sorted(flag for action in parser._actions for flag in action.option_strings),
    "--tool-call-parser": sorted(ToolParserManager.list_registered()),
    "--reasoning-parser": sorted(ReasoningParserManager.list_registered()),
}))
"""


@cache
def known() -> Mapping[str, Sequence[str]]:
    """Ask the installed vLLM for its flags and the names of its parsers."""
    done = subprocess.run(
        [engine_python(), "-c", _PARSERS],
        env={"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        timeout=_TIMEOUT_S,
        check=True,
    )
    answer: Mapping[str, Sequence[str]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def checked(engine: Engine) -> dict[str, Any]:
    """Run `warmroute check` on one engine."""
    command = [*python_command(), "-m", "router.cli", "check", "--json", "--replica", engine.url]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_TIMEOUT_S, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def served(text: str) -> list[tuple[Mapping[str, str], Sequence[str]]]:
    """List the `vllm serve` commands of a document: variables, and words after the model."""
    found = []
    for block in blocks(text):
        lines = block.code.replace("\\\n", " ").splitlines()
        for number, line in enumerate(lines):
            if re.match(r"(\w+=\S+ )*vllm serve ", line):
                words = _words(lines[number:])
                at = words.index("serve")
                variables = dict(word.split("=", 1) for word in words[: at - 1])
                found.append((variables, words[at + 1 :]))
    return found


def _words(lines: Sequence[str]) -> list[str]:
    """Split the command that begins with the first line; a quoted text may span lines."""
    for number in range(1, len(lines)):
        with suppress(ValueError):
            return shlex.split("\n".join(lines[:number]), comments=True)
    return shlex.split("\n".join(lines), comments=True)


def test_every_flag_that_the_documents_may_name_is_one_of_vllm() -> None:
    """The list that all pages are compared with holds only flags of the installed vLLM."""
    assert set(VLLM_FLAGS) <= set(known()["flags"])


def test_every_parser_of_the_agents_page_is_registered() -> None:
    """The parsers of each model family exist under the names that the page gives."""
    page = DOCUMENTS["docs/guides/agents.md"]
    table = page[page.index("| models |") :].partition("\n\n")[0]
    rows = [line.split("|")[2:4] for line in table.splitlines()[2:]]

    assert len(rows) > 10
    for tool_cell, reasoning_cell in rows:
        assert set(re.findall(r"`([^`]+)`", tool_cell)) <= set(known()["--tool-call-parser"])
        assert set(re.findall(r"`([^`]+)`", reasoning_cell)) <= set(known()["--reasoning-parser"])


@pytest.mark.parametrize("name", [name for name, text in DOCUMENTS.items() if served(text)])
def test_printed_commands_name_flags_of_vllm(name: str) -> None:
    """Each `vllm serve` command of a page has only flags that vLLM knows."""
    for _, words in served(DOCUMENTS[name]):
        assert {word for word in words if word.startswith("--")} <= set(known()["flags"])


class Printed(Engine):
    """A replica started by a command of the README, for the CPU and the tiny model."""

    __slots__ = ()

    def __init__(self, name: str, log_dir: Path, words: Sequence[str]) -> None:
        super().__init__(name, log_dir, options=self._adapted(words))

    def _adapted(self, words: Sequence[str]) -> Sequence[str]:
        """Leave out the model and the port, which this machine decides."""
        model, *options = words
        assert model == MODEL
        at = options.index("--port")
        del options[at : at + 2]
        at = options.index("--kv-events-config")
        events: dict[str, Any] = json.loads(options[at + 1])
        self._check_events(events)
        del options[at : at + 2]  # the same one with free ports is given already
        return options

    def _check_events(self, events: Mapping[str, Any]) -> None:
        assert events["enable_kv_cache_events"] is True
        assert events["publisher"] == "zmq"
        for key in ("endpoint", "replay_endpoint"):
            assert re.fullmatch(r"tcp://\*:\d+", events[key]), "any other form does not bind"


def test_the_two_engine_quick_start_routes_to_a_warm_cache(log_dir: Path) -> None:
    """Both engines start as printed, are EXACT, and take an agent's request with tools."""
    commands = served(DOCUMENTS["README.md"])
    assert [variables[_GPU] for variables, _ in commands] == ["0", "1"]
    ports = [words[words.index("--port") + 1] for _, words in commands]
    assert ports == ["8001", "8002"]
    endpoints = re.findall(
        r"tcp://\*:\d+", " ".join(word for _, words in commands for word in words)
    )
    assert len(set(endpoints)) == 4
    engines = [
        Printed(f"printed-{number}", log_dir, words)
        for number, (_, words) in enumerate(commands, 1)
    ]
    tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "A long file. " * 300}],
        "tools": [{"type": "function", "function": tool}],
        "max_tokens": 4,
    }

    with all_up(engines), Router(engines, log_dir) as router:
        answers = [router.chat(body) for _ in range(2)]
        states = {router.state(name) for name in ("r1", "r2")}
        report = checked(engines[0])

    assert [answer.status_code for answer in answers] == [200, 200]
    assert states <= {"exact", "blind"}  # blind until the first event
    assert report["replicas"][0]["takes_tools"] is True
    cached = answers[1].json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.9 * answers[1].json()["usage"]["prompt_tokens"]
    assert answers[0].headers["x-warmroute-replica"] == answers[1].headers["x-warmroute-replica"]


def test_a_request_with_tools_needs_the_printed_flags(log_dir: Path) -> None:
    """Without the tool flags vLLM refuses an agent's request, and `check` says so."""
    tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "function": tool}],
        "max_tokens": 4,
    }

    with all_up([engine := Engine("no-tools", log_dir, options=())]):
        answer = httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=60)
        report = checked(engine)

    assert report["replicas"][0]["takes_tools"] is False
    [finding] = [each for each in report["findings"] if each["about"] == "tools"]
    assert finding["level"] == "warning"
    assert answer.status_code == 400
    assert "--enable-auto-tool-choice" in answer.text
