"""Coding agents, unchanged, with the hooks of docs/guides/agents.md: what the router learns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.agents import AGENTS, ALIASES, CLIENTS, DELEGATE, Agent, run, scripted
from tests.engines.harness import Router

TOKEN = "hooks-of-agents"
SAY = "Say something."

pytestmark = pytest.mark.skipif(
    not CLIENTS.exists() and "WARMROUTE_TEST_REQUIRE_SERVERS" not in os.environ,
    reason="no coding agents here: tests/engines/install_clients.sh needs node and npm",
)
each_agent = pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)


@pytest.fixture
def token(tmp_path: Path) -> tuple[str, ...]:
    """Options of a router whose admin port needs a token."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return "--admin-token-file", str(path), *ALIASES


def sessions(router: Router) -> list[dict[str, Any]]:
    """The sessions of conversations, not of titles and the like."""
    found = asked(router, "/admin/sessions")["sessions"]
    return [session for session in found if session["prompt_tokens"] > 4_000]


def asked(router: Router, path: str) -> Any:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.get(router.admin_url + path, headers=headers, timeout=30)
    answer.raise_for_status()
    return answer.json()


def num_hooks(router: Router, result: str) -> int:
    return int(router.metric("warmroute_agent_hooks_total", result=result))


@each_agent
def test_a_session_and_its_sub_agent_end(
    log_dir: Path, tmp_path: Path, token: tuple[str, ...], agent: Agent
) -> None:
    """Two hooks: of the sub-agent when it stops, of the session when the agent exits."""
    script = agent.hooks.delegates
    with scripted(script, tmp_path) as replicas, Router(replicas, log_dir, options=token) as router:
        hooks = router.admin_url, TOKEN
        run(agent, DELEGATE, url=router.url, folder=tmp_path, hooks=hooks)
        found, num_ended = sessions(router), num_hooks(router, "ended")

    (main,) = [session for session in found if session["parent"] is None]
    (child,) = [session for session in found if session["parent"] == main["session"]]
    assert main["ended"]
    assert child["ended"]
    assert num_ended == 2


@each_agent
def test_a_compaction_is_named(
    log_dir: Path, tmp_path: Path, token: tuple[str, ...], agent: Agent
) -> None:
    """The conversation goes on after it, and after its end."""
    script = [{"text": "Done."}]
    more, prompt = agent.hooks.compacts
    with scripted(script, tmp_path) as replicas, Router(replicas, log_dir, options=token) as router:
        for said in (SAY, prompt, SAY):
            run(
                agent,
                said,
                url=router.url,
                folder=tmp_path,
                goes_on=said != SAY or num_hooks(router, "ended") > 0,
                more=more if said == prompt else (),
                hooks=(router.admin_url, TOKEN),
            )
        num_compacted, num_ended = num_hooks(router, "compacted"), num_hooks(router, "ended")
        (session,) = sessions(router)
        turns = asked(router, f"/admin/sessions/{session['session']}")["turns_shown"]

    changes = [turn["computed"].get("change", {}).get("part") for turn in turns]
    assert num_compacted == 1
    assert num_ended == 3
    assert "compacted" in changes
    assert not any(turn["computed"]["tokens"].get("unknown") for turn in turns)
