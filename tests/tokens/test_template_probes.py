"""What the engine tries out on a template for `/v1/messages`, and what becomes of a request."""

from __future__ import annotations

import pytest

from router.api.anthropic import parse_messages
from router.api.openai import ChatRequest
from router.tokens.needs_engine import NeedsEngine
from router.tokens.template_probes import wants_system_first
from router.tokens.templates import ChatRenderer

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
EFFORT = PLAIN + "{{ reasoning_effort }}"
THINKING = PLAIN + "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
REFUSES = PLAIN + "{% if reasoning_effort == 'none' %}{{ raise_exception('no') }}{% endif %}"
REMINDED = [
    {"role": "user", "content": "a"},
    {"role": "system", "content": "s2"},
    {"role": "user", "content": "b"},
]


def request(**fields: object) -> ChatRequest:
    return parse_messages({"messages": REMINDED, "system": "s1", **fields})


def adapted(template: str, with_tools: str | None = None, **fields: object) -> ChatRequest:
    renderer = ChatRenderer(lambda has: with_tools if has and with_tools else template, {})
    return renderer.adapted(request(**fields))


def contents(chat: ChatRequest) -> list[str]:
    return [message["content"] for message in chat.messages]


@pytest.mark.parametrize(
    ("template", "wants"),
    [
        (PLAIN, False),
        (STRICT, True),
        ("", True),
        ("{% if %}", True),
        (PLAIN + "{{ strftime_now('%Y') }}", True),  # a function of transformers' alone
        (PLAIN + "{% generation %}{% endgeneration %}", True),
        (PLAIN + "{% for m in messages %}{% break %}{% endfor %}", False),
    ],
)
def test_which_templates_want_the_system_message_first(template: str, wants: bool) -> None:
    """Those that raise in the engine's bare environment."""
    assert wants_system_first(template) == wants


def test_reminders_stay_or_are_merged() -> None:
    """They stay in place, or are merged in front where a template of the model needs that."""
    assert contents(adapted(PLAIN)) == ["s1", "a", "s2", "b"]
    assert contents(adapted(STRICT)) == ["s1s2", "a", "b"]
    assert contents(adapted(PLAIN, with_tools=STRICT)) == ["s1s2", "a", "b"]


@pytest.mark.parametrize(
    ("template", "effort"),
    [(PLAIN, "low"), (EFFORT, "none"), (THINKING, "none"), (REFUSES, "low")],
)
def test_disabled_thinking_is_none_where_that_does_something(template: str, effort: str) -> None:
    """Else low, as for a template that refuses it or makes the same of another effort."""
    assert adapted(template, thinking={"type": "disabled"}).reasoning_effort == effort


def test_a_template_with_which_no_engine_starts() -> None:
    """It raises an error that the engine does not catch."""
    with pytest.raises(NeedsEngine):
        adapted(PLAIN + "{{ 1 / 0 }}")
