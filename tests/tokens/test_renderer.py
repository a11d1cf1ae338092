"""What the renderer refuses, leaves to the engine, and how it continues a message.

What it renders is compared with the engine's in test_golden.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from router.api.openai import parse_chat
from router.base.errors import TemplateFailed
from router.tokens.encoder import text_of
from router.tokens.needs_engine import NeedsEngine
from router.tokens.templates import ChatRenderer

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{{ options }}"
TRIMMING = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}"
PARTS = (
    "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}\n{% endfor %}"
    "{{ custom }}"
)
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "well "},
]


def _render(template: str, **body: Any) -> str:
    renderer = ChatRenderer(lambda with_tools: template, {})
    request = parse_chat({"messages": TALK, "add_generation_prompt": False, **body})
    text = text_of(renderer.render(request))
    assert text_of(renderer.render(request, by_the_book=True)) == text
    return text


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        (PLAIN, "well ", "[user]hi\n[assistant]well "),
        (TRIMMING, "well ", "[user]hi\n[assistant]well"),
        (PARTS, "well ", "<hi><well "),
        (
            PARTS,
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "<hi><a><b",
        ),
    ],
)
def test_continue_final_message(template: str, content: Any, text: str) -> None:
    """The prompt ends where the last message's text ends."""
    messages = [TALK[0], {"role": "assistant", "content": content}]

    assert _render(template, messages=messages, continue_final_message=True) == text


@pytest.mark.parametrize(
    ("template", "body", "match"),
    [
        (PLAIN, {"add_generation_prompt": True}, "exclude each other"),
        ("{{ messages | length }}", {}, "no `content`"),
        (PARTS, {"messages": [{"role": "assistant"}]}, "no text to continue"),
        ("{% if false %}content{% endif %}", {}, "drops the final message"),
    ],
)
def test_nothing_to_continue(template: str, body: dict[str, Any], match: str) -> None:
    """A message that cannot be continued is refused, as the engine does."""
    with pytest.raises(TemplateFailed, match=match):
        _render(template, continue_final_message=True, **body)


def test_no_messages() -> None:
    """An empty conversation is refused by name."""
    with pytest.raises(TemplateFailed) as caught:
        _render(PLAIN, messages=[])

    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].x.y }}", "'dict object' has no attribute 'x'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe."),
    ],
)
def test_template_errors(template: str, message: str) -> None:
    """Whatever the template raises is the request's fault, in the template's words."""
    with pytest.raises(TemplateFailed) as caught:
        _render(template)

    assert caught.value.message == message


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"mm_processor_kwargs": {}}, "field"),
        ({"chat_template": "mine"}, "request_template"),
        ({"chat_template": ""}, "request_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "field"),
        ({"chat_template_kwargs": {"chat_template": "mine"}}, "field"),
        ({"chat_template_kwargs": {"custom": {"n": [1e30]}}}, "number"),
        ({"documents": [{"title": 5}]}, "field"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "multimodal"),
    ],
)
def test_left_to_the_engine(body: dict[str, Any], reason: str) -> None:
    """What only the engine can do, or may do differently, is left to it."""
    with pytest.raises(NeedsEngine) as caught:
        _render(PLAIN, **body)

    assert caught.value.reason == reason


@pytest.mark.parametrize("continues", [False, True])
def test_parts_put_together_are_the_text(continues: bool) -> None:
    """A text is rendered in parts that are narrow where they can be."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    renderer = ChatRenderer(lambda _: template, {})
    messages = [{"role": "user", "content": "plain"}, {"role": "assistant", "content": "\u2013"}]
    request = parse_chat(
        {
            "messages": messages,
            "continue_final_message": continues,
            "add_generation_prompt": not continues,
        }
    )

    parts = renderer.render(request)

    assert text_of(parts) == "<user>plain<assistant>\u2013"
    narrow = [each for each in parts if text_of([each]).isascii()]
    assert continues or text_of(narrow) == "<user>plain<assistant>"


def test_special_tokens() -> None:
    """Templates name the tokenizer's special tokens; arguments win over them."""
    renderer = ChatRenderer(lambda with_tools: "{{ bos_token }}", {"bos_token": "<s>"})

    assert renderer.render(parse_chat({"messages": TALK})) == ["<s>"]
    own = {"bos_token": "<mine>"}
    request = parse_chat({"messages": TALK, "chat_template_kwargs": own})
    assert renderer.render(request) == ["<mine>"]
