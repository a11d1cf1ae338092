"""Coding agents as their users start them: with what docs/guides/agents.md says, and nothing else.

Each works in a folder of its own with a home of its own, and is killed if it takes too long.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from tests.docs_blocks import ROUTER_PORT, blocks
from tests.engines.harness import REPOSITORY, Ours, all_up
from tests.ports import free_port

CLIENTS: Final = REPOSITORY / ".engines" / "clients" / "node_modules" / ".bin"
MODEL: Final = "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8"  # of the page
ALIASES: Final = ("--model-alias", "claude-*=tiny")
"""What the page has the router started with, for the tiny model."""
MAX_TOKENS: Final = 49_152  # Claude Code's first prompt has 15,000 tokens of the tiny model
SAID: Final = "The file says warm."
_WRITE: Final = "echo warm > made.txt"
_READ: Final = "cat made.txt"
_TIMEOUT_S: Final = 150.0


class Agent(Struct, frozen=True):
    """One agent.

    api: The API it speaks. block: What its block of the page has in it. file: Where in its home
    the block goes; None: it is a command line, of which the variables are taken. command,
    resumed: Arguments before the prompt of a new conversation, or of one that goes on. script: What
    the model says, turn by turn. delegates: What it says to start a sub-agent that ends before the
    agent does.
    """

    name: str
    api: str
    block: str
    file: str | None
    command: Sequence[str]
    resumed: Sequence[str]
    script: Sequence[Mapping[str, Any]]
    delegates: Sequence[Mapping[str, Any]]
    environ: Mapping[str, str] = {}


DELEGATE: Final = "Delegate this."


def _delegates(name: str, *others: Mapping[str, Any], **arguments: str) -> Any:
    """Write a script: a sub-agent is started, other steps follow, and that is all."""
    called = {"call": name, "arguments": arguments}
    steps = [step | {"asked": DELEGATE} for step in (called, *others)]  # not for the sub-agent
    return (*steps, {"text": SAID})


_LOOK: Final = "Look around."


def _calls(name: str, field: str, **more: str) -> Sequence[Mapping[str, Any]]:
    """Write a script: a file is written by a command, read by another, and that is all."""
    commands = ({"call": name, "arguments": {field: each, **more}} for each in (_WRITE, _READ))
    return (*commands, {"text": SAID})


_UNASKED: Final = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")

AGENTS: Final = (
    Agent(
        name="claude",
        api="messages",
        block="ANTHROPIC_BASE_URL=",
        file=None,
        command=("--allowedTools", "Bash", "-p"),
        resumed=("--allowedTools", "Bash", "--continue", "-p"),
        script=_calls("Bash", "command", description="As asked"),
        delegates=_delegates(
            "Agent", description=_LOOK, prompt=_LOOK, subagent_type="general-purpose"
        ),
    ),
    Agent(
        name="codex",
        api="responses",
        block="wire_api",
        file=".codex/config.toml",
        command=_UNASKED,
        resumed=(*_UNASKED, "resume", "--last"),
        script=_calls("exec_command", "cmd"),
        delegates=_delegates(
            "multi_agent_v1__spawn_agent",
            {"call": "exec_command", "arguments": {"cmd": "sleep 8"}},
            message=_LOOK,
        ),
        environ={"WARMROUTE_KEY": "none"},
    ),
    Agent(
        name="opencode",
        api="chat",
        block="@ai-sdk/openai-compatible",
        file=".config/opencode/opencode.json",
        command=("run",),
        resumed=("run", "--continue"),
        script=_calls("bash", "command", description="As asked"),
        delegates=_delegates("task", description=_LOOK, prompt=_LOOK, subagent_type="general"),
    ),
)


def run(
    agent: Agent,
    prompt: str,
    *,
    url: str,
    folder: Path,
    goes_on: bool = False,
) -> str:
    """Let an agent answer a prompt in `folder`; return what it wrote.

    Args:
        agent: Who.
        prompt: Its user's words.
        url: Of the router.
        folder: Its home and its files.
        goes_on: It goes on from its last conversation.

    Raises:
        AssertionError: it failed.
        subprocess.TimeoutExpired: it did not end.
    """
    home, work = folder / "home", folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), **agent.environ}
    block = _block(agent.block).replace(f"http://127.0.0.1:{ROUTER_PORT}", url)
    if agent.file is None:
        environ |= dict(word.split("=", 1) for word in shlex.split(block) if "=" in word)
    else:
        path = home / agent.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block)
    arguments = agent.resumed if goes_on else agent.command
    done = subprocess.run(
        [CLIENTS / agent.name, *arguments, prompt],
        cwd=work,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_TIMEOUT_S,
        check=False,
    )
    said = done.stdout.decode(errors="replace")
    assert done.returncode == 0, said[-2_000:]
    return said


def _block(part: str) -> str:
    """Find a block of the page, for the tiny model."""
    page = (REPOSITORY / "docs/guides/agents.md").read_text(encoding="utf-8")
    [code] = [block.code for block in blocks(page) if part in block.code]
    return code.replace(MODEL, "tiny").replace('"context": 262144', '"context": 40960')


@contextmanager
def scripted(script: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[Sequence[Ours]]:
    """Run two emulated replicas that answer with a script."""
    path = folder / "script.json"
    path.write_text(json.dumps(script))
    replicas = []
    for name in ("scripted-1", "scripted-2"):
        port = free_port()
        words = [
            "loadtest.emulator", "--port", str(port), "--preset", "instant",
            "--max-model-len", str(MAX_TOKENS), "--script", str(path),
        ]  # fmt: skip
        replicas.append(Ours(name, f"http://127.0.0.1:{port}", words, folder / f"{name}.log"))
    with all_up(replicas):
        yield replicas
