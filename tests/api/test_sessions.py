"""router.api.sessions: the conversation that a request belongs to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from router.api.sessions import SessionHeaders, SessionIdentity, session_hash, session_of
from router.config import Config
from router.config.routing import SessionConfig

NAMES = Config().session.read
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
UUID = "3b70e2b4-94a4-4c11-9f0e-0123456789ab"


@pytest.mark.parametrize(
    ("headers", "body", "found"),
    [
        ({"x-session-id": "a", "session_id": "b"}, {"prompt_cache_key": "c"}, "a"),
        ({"session_id": "b"}, {"prompt_cache_key": "c"}, "b"),
        ({"session-id": "root", "thread-id": "own"}, {"prompt_cache_key": UUID}, "own"),
        ({"x-claude-code-session-id": "a"}, {"metadata": {"user_id": "u_session_b"}}, "a"),
        ({"x-session-affinity": "a", "x-opencode-session": "b"}, {}, "a"),
        ({"x-opencode-session": "b"}, {}, "b"),
        ({"x-dynamo-session-id": "a", "x-correlation-id": "b"}, {"session_id": "c"}, "a"),
        ({"x-smg-routing-key": "a"}, {"session_id": "c"}, "a"),
        ({"x-session-token": "a", "x-correlation-id": "b"}, {}, "a"),
        ({"x-correlation-id": "a"}, {"messages": [{"role": "user", "content": "x"}]}, "a"),
        ({"x-correlation-id": "a"}, {"session_id": "c"}, "c"),
        ({"x-correlation-id": "a"}, None, "a"),
        ({}, {"session_id": "s", "prompt_cache_key": "c"}, "s"),
        ({}, {"prompt_cache_key": "c", "metadata": {"user_id": "d"}}, "c"),
        ({}, {"previous_response_id": "resp_1", "input": "and then?"}, "resp_1"),
        ({}, {"metadata": {"user_id": f"user_0a_account__session_{UUID}"}}, UUID),
        ({}, {"metadata": {"user_id": '{"device_id":"d","session_id":"s"}'}}, "s"),
        ({}, {"metadata": {"user_id": "{not JSON"}}, "{not JSON"),
        ({}, {"metadata": {"user_id": "[]"}}, "[]"),
        ({}, {"metadata": {"user_id": 7}}, None),
        ({}, {"vllm_xargs": {"session_id": "x"}}, "x"),
        ({}, {"vllm_xargs": {"session_id": "x"}, "session_id": "s"}, "s"),
        ({}, {"vllm_xargs": ["session_id"]}, None),
        ({}, {"metadata": "x", "prompt_cache_key": ""}, None),
        ({"x-session-id": "x" * 20_000}, None, None),
        ({}, None, None),
    ],
)
def test_the_first_that_names_it_wins(
    headers: dict[str, str], body: dict[str, Any] | None, found: str | None
) -> None:
    """Configured headers come first, then the body's fields; invalid ids are skipped."""
    session = session_of(headers, body, NAMES, MESSAGES)

    assert (session.name if session else None) == found


@pytest.mark.parametrize(
    ("headers", "parent"),
    [
        ({"x-claude-code-session-id": "s"}, None),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, "s"),
        (
            {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "b",
             "x-claude-code-parent-agent-id": "a"},
            "s\0a",
        ),
        ({"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "s"}, "s"),
        ({"x-session-id": "s2", "x-parent-session-id": "s"}, "s"),
        ({"x-dynamo-session-id": "s2", "x-dynamo-parent-session-id": "s"}, "s"),
        ({"x-session-id": "s", "x-parent-session-id": "s"}, None),
    ],
)  # fmt: skip
def test_a_sub_agent_is_a_session_with_a_parent(
    headers: dict[str, str], parent: str | None
) -> None:
    """Claude Code's, Codex's and OpenCode's; each has another name than its parent."""
    session = session_of(headers, {}, NAMES, CHAT)

    assert session is not None
    assert session.parent == parent != session.name


def test_own_headers_come_before_the_known_ones_or_in_place_of_them() -> None:
    """A late header that is configured comes before all."""
    headers = {"x-own": "own", "x-session-id": "known", "x-correlation-id": "late"}
    parents = {"x-own-parent": "above", "x-parent-session-id": "known-above"}
    mine = SessionConfig(headers=("x-own",), parent_headers=("x-own-parent",))
    only = SessionConfig(headers=("x-none",), parent_headers=(), known_headers=False)
    late = SessionConfig(headers=("X-Correlation-ID",))

    assert session_of(headers | parents, None, mine.read, CHAT) == SessionIdentity("own", "above")
    del headers["x-own"]
    assert session_of(headers | parents, None, mine.read, CHAT) == SessionIdentity("known", "above")
    assert session_of(headers | parents, None, only.read, CHAT) is None
    found = session_of(CIMultiDict(headers), None, late.read, CHAT)
    assert found is not None
    assert found.name == "late"


def test_the_documentation_has_all_known_headers_in_order() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/concepts/sessions.md"
    section = page.read_text().partition("## Which session")[2].partition("\n## ")[0]
    rows = section.partition("\n- ")[0]
    known = SessionHeaders()

    read = [found for found in re.findall(r"`([a-z_-]+)`", rows) if found in known.names]
    assert tuple(dict.fromkeys(read))[: len(known.names)] == known.names
    for names in (known.late, known.parents):
        assert ", ".join(f"`{each}`" for each in names) in section


def name(path: str, **body: Any) -> str | None:
    session = session_of({}, body, NAMES, path)
    return session.name if session else None


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


ANSWER = {"role": "assistant", "content": "an answer"}
LONG = "a long text " * 1000


@pytest.mark.parametrize(
    ("path", "first", "later"),
    [
        (CHAT, [user("a")], [user("a"), ANSWER, user("b")]),
        (CHAT, [{"role": "system", "content": LONG + "at 10:00"}, user(LONG)],
         [{"role": "system", "content": LONG + "at 10:01"}, user(LONG), ANSWER, user("b")]),
        (MESSAGES, [user([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}])],
         [user([{"type": "text", "text": "a"}]), ANSWER, user("b")]),
        (RESPONSES, "a", [user("a"), {"type": "function_call", "name": "f", "arguments": "{}"}]),
        (RESPONSES, [{"type": "message", **user([{"type": "input_text", "text": "a"}])}],
         [{"type": "message", **user([{"type": "input_text", "text": "a"}])},
          {"type": "reasoning", "summary": []}, user("b")]),
    ],
)  # fmt: skip
def test_turns_of_one_conversation_agree(path: str, first: Any, later: Any) -> None:
    """Without any id: what comes before the first answer is the same in all of them."""
    field = "input" if path == RESPONSES else "messages"

    assert name(path, **{field: first}) == name(path, **{field: later}) is not None


