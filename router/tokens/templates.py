"""Render a chat request by a Jinja template: the text that the engine encodes.

There is one `ChatRenderer` per model, with its templates and the engine's options for them. It
renders as vLLM and transformers do together. Sources: vLLM 0.32.0, renderers/hf.py
(safe_apply_chat_template), renderers/online_renderer.py (render_chat); transformers 5.19,
utils/chat_template_utils.py (render_jinja_template).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2.meta
from jinja2 import Template, TemplateError

from router.api.openai import ChatRequest
from router.base.errors import TemplateFailed
from router.base.releases import V0_32, Release
from router.tokens.arguments import continued_and_begun, template_arguments
from router.tokens.content_format import ContentFormat, detect_content_format
from router.tokens.conversation import (
    Conversation,
    build_conversation,
    without_developer,
)
from router.tokens.json_memo import JsonMemo
from router.tokens.needs_engine import NeedsEngine
from router.tokens.renderer import Renderer
from router.tokens.sandbox import compile_template, stock_template
from router.tokens.template_probes import wants_system_first

FindTemplate = Callable[[bool], str]
Adapt = Callable[[dict[str, Any], JsonMemo], dict[str, Any]]

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_DIRECTIVES = re.compile("%(.?)", re.DOTALL)
_DATES = frozenset("aAbBdjmyYuUVwWG%")
_PASSED = frozenset({"tools", "documents", "add_generation_prompt", "continue_final_message"})


class ChatTemplate:
    """A compiled chat template, and properties that the engine derives from its text."""

    __slots__ = ("accepted", "content_format", "is_dated", "knows_developer", "source", "template")

    def __init__(
        self,
        source: str,
        memo: JsonMemo,
        release: Release = V0_32,
        content_format: ContentFormat | None = None,
    ) -> None:
        self.source = source
        self.template: Template = compile_template(source, memo)
        tree = self.template.environment.parse(source)
        self.content_format = content_format or detect_content_format(tree, release)
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.accepted = jinja2.meta.find_undeclared_variables(tree) | _PASSED
        self.is_dated = "strftime_now" in source

    def stock(self) -> Template:
        """Return the template as transformers itself runs it."""
        return stock_template(self.source)


class ChatRenderer(Renderer):
    """Renders chat requests of one model.

    Args:
        find_template: Returns the template's text for requests with tools (True) or without.
            Raises LookupError if there is none.
        special_tokens: The tokenizer's `bos_token` and so on, which templates may use.
        adapt: Changes a template's arguments as the tokenizer's own code does; None: nothing.
        release: The engine's.
    """

    __slots__ = (
        "_adapt",
        "_content_format",
        "_find_template",
        "_release",
        "_special_tokens",
        "_templates",
    )

    def __init__(
        self,
        find_template: FindTemplate,
        special_tokens: Mapping[str, str],
        adapt: Adapt | None = None,
        release: Release = V0_32,
    ) -> None:
        super().__init__()
        self._content_format: ContentFormat | None = None
        self._adapt = adapt
        self._release = release
        self._find_template = find_template
        self._special_tokens = dict(special_tokens)
        self._templates: dict[bool, ChatTemplate] = {}

    @property
    def is_dated(self) -> bool:  # type: ignore[override]
        """Return whether a template asks for the date."""
        try:
            return any(self.template(with_tools).is_dated for with_tools in (False, True))
        except NeedsEngine:
            return False

    def template(self, with_tools: bool) -> ChatTemplate:
        """Return the template for requests with or without tools, compiled at the first call.

        Some models have one for requests with tools.

        Raises:
            NeedsEngine: the model has none, or one that does not compile here.
        """
        known = self._templates.get(with_tools)
        if known is not None:
            return known
        other = self._templates.get(not with_tools)
        try:
            source = self._find_template(with_tools)
            if other is not None and other.source == source:
                found = other
            else:
                found = ChatTemplate(source, self._memo, self._release, self._content_format)
        except (LookupError, TemplateError) as exc:
            raise NeedsEngine("template", f"{type(exc).__name__}: {exc}") from exc
        self._templates[with_tools] = found
        return found

    def render_parts(
        self,
        request: ChatRequest,
        *,
        by_the_book: bool = False,
        apart: bool = False,
        owner: str = "",
    ) -> Sequence[str]:
        memo = self._memo_of(owner, is_alone=by_the_book or apart)
        conversation, arguments, template = self._prepare(request, memo)
        continues = bool(arguments.pop("continue_final_message", False))
        if continues and request.shows_media:
            raise NeedsEngine("multimodal", "continue_final_message")
        if continues:
            if arguments.get("add_generation_prompt"):
                raise continued_and_begun()
            conversation, final_text = _tagged(conversation, template)
        if template.is_dated:
            arguments["strftime_now"] = _clock(self.today())
        compiled = template.stock() if by_the_book else template.template
        parts = self._run(compiled, conversation, arguments)
        return [_cut_at_tag("".join(parts), final_text)] if continues else parts

    def wants_system_first(self) -> bool:
        """Return as `Renderer.wants_system_first`; True if any of the templates asks for it."""
        try:
            sources = {self.template(has).source for has in (False, True)}
            return any(map(wants_system_first, sources))
        except NeedsEngine:
            raise
        except Exception as exc:  # whatever a template may raise
            raise NeedsEngine("template", type(exc).__name__) from exc

    def use_format(self, content_format: ContentFormat) -> None:
        """Use the engine's `--chat-template-content-format` instead of detecting it."""
        self._content_format = content_format
        self._templates.clear()

    def _prepare(
        self, request: ChatRequest, memo: JsonMemo
    ) -> tuple[Conversation, dict[str, Any], ChatTemplate]:
        """Convert a request: messages, the arguments for the template, and the template.

        Raises: as `render`.
        """
        if request.engine_only is not None:
            raise NeedsEngine("field", request.engine_only)
        if request.chat_template is not None:  # a client's program may never end
            raise NeedsEngine("request_template")
        if not request.messages:
            raise TemplateFailed("`messages` must hold at least one message", param="messages")
        arguments = template_arguments(request, memo)
        with_tools = arguments.get("tools") is not None
        template = self.template(with_tools)
        conversation = build_conversation(
            request.messages,
            template.content_format,
            memo,
            name_first=request.renders_as == "responses",
            shows_media=request.shows_media,
        )
        if not template.knows_developer:
            conversation = without_developer(conversation)
        accepted = template.accepted
        arguments = {key: value for key, value in arguments.items() if key in accepted}
        if self._adapt is not None:
            arguments = self._adapt(arguments, memo)
        return conversation, arguments, template

    def _run(
        self, template: Template, conversation: Conversation, arguments: dict[str, Any]
    ) -> Sequence[str]:
        given = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **arguments,
            "messages": conversation,
        }
        try:
            # `generate` would also resume a generator of its own for each part.
            return list(template.root_render_func(template.new_context(given)))
        except NeedsEngine:
            raise
        except Exception as exc:  # whatever a template may raise; the engine answers 400 to it
            raise TemplateFailed(_reason(exc), param="messages") from exc


