"""The shortcuts of the sandbox change nothing but the time."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import SandboxedEnvironment
from transformers.utils import chat_template_utils

from router.api.openai import parse_chat
from router.tokens.conversation import JsonMemo
from router.tokens.needs_engine import NeedsEngine
from router.tokens.templates import ChatRenderer, FastSandbox, compile_template, stock_template

CONTEXT: dict[str, Any] = {
    "message": {"role": "user", "content": "a{b}c", "items": "shadowed", "n": None, "__class__": 1},
    "messages": [{"role": "user"}, {"role": "tool", "content": ["x", 1]}],
    "text": " Ab ",
    "number": 3,
}
SNIPPETS = [
    "message.role",
    "message['role']",
    "message.missing",
    "message['missing']",
    "message.missing.deeper",
    "message.items",
    "message['items']",
    "message.items() | list",
    "message.get('role') ~ message.get('x', 'y')",
    "message.keys() | list",
    "message.__class__",
    "message['__class__']",
    "message.pop('role')",
    "message.update({'a': 1})",
    "messages.append(1)",
    "messages[0].role ~ messages[1]['content'][1]",
    "messages[-1].content",
    "messages[7]",
    "messages[7].role",
    "messages['role']",
    "missing.role",
    "missing['role']",
    "text.strip() ~ text.upper() ~ text.split('b')",
    "text.strip",
    "text.nothing",
    "text.__class__",
    "text.format(1)",
    "'{0.__class__}'.format(text)",
    "'{}'.format_map({})",
    "'%s' % text",
    "number.real",
    "number.bit_length()",
    "text.center(9, '*').join(['a', 'b'])",
    "text.encode('ascii').decode()",
    "message | tojson",
    "message.content | tojson(indent=2)",
    "[1, 2] | tojson",
    "raise_exception('no')",
    "range(3) | list",
    "range(10 ** 9)",
    "(1).__add__(1)",
    "text.strip(1, 2, 3)",
    "cycler('a', 'b').next()",
    "namespace(a=text.strip).a()",
    "namespace(a=text.format).a()",
    "namespace(a=1).b",
    "namespace(a=1).__class__",
    "namespace(a=number).a",
    "namespace(a=[text])['a']",
    "messages[messages[1].content[1]].role ~ messages[messages[1]['content'][1] - 1].role",
    "messages[messages[messages[1].content[1]].content[1]]['role']",
    "messages[number - 3].role",
    "messages[-2].role ~ messages[-3]",
    "messages[true].role",
    "messages[1.0]",
    "messages[none]",
    "messages[missing]",
    "message[missing]",
    "message[number]",
    "message[none]",
    "missing[0]",
    "missing[missing[0]]",
    "missing.deeper[1 / 0]",
    "messages[1 / 0]",
    "text[1] ~ text[9] ~ text[-1]",
    "(1, 2)[1] ~ [3, 4][0] ~ {5: 6}[5] ~ [3][1]",
    "(messages | map(attribute='role') | list)[0]",
    "{'a': {'b': 1}}.a.b ~ {'a': {'b': 1}}['a']['b']",
    "messages[0].role.upper().lower()",
    "missing is defined ~ message.missing is defined ~ message.role is defined",
    "missing is not defined and message.n is none and message.role is not none",
    "missing is none ~ none is none ~ missing.deeper is none",
    "number is string ~ text is string ~ message.role is not string ~ missing is string",
    "text is string(1)",
    "text is defined(text)",
    "messages[0] is mapping ~ messages is iterable ~ messages[7] is undefined",
]
LOOPS = [
    "{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}"
    "{{ loop.previtem.role }}{{ loop.nextitem.role }}{{ loop.revindex0 }}{{ loop.depth0 }}"
    "{% endfor %}",
    "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.changed(m) }}{% endfor %}",
    "{% for m in messages %}{{ loop._iterator }}{% endfor %}",
    "{% for m in messages %}{{ loop.nothing }}{% endfor %}",
    "{% for m in messages %}{% for n in messages %}{{ loop.index0 }}{% endfor %}{{ loop.last }}"
    "{% endfor %}",
    "{% set loop = message %}{{ loop.role }}{{ loop.first }}{{ loop.index0 is defined }}",
    "{{ loop.first }}{{ loop.index is defined }}",
    "{% for m in messages recursive %}{{ loop.depth }}{{ loop.first }}{% endfor %}",
    "{% for k, v in message.items() %}{{ k }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}",
    "{% macro f(m) %}{{ m.role }}{{ caller() }}{% endmacro %}{% call f(message) %}x{% endcall %}",
    "{% generation %}{{ message.role }}{% endgeneration %}",
    "{% set message = [1] %}{{ message.role }}{{ message[0] }}",
    "{% if message.missing is defined %}a{% elif message.role is string %}b{% endif %}",
    "{% for m in messages if m.role == 'tool' %}{{ m.content }}{% else %}none{% endfor %}",
    "{{ message.role if message.role else message.content }}",
    "{% for m in messages if m.role is string and messages[loop.index0 - 1].role is defined %}"
    "{{ messages[loop.index0].role }}{% endfor %}",
    "{% macro f(m, n=messages[1].content[1]) %}{{ messages[n].role ~ messages[m].role }}"
    "{{ caller(messages[n].content[0]) }}{% endmacro %}"
    "{% call(c) f(0) %}{{ c ~ messages[-1].role }}{% endcall %}",
    "{% for m in messages recursive %}{{ messages[loop.index0].role }}{% if loop.depth < 2 %}"
    "{{ loop(messages[:1]) }}{% endif %}{{ m.role is defined }}{% endfor %}",
    "{% set a = messages[0] %}{% set a, b = messages[0].role, messages[1].role %}{{ a ~ b }}",
    "{% filter upper %}{{ messages[0].role ~ (messages[1].role is string) }}{% endfilter %}",
    "{% set c %}{{ messages[1].content[0] }}{% endset %}{{ c }}{{ c is string }}",
    "{% with m = messages[1] %}{{ m.content[1] ~ (m.content[1] is none) }}{% endwith %}",
    "{% for text in text %}{{ text.upper() }}{% break %}{% endfor %}",
]


def _outcome(template: Any) -> str:
    try:
        return str(template.render(CONTEXT))
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


@pytest.mark.parametrize("source", [*(f"{{{{ {snippet} }}}}" for snippet in SNIPPETS), *LOOPS])
def test_same_as_transformers(source: str) -> None:
    """Values, undefined ones, refusals and errors are those of transformers' own sandbox."""
    ours = compile_template(source, JsonMemo())

    assert isinstance(ours.environment, FastSandbox)
    assert _outcome(ours) == _outcome(stock_template(source))


