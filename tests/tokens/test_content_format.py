"""String or parts: the engine's reading of a chat template's tree."""

from __future__ import annotations

import pytest

from router.tokens.content_format import detect_content_format
from router.tokens.sandbox import stock_template

_LOOP = "{% for message in messages %}"
_END = "{% endfor %}"

# Template and format. Recorded from vLLM 0.32.0, renderers/hf.py, _detect_content_format.
CASES = [
    (_LOOP + "{{ message.content }}" + _END, "string"),
    (_LOOP + "{{ message['content'] | trim }}" + _END, "string"),
    (_LOOP + "{% for part in message.content %}{% endfor %}" + _END, "openai"),
    (_LOOP + "{% for part in message['content'] %}{% endfor %}" + _END, "openai"),
    (_LOOP + "{% for part in message.content | list %}{% endfor %}" + _END, "openai"),
    (_LOOP + "{% for part in message.content[1:] %}{% endfor %}" + _END, "openai"),
    (_LOOP + "{% for part in message.content[0] %}{% endfor %}" + _END, "string"),
    (_LOOP + "{% for call in message.tool_calls %}{% endfor %}" + _END, "string"),
    (_LOOP + "{% for part in other.content %}{% endfor %}" + _END, "string"),
    (
        _LOOP + "{% set content = message.content %}{% for p in content %}{% endfor %}" + _END,
        "openai",
    ),
    ("{% for part in content %}{% endfor %}", "openai"),
    ("{% for m in messages[1:] %}{% for p in m.content %}{% endfor %}{% endfor %}", "openai"),
    ("{% for m in messages | reverse %}{% for p in m.content %}{% endfor %}{% endfor %}", "openai"),
    (
        "{% set turns = messages[1:] %}{% for m in turns %}"
        "{% for p in m.content %}{% endfor %}{% endfor %}",
        "openai",
    ),
    (
        "{% set a = messages %}{% set b = a[2:] %}{% for m in b %}"
        "{% for p in m.content %}{% endfor %}{% endfor %}",
        "openai",
    ),
    (
        "{% set messages = messages[1:] %}{% for m in messages %}"
        "{% for p in m.content %}{% endfor %}{% endfor %}",
        "openai",
    ),
    (
        "{% macro show(body) %}{% for p in body %}{% endfor %}{% endmacro %}"
        + _LOOP
        + "{{ show(message.content) }}"
        + _END,
        "openai",
    ),
    (
        "{% macro show(x, body) %}{% for p in body %}{% endfor %}{% endmacro %}"
        + _LOOP
        + "{{ show(1, body=message['content']) }}"
        + _END,
        "openai",
    ),
    (
        "{% macro show(body) %}{% for p in body %}{% endfor %}{% endmacro %}"
        + _LOOP
        + "{{ show(message.role, other=message.content) }}{{ f(message.content) }}"
        + _END,
        "string",
    ),
    (
        "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}"
        + _LOOP
        + "{{ show(message.role) }}"
        + _END,
        "string",
    ),
    (
        "{% macro show(body) %}{% for p in other %}{% endfor %}{% endmacro %}"
        + _LOOP
        + "{{ show(message.content, 2) }}"
        + _END,
        "string",
    ),
    ("{% for a, b in messages %}{% endfor %}", "string"),
    (_LOOP + "{% for a, b in message.content %}{% endfor %}" + _END, "string"),
    (_LOOP + "{% for a, b in message.other %}{% endfor %}" + _END, "string"),
    ("{% set a, b = messages %}{% for p in content %}{% endfor %}", "string"),
    ("no loops at all", "string"),
]


@pytest.mark.parametrize(("source", "content_format"), CASES)
def test_as_the_engine(source: str, content_format: str) -> None:
    """The rule is the engine's, blind spots included."""
    tree = stock_template(source).environment.parse(source)

    assert detect_content_format(tree) == content_format


def test_names_set_to_each_other_end() -> None:
    """Two names that stand for each other do not keep us for ever (they do keep the engine)."""
    source = (
        "{% set a = messages %}{% set b = a %}{% set a = b %}{% for p in content %}{% endfor %}"
    )
    tree = stock_template(source).environment.parse(source)

    assert detect_content_format(tree) == "string"