def test_a_billing_header_is_no_other_session() -> None:
    """Claude Code's differs in each request, as a system block or as a line of one."""
    blocks = [[{"text": f"x-anthropic-billing-header: cch={n}"}, {"text": "You."}] for n in (1, 2)]
    lines = [f"x-anthropic-billing-header: cch={n}\nYou." for n in (1, 2)]

    for one, other in (blocks, lines):
        assert name(MESSAGES, system=one, messages=[user("a")]) == name(
            MESSAGES, system=other, messages=[user("a")]
        )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"messages": [user("a")]}, {"messages": [user("b")]}),
        ({"messages": [user(LONG + "a")]}, {"messages": [user(LONG + "b")]}),
        ({"messages": [user("same"), user("a")]}, {"messages": [user("same"), user("b")]}),
        ({"messages": [user("a")], "system": "x"}, {"messages": [user("a")], "system": "y"}),
        (
            {"messages": [user([{"type": "image_url", "image_url": {"url": "data:1"}}])]},
            {"messages": [user([{"type": "image_url", "image_url": {"url": "data:2"}}])]},
        ),
        (
            {"messages": [user("a")], "prompt_cache_key": "my agent"},
            {"messages": [user("b")], "prompt_cache_key": "my agent"},
        ),
        (
            {"messages": [user("a")], "metadata": {"user_id": "ann"}},
            {"messages": [user("b")], "metadata": {"user_id": "ann"}},
        ),
        (
            {"messages": [user("a")], "metadata": {"user_id": "ann"}},
            {"messages": [user("a")], "metadata": {"user_id": "bob"}},
        ),
    ],
)
def test_conversations_are_told_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Any difference in first turns counts; an application's key or a user's name is no session."""
    names = [name(CHAT, **one), name(CHAT, **other)]

    assert None not in names
    assert names[0] != names[1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        (CHAT, {"messages": [{"role": "system", "content": "a"}]}),
        (CHAT, {"messages": [ANSWER, user("a")]}),
        (CHAT, {"messages": [7]}),
        (MESSAGES, {"messages": {"role": "user"}}),
        (RESPONSES, {"input": None}),
        (RESPONSES, {}),
    ],
)
def test_what_has_no_first_turn_has_no_session(path: str, body: dict[str, Any]) -> None:
    """It has nothing in common with the request that follows it."""
    assert name(path, **body) is None


def test_a_first_turn_is_not_told() -> None:
    """The name holds a digest of the turn, not its text."""
    named = name(CHAT, messages=[user("a secret")])

    assert named is not None
    assert "secret" not in named


def test_a_session_belongs_to_its_model() -> None:
    """The digest differs by model, is stable, and fits a signed 64-bit integer."""
    assert session_hash("s", "a") == session_hash("s", "a") != session_hash("s", "b")
    assert 0 <= session_hash("s", "a") < 1 << 63


@pytest.mark.parametrize(
    "session", ["a\r\nX-Evil: 1", "\udcff\udcfe", "\x00", "sité", " ", " a", "a\t", "x" * 10_000]
)
def test_an_odd_session_is_a_session(session: str) -> None:
    """Any id has a digest of its own."""
    assert session_of({"x-session-id": session}, None, NAMES, CHAT) == SessionIdentity(session)
    assert session_hash(session, "m") != session_hash("", "m")
