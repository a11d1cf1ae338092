"""Digests of a chat's parts: they tell apart what engines tell apart, and nothing else.

Which requests are the same request, sent again.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.api.digests import (
    LARGE_BYTES,
    MAX_MESSAGES,
    PartDigests,
    body_digest,
    digest_message,
    parts_of,
)

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TOOLS = [{"name": "read", "description": "x"}, {"name": "write"}]


def user(content: object, **fields: object) -> dict[str, object]:
    return {"role": "user", "content": content} | fields


def digested(path: str, **body: Any) -> PartDigests:
    found = parts_of(path, body)
    assert found is not None
    return found


def test_each_part_has_a_digest_of_its_own() -> None:
    base = digested(CHAT, messages=[{"role": "system", "content": "s"}, user("a")], tools=TOOLS)
    other = digested(CHAT, messages=[{"role": "system", "content": "t"}, user("a")], tools=TOOLS)
    assert (base.tools, base.messages) == (other.tools, other.messages)
    assert base.system != other.system
    assert (base.num_system, len(base.messages)) == (1, 1)

    swapped = digested(CHAT, messages=[user("a")], tools=TOOLS[::-1])
    assert swapped.tools != base.tools
    assert swapped.tool_set == base.tool_set
    assert digested(CHAT, messages=[user("a")], tools=TOOLS[:1]).tool_set != base.tool_set


def test_cache_control_marks_move_and_change_nothing() -> None:
    """On messages, system prompt and tools: clients put them at the end of each turn."""
    mark = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": "a"}
    marked = digested(
        MESSAGES,
        system=[text | mark],
        messages=[user([text | mark])],
        tools=[TOOLS[0], TOOLS[1] | mark],
    )
    plain = digested(MESSAGES, system=[text], messages=[user([text])], tools=TOOLS)

    assert marked == plain


def test_the_billing_header_changes_nothing() -> None:
    """Claude Code's; engines drop it."""
    text = {"type": "text", "text": "You are an agent."}
    found = {
        digested(MESSAGES, system=[*head, text], messages=[user("a")]).system
        for head in (
            [],
            [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"}],
            [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=2;"}],
        )
    }

    assert len(found) == 1


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_and_developer_stand_before_the_messages(role: str) -> None:
    found = digested(CHAT, messages=[{"role": role, "content": "s"}, user("a"), user("b")])

    assert (found.num_system, len(found.messages)) == (1, 2)
    assert found.system != 0


def test_an_input_of_the_responses_api_is_a_conversation() -> None:
    """As text, and as items; an item of the model's is an answer."""
    text = digested(RESPONSES, input="a", instructions="s")
    items = digested(RESPONSES, input=[user("a")], instructions="s")
    call = {"type": "function_call", "name": "read", "arguments": "{}"}
    assert text == items
    assert not text.has_answers
    assert digested(RESPONSES, input=[user("a"), call]).has_answers


def test_known_digests_are_taken_over() -> None:
    """Messages that were parsed before are not digested again."""
    messages = [{"role": "system", "content": "s"}, *[user(str(n)) for n in range(9)]]
    known = [digest_message(each) for each in messages[:5]]
    body = {"messages": messages}

    assert parts_of(CHAT, body, known) == parts_of(CHAT, body)
    unread = {"messages": [messages[0], *[None] * 4, *messages[5:]]}
    assert parts_of(CHAT, unread, known) == parts_of(CHAT, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        (CHAT, {}),
        (CHAT, {"messages": {}}),
        (RESPONSES, {"input": 5}),
        (CHAT, {"messages": [user("a")] * (MAX_MESSAGES + 1)}),
        (CHAT, {"messages": [user("a")], "tools": [{}] * (MAX_MESSAGES + 1)}),
    ],
)
def test_what_is_no_chat_or_too_long_has_no_parts(path: str, body: dict[str, Any]) -> None:
    assert parts_of(path, body) is None


@pytest.mark.parametrize("item", [None, 5, "text", [], {}, {"role": 5}, {"content": [5, None]}])
def test_odd_messages_have_digests_too(item: object) -> None:
    found = digested(CHAT, messages=[user("a"), item], tools=[item], system=item)

    assert len(found.messages) == 2


TINY_CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0.5,
}


def digest(body: Any, content_type: str = "application/json", **whose: str) -> bytes:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    where = {"path": "/v1/chat/completions", "owner": ""} | whose
    return body_digest(raw, content_type, **where)


@pytest.mark.parametrize(
    "again",
    [
        TINY_CHAT,
        dict(reversed(TINY_CHAT.items())),
        orjson.dumps(TINY_CHAT, option=orjson.OPT_INDENT_2),
        TINY_CHAT | {"stream": True, "stream_options": {"include_usage": True}},
        TINY_CHAT | {"metadata": {"user_id": "1"}, "user": "me", "max_tokens": 7},
    ],
)
def test_what_is_written_anew_is_the_same(again: Any) -> None:
    assert digest(again) == digest(TINY_CHAT)


@pytest.mark.parametrize(
    "other",
    [
        TINY_CHAT | {"model": "large"},
        TINY_CHAT | {"temperature": 0.6},
        TINY_CHAT | {"response_format": {"type": "json_object"}},
        TINY_CHAT | {"messages": [{"role": "user", "content": "hello!"}]},
        b"no JSON",
        b"[]",
    ],
)
def test_what_computes_something_else_is_another(other: Any) -> None:
    assert digest(other) != digest(TINY_CHAT)


def test_another_tenants_and_another_routes_request_is_another() -> None:
    assert digest(TINY_CHAT, owner="a") != digest(TINY_CHAT, owner="b")
    assert digest(TINY_CHAT, path="/v1/completions") != digest(TINY_CHAT)


def test_claude_codes_billing_header_does_not_count() -> None:
    def asked(billing: str) -> Any:
        blocks = [f"x-anthropic-billing-header: cch={billing}", "You are an agent."]
        return TINY_CHAT | {"system": [{"type": "text", "text": text} for text in blocks]}

    assert digest(asked("a")) == digest(asked("b"))
    assert digest(asked("a")) != digest(TINY_CHAT)


def test_a_forms_boundary_does_not_count() -> None:
    def form(boundary: str, text: str) -> bytes:
        body = f'--{boundary}\r\nContent-Disposition: form-data; name="file"\r\n\r\n{text}\r\n'
        return digest(
            (body + f"--{boundary}--\r\n").encode(), f"multipart/form-data; boundary={boundary}"
        )

    assert form("abc", "sound") == form("0123456789", "sound")
    assert form("abc", "sound") != form("abc", "other")


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "' + b"x" * LARGE_BYTES + b'"}',
        b"[" * 5000,
        b'{"a": 123456789012345678901234567890}',
        b'{"a": "\\ud800"}',
        b"\xff\x00",
    ],
)
def test_any_bytes_have_a_digest(body: bytes) -> None:
    assert digest(body) == digest(body) != digest(body + b"x")