def _clock(date: datetime.date) -> Callable[[str], str]:
    """Return the function by which a template asks for the engine's date."""

    def strftime_now(form: str) -> str:
        if not set(_DIRECTIVES.findall(form)) <= _DATES:
            raise NeedsEngine("today", "time of day")
        return date.strftime(form)

    return strftime_now


def _tagged(conversation: Conversation, template: ChatTemplate) -> tuple[Conversation, str]:
    """Mark the end of the last message's text, to cut the rendering there.

    Returns the conversation with the mark, and the text without it.
    """
    if "content" not in template.source:
        raise TemplateFailed("the chat template has no `content` to continue", param="messages")
    last = dict(conversation[-1])
    content = last["content"]
    if isinstance(content, str):
        last["content"] = content + _CONTINUE_TAG
        return [*conversation[:-1], last], content
    if not content:
        raise TemplateFailed("the final message has no text to continue", param="messages")
    text: str = content[-1]["text"]
    last["content"] = [*content[:-1], {**content[-1], "text": text + _CONTINUE_TAG}]
    return [*conversation[:-1], last], text


def _cut_at_tag(text: str, final_text: str) -> str:
    bare_tag = _CONTINUE_TAG.strip()
    if final_text.strip() not in text or bare_tag not in text:
        raise TemplateFailed(
            "the chat template drops the final message, it cannot be continued", param="messages"
        )
    position = text.rindex(bare_tag)
    if text.startswith(_CONTINUE_TAG, position):
        return text[:position]
    return text[:position].rstrip()  # the template trimmed the message


def _reason(exc: BaseException) -> str:
    """Return the template's own message from a chain of errors, else that of `exc`."""
    seen: set[int] = set()
    current: BaseException | None = exc
    while current is not None and id(current) not in seen:
        if isinstance(current, TemplateError):
            return str(current)
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return str(exc)
