"""Messages and tools whose fate in the engine is not certain are left to it.

What is rebuilt is compared with the engine's own in test_golden.py, to the key.
"""

from __future__ import annotations

from typing import Any

import pytest

from router.tokens.conversation import JsonMemo, build_conversation, build_tools, without_developer
from router.tokens.needs_engine import NeedsEngine

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": None},
        {"role": "user", "content": ["text"]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": 5}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": "text", "text": "x", "uuid": "u"}]},
        {"role": "user", "content": "x", "name": None},
        {"role": "user", "content": "x", "author": {}},
        {"role": "user", "content": "x", "tool_calls": [CALL]},
        {"role": "user", "content": "x", "reasoning": 5},
        {"role": "robot", "content": "x", "tool_call_id": "c"},
        {"role": "tool", "content": "x", "tool_call_id": 5},
        {"role": "developer", "content": "x", "tools": []},
        {"role": "assistant", "content": "x", "refusal": 5},
        {"role": "assistant", "content": "x", "audio": {"id": "a"}},
        {"role": "assistant", "content": "x", "reasoning": ["r"]},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "assistant", "tool_calls": "calls"},
        {"role": "assistant", "tool_calls": ["call"]},
        {"role": "assistant", "tool_calls": [CALL | {"id": None}]},
        {"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]},
        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f"}}]},
        {"role": "assistant", "tool_calls": [CALL | {"function": None}]},
    ],
)
def test_uncertain_messages(message: dict[str, Any]) -> None:
    """They raise NeedsEngine."""
    with pytest.raises(NeedsEngine):
        build_conversation([message], "string", JsonMemo())


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "custom", "function": {"name": "f"}},
        {"defer_loading": 1, "function": {"name": "f"}},
        {"function": {"name": "f", "strict": "true"}},
        {"function": {"name": "f", "description": 5}},
        {"function": {"name": "f", "parameters": []}},
        {"function": {"name": "f", "parameters": {"maximum": 1e30}}},
        {"function": {"name": "f", "parameters": {"x": "\ud800"}}},
    ],
)
def test_uncertain_tools(tool: dict[str, Any]) -> None:
    """They raise NeedsEngine, too."""
    with pytest.raises(NeedsEngine):
        build_tools([tool], JsonMemo())


def test_developers_become_one_system_message() -> None:
    """A role that the template does not know becomes the system's, in front."""
    talk: list[dict[str, Any]] = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "x"},
        {"role": "developer", "content": "c", "tools": None},
        {"role": "developer", "content": "", "tools": None},
    ]

    assert without_developer(talk) == [
        {"role": "system", "content": "a\nb\n\nc"},
        {"role": "user", "content": "x"},
    ]
    assert without_developer(talk[:2]) == talk[:2]
    assert without_developer(talk[2:3] + talk[1:2]) == [
        {"role": "system", "content": "c"},
        {"role": "user", "content": "x"},
    ]
