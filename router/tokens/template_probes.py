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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec.structs import replace

from router.api.openai import ChatRequest, Json
from router.base.errors import TemplateFailed
from router.tokens.needs_engine import NeedsEngine

if TYPE_CHECKING:
    from router.tokens.renderer import Renderer

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


class TemplateProbes:
    """The results for one model's renderer, each tried out once.

    efforts: The engine's `--reasoning-effort-map`.
    defaults: The engine's `--default-chat-template-kwargs`.
    """

    __slots__ = ("_effort", "_probed", "_wants_system_first", "defaults", "efforts")

    def __init__(self, probed: Renderer) -> None:
        self._probed = probed
        self._wants_system_first: bool | None = None  # None: not tried yet
        self._effort: str | None = None
        self.efforts: Mapping[str, str] = {}
        self.defaults: Json | None = None

    def adapted(self, request: ChatRequest) -> ChatRequest:
        """Change the fields that depend on the template, and set the engine's defaults.

        Raises:
            NeedsEngine: the template cannot be tried out here.
        """
        if request.has_inline_system:
            if self._wants_system_first is None:
                self._wants_system_first = self._probed.wants_system_first()
            if self._wants_system_first:
                messages = _with_system_first(request.messages)
                request = replace(request, messages=messages, has_inline_system=False)
        if request.is_thinking_disabled:
            if self._effort is None:
                self._effort = self._disabled_effort()
            request = replace(request, reasoning_effort=self._effort, is_thinking_disabled=False)
        if self.defaults is not None:
            request = replace(request, template_defaults=self.defaults)
        effort = request.reasoning_effort
        if effort is not None and effort in self.efforts:
            request = replace(request, reasoning_effort=self.efforts[effort])
        return request

    def _disabled_effort(self) -> str:
        """Return the effort for disabled thinking: `low` if `none` changes nothing."""
        without = self._prompt("none")
        if without is None or any(self._prompt(effort) == without for effort in _EFFORTS):
            return "low"
        return "none"

    def _prompt(self, effort: str) -> str | None:
        effort = self.efforts.get(effort, effort)
        request = ChatRequest(
            model=None,
            messages=_HI,
            reasoning_effort=effort,
            template_defaults=self.defaults,
        )
        try:
            return self._probed.render(request, apart=True)
        except TemplateFailed:
            return None
        except NeedsEngine as exc:
            if exc.reason != "rules":
                raise
            return None


def _with_system_first(messages: Sequence[Json]) -> list[Json]:
    """Join all system messages in front; their contents are strings."""
    texts: list[Any] = [each["content"] for each in messages if each["role"] == "system"]
    others = [each for each in messages if each["role"] != "system"]
    return [{"role": "system", "content": "".join(texts)}, *others]
