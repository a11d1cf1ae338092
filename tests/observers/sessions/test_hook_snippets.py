"""The hooks that docs/guides/agents.md gives to agents, parsed and executed as agents do it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from tests.docs_blocks import ADMIN_PORT, ROOT, blocks
from tests.faults.stage import SECRET, Engines, Stage, chat, on_stage, streamed, words

TOKEN = f"{SECRET}-token"
VARIABLE = "WARMROUTE_ADMIN_TOKEN"
NAME, CHILD = f"{SECRET}-main", f"{SECRET}-child"

Run = Callable[[str, str, str | None], Awaitable[None]]
"""Runs the hook of an event, for a session or its sub-agent."""


def block(part: str, stage: Stage) -> str:
    """Return the page's block with `part` in it, for the admin port of a stage."""
    page = (ROOT / "docs/guides/agents.md").read_text()
    (found,) = [each.code for each in blocks(page) if part in each.code]
    return found.replace(f"http://127.0.0.1:{ADMIN_PORT}", stage.admin_url)


def payload(event: str, session: str, agent: str | None) -> str:
    """What Claude Code and Codex send."""
    sub_agent = {} if agent is None else {"agent_id": agent}
    return json.dumps({"hook_event_name": event, "session_id": session, "cwd": "/"} | sub_agent)


def claude(stage: Stage, _: Path) -> Run:
    """Claude Code sends the hook itself; it fills in variables that are allowed."""
    settings = json.loads(block("/hooks/claude", stage))

    async def run(event: str, session: str, agent: str | None) -> None:
        ((hook,),) = [group["hooks"] for group in settings["hooks"][event]]
        assert (hook["type"], hook["allowedEnvVars"]) == ("http", [VARIABLE])
        headers = {
            name: each.replace(f"${VARIABLE}", TOKEN) for name, each in hook["headers"].items()
        }
        headers["Content-Type"] = "application/json"
        async with (
            aiohttp.ClientSession() as client,
            client.post(
                hook["url"], headers=headers, data=payload(event, session, agent)
            ) as answer,
        ):
            assert (answer.status, await answer.read()) == (204, b"")

    return run


def codex(stage: Stage, _: Path) -> Run:
    """Codex starts a shell, which gets the hook as its input."""
    settings = json.loads(block("/hooks/codex", stage))

    async def run(event: str, session: str, agent: str | None) -> None:
        ((hook,),) = [group["hooks"] for group in settings["hooks"][event]]
        assert hook["type"] == "command"
        command = "sh", "-c", hook["command"]
        assert await output(*command, said=payload(event, session, agent)) == ""

    return run


def opencode(stage: Stage, folder: Path) -> Run:
    """OpenCode loads a plugin, and calls it with its events."""
    plugin = folder / "warmroute.mjs"
    plugin.write_text(block("/hooks/opencode", stage))
    script = f"""
        import {{ Warmroute }} from {json.dumps(str(plugin))}
        const [event, session, agent] = JSON.parse(process.argv[1])
        const plugin = await Warmroute({{}})
        const tell = (type, properties) => plugin.event({{ event: {{ type, properties }} }})
        await tell("session.created", {{ info: {{ id: session }} }})
        await tell("session.updated", {{ info: {{ id: {json.dumps(CHILD)}, parentID: session }} }})
        await tell("session.idle", {{ sessionID: session }})
        await tell("message.updated", {{ info: {{ id: "m" }} }})
        if (event === "SessionEnd") await plugin.dispose()
        if (event === "PostCompact") await tell("session.compacted", {{ sessionID: session }})
        if (event === "SubagentStop") await tell("session.idle", {{ sessionID: agent }})
        if (event === "deleted") await tell("session.deleted", {{ info: {{ id: session }} }})
    """

    async def run(event: str, session: str, agent: str | None) -> None:
        told = json.dumps([event, session, agent])
        await output("node", "--input-type=module", "-e", script, told)

    return run


async def output(*command: str, said: str = "") -> str:
    """Run a command of an agent's; return what it wrote."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {VARIABLE: TOKEN},
    )
    written, _ = await process.communicate(said.encode())
    assert process.returncode == 0, written
    return written.decode()


HEADERS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "claude": (
        {"x-claude-code-session-id": NAME},
        {"x-claude-code-session-id": NAME, "x-claude-code-agent-id": CHILD},
    ),
    "codex": (
        {"session-id": NAME, "thread-id": NAME},
        {"session-id": NAME, "thread-id": CHILD, "x-codex-parent-thread-id": NAME},
    ),
    "opencode": (
        {"x-session-affinity": NAME},
        {"x-session-affinity": CHILD, "x-parent-session-id": NAME},
    ),
}
EVENTS = ["PostCompact", "SubagentStop", "SessionEnd"]
NEEDS = {"claude": "true", "codex": "curl", "opencode": "node"}


@pytest.mark.parametrize(
    ("agent", "prepare"), [("claude", claude), ("codex", codex), ("opencode", opencode)]
)
async def test_the_snippets_do_what_the_page_says(
    agent: str, prepare: Callable[[Stage, Path], Run], tmp_path: Path
) -> None:
    """A compaction, the end of a sub-agent and the end of the session, with the admin token."""
    if shutil.which(NEEDS[agent]) is None:
        pytest.skip(f"{NEEDS[agent]} is not installed")
    token = tmp_path / "token"
    token.write_text(TOKEN)
    async with Engines(1) as (engine,), on_stage(engine, admin__token_file=token) as stage:
        run = prepare(stage, tmp_path)
        for number, headers in enumerate(HEADERS[agent]):
            await stage.ask(streamed(chat(words(number))), headers={"X-Session-ID": ""} | headers)
        await stage.settled(engine)
        sets, counts = stage.router.conversations, []
        for event in EVENTS:
            await run(event, NAME, CHILD if event == "SubagentStop" else None)
            there = sets.at("r1")  # type: ignore[arg-type]
            counts.append((there.num_sessions, there.num_tokens > 0))
        results = {
            result: stage.metric("warmroute_agent_hooks_total", agent=agent, result=result)
            for result in ("ended", "compacted", "unknown", "ignored")
        }

    assert counts == [(2, True), (1, False), (0, False)]
    assert results == {"ended": 2, "compacted": 1, "unknown": 0, "ignored": 0}


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_a_session_that_a_user_deletes_has_ended(tmp_path: Path) -> None:
    """In OpenCode, which goes on itself."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    async with Engines(1) as (engine,), on_stage(engine, admin__token_file=token) as stage:
        run = opencode(stage, tmp_path)
        headers = {"X-Session-ID": ""} | HEADERS["opencode"][0]
        await stage.ask(streamed(chat(words(1))), headers=headers)
        await run("deleted", NAME, None)
        left = stage.router.conversations.at("r1").num_sessions  # type: ignore[arg-type]

    assert left == 0


async def test_codex_is_not_disturbed_by_a_router_that_is_gone(tmp_path: Path) -> None:
    async with Engines(1) as (engine,), on_stage(engine) as stage:
        run = codex(stage, tmp_path)

    await run("SessionEnd", NAME, None)