def test_stock_stays_stock() -> None:
    """transformers' own environment is not touched: it is what proofs are made with."""
    compile_template("{{ 1 }}", JsonMemo())

    assert not isinstance(stock_template("{{ 1 }}").environment, FastSandbox)


def test_another_release_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers renders in another environment, that one is used."""
    other = SandboxedEnvironment().from_string("")
    monkeypatch.setattr(chat_template_utils, "_compile_jinja_template", lambda source: other)

    template = compile_template("{{ 'x' }}", JsonMemo())

    assert type(template.environment) is SandboxedEnvironment
    assert template.render() == "x"


@pytest.mark.parametrize("change", [None, lambda: None, lambda source: "text"])
def test_without_the_private_function_the_engine_renders(
    monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    """A release in which it is gone, takes other arguments or returns something else."""
    if change is None:
        monkeypatch.delattr(chat_template_utils, "_compile_jinja_template")
    else:
        monkeypatch.setattr(chat_template_utils, "_compile_jinja_template", change)
    renderer = ChatRenderer(lambda with_tools: "{{ 1 }}", {})
    request = parse_chat({"messages": [{"role": "user", "content": "x"}]})

    with pytest.raises(NeedsEngine, match="transformers compiles") as error:
        renderer.render(request)
    assert error.value.reason == "template"


def test_syntax_errors() -> None:
    """A broken template is found when it is compiled."""
    with pytest.raises(TemplateError):
        compile_template("{% for %}", JsonMemo())
