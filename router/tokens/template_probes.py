"""Try out a chat template as the engine does before it converts requests of `/v1/messages`.

    system    Does the template accept a system message behind a user's? Else all of them are joined
              in front, and each new reminder changes the prompt from its beginning on.
    effort    Does the effort `none` change the prompt? Else disabled thinking is `low`.

The engine uses a bare environment. A template that calls a function of transformers fails there,
and counts as one that wants its system message first.

Source: vLLM 0.32.0, entrypoints/anthropic/serving.py (_should_merge_inline_system,
_detect_merge_inline_system, _probe_disabled_thinking_effort).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.api.openai import ChatRequest, Json
from router.base.errors import TemplateFailed
from router.tokens.needs_engine import NeedsEngine

_CONVERSATION: Final = [{"role": role, "content": "t"} for role in ("system", "user") * 2]
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_HI: Final = ({"role": "user", "content": "Hi"},)


def wants_system_first(source: str) -> bool:
    """Return whether a template refuses a system message behind a user's.

    Raises: whatever else a template may raise; an engine does not start with such a template.
    """
    if not source:
        return True
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        environment.from_string(source).render(messages=_CONVERSATION, add_generation_prompt=False)
    except jinja2.TemplateError:
        return True
    return False


def disabled_effort(
    render: Callable[[ChatRequest], str], efforts: Mapping[str, str], defaults: Json | None
) -> str:
    """Return the effort for disabled thinking: `low` if `none` changes nothing.

    Args:
        render: Renders a chat with the template.
        efforts, defaults: See `Renderer`.

    Raises:
        NeedsEngine: the template cannot be tried out here.
    """

    def prompt(effort: str) -> str | None:
        try:
            return render(
                ChatRequest(
                    model=None,
                    messages=_HI,
                    reasoning_effort=efforts.get(effort, effort),
                    template_defaults=defaults,
                )
            )
        except TemplateFailed:
            return None
        except NeedsEngine as exc:
            if exc.reason != "rules":
                raise
            return None

    without = prompt("none")
    if without is None or any(prompt(effort) == without for effort in _EFFORTS):
        return "low"
    return "none"


def with_system_first(messages: Sequence[Json]) -> list[Json]:
    """Join all system messages in front; their contents are strings."""
    texts: list[Any] = [each["content"] for each in messages if each["role"] == "system"]
    others = [each for each in messages if each["role"] != "system"]
    return [{"role": "system", "content": "".join(texts)}, *others]
