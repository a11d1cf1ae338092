"""Coding agents, unchanged: several turns with tools, each on the cache of the one before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.agents import (
    AGENTS,
    ALIASES,
    CLIENTS,
    DELEGATE,
    MAX_TOKENS,
    SAID,
    Agent,
    run,
    scripted,
)
from tests.engines.harness import Engine, Router, all_up

VOCABULARY = 8_192

pytestmark = pytest.mark.skipif(
    not CLIENTS.exists() and "WARMROUTE_TEST_REQUIRE_SERVERS" not in os.environ,
    reason="no coding agents here: tests/engines/install_clients.sh needs node and npm",
)
each_agent = pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)


@pytest.fixture(scope="module")
def roomy(log_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two real replicas with room for an agent's context.

    Agents take an answer that is cut off for an error, and a model without weights never ends one:
    here every 64th token does.
    """
    ends = {"eos_token_id": list(range(0, VOCABULARY, 64))}
    (log_dir / "generation_config.json").write_text(json.dumps(ends))
    tools = "--enable-auto-tool-choice", "--tool-call-parser", "hermes"
    settings: dict[str, Any] = {
        "num_blocks": MAX_TOKENS // 32 + 1,
        "max_model_len": MAX_TOKENS,
        "options": (*tools, "--generation-config", str(log_dir)),
    }
    engines = Engine("roomy-1", log_dir, **settings), Engine("roomy-2", log_dir, **settings)
    with all_up(engines):
        yield engines


@each_agent
def test_a_conversation_goes_on_where_its_prompt_is_cached(
    roomy: tuple[Engine, Engine], log_dir: Path, tmp_path: Path, agent: Agent
) -> None:
    """A second process of the agent continues, and its whole previous prompt is cached."""
    with Router(roomy, log_dir, options=ALIASES) as router:
        run(agent, "Say something.", url=router.url, folder=tmp_path)
        run(agent, "Say something else.", url=router.url, folder=tmp_path, goes_on=True)
    first, *_, second = turns(router, agent)

    assert second["decision"]["candidate"] == first["decision"]["candidate"]
    assert second["num_reported_cached_tokens"] == second["num_predicted_cached_tokens"]
    assert second["num_reported_cached_tokens"] > 0.9 * first["num_prompt_tokens"]


@each_agent
def test_tools_are_called_turn_by_turn(log_dir: Path, tmp_path: Path, agent: Agent) -> None:
    """It writes a file, reads it and ends; each turn computes only the tokens that it added."""
    with (
        scripted(agent.script, tmp_path) as replicas,
        Router(replicas, log_dir, options=ALIASES) as router,
    ):
        said = run(agent, "Write warm to a file.", url=router.url, folder=tmp_path)
    asked, wrote, read = turns(router, agent)

    assert (tmp_path / "work" / "made.txt").read_text() == "warm\n"
    assert SAID in said
    for before, turn in ((asked, wrote), (wrote, read)):
        assert turn["num_reported_cached_tokens"] == turn["num_predicted_cached_tokens"]
        assert turn["num_reported_cached_tokens"] >= before["num_prompt_tokens"] // 16 * 16 - 16


@each_agent
def test_a_sub_agent_is_a_session_below_its_parents(
    log_dir: Path, tmp_path: Path, agent: Agent
) -> None:
    with (
        scripted(agent.delegates, tmp_path) as replicas,
        Router(replicas, log_dir, options=ALIASES) as router,
    ):
        run(agent, DELEGATE, url=router.url, folder=tmp_path)
        found = httpx.get(f"{router.admin_url}/admin/sessions", timeout=30).json()["sessions"]
    found = [session for session in found if session["prompt_tokens"] > 4_000]  # no titles

    (main,) = [session for session in found if session["parent"] is None]
    (child,) = [session for session in found if session["parent"] == main["session"]]
    assert child["turns"] >= 1


def turns(router: Router, agent: Agent) -> list[dict[str, Any]]:
    """Read the records of the conversation itself, once the router has ended.

    An agent also asks for titles and the like, in shorter prompts.
    """
    records = [r for r in router.decisions() if r["num_prompt_tokens"] > 4_000]
    assert {(record["api"], record["outcome"]) for record in records} == {(agent.api, "ok")}
    return records
