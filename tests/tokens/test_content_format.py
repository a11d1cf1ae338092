"""String or parts: the engine's reading of a chat template's tree."""

from __future__ import annotations

import pytest

from router.base.engines import V0_32, V0_33
from router.tokens.template_probes import detect_content_format
from router.tokens.templates import stock_template

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
    """The rule is the engine's, blind spots included; 0.33 skips targets that 0.32 does not."""
    tree = stock_template(source).environment.parse(source)

    assert detect_content_format(tree) == content_format
    is_skipped = source.startswith("{% set a, b")
    assert detect_content_format(tree, V0_33) == ("openai" if is_skipped else content_format)


def test_names_set_to_each_other_end() -> None:
    """Two names that stand for each other do not keep us for ever (they do keep the engine)."""
    source = (
        "{% set a = messages %}{% set b = a %}{% set a = b %}{% for p in content %}{% endfor %}"
    )
    tree = stock_template(source).environment.parse(source)

    assert detect_content_format(tree) == "string"


_NS = "{% set ns = namespace(rest=messages) %}"
_PARTS = "{% for m in ns.rest %}{% for p in m.content %}{% endfor %}{% endfor %}"
SINCE_0_33 = [
    (_NS + _PARTS, "openai"),
    ("{% set ns = namespace() %}{% set ns.rest = messages[1:] %}" + _PARTS, "openai"),
    ("{% set ns.a = messages %}{% set ns.rest = ns.a %}" + _PARTS, "openai"),
    ("{% set ns = namespace(rest=messages) %}{% set all = ns.rest %}" + _PARTS, "openai"),
    ("{% set ns = namespace(other=messages) %}" + _PARTS, "string"),
    ("{% set ns = namespace(rest=tools) %}" + _PARTS, "string"),
    ("{% set ns = space(rest=messages) %}" + _PARTS, "string"),
    ("{% set a, b = messages %}{% for p in content %}{% endfor %}", "openai"),
    ("{% set ns.rest = messages %}{% for p in content %}{% endfor %}", "openai"),
]


@pytest.mark.parametrize(("source", "content_format"), SINCE_0_33)
def test_names_in_namespaces_count_from_0_33_on(source: str, content_format: str) -> None:
    """As the engine's own rule says; before, no attribute was a name."""
    tree = stock_template(source).environment.parse(source)

    assert detect_content_format(tree, V0_33) == content_format
    assert detect_content_format(tree, V0_32) == "string"
