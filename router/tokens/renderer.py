"""The interface of a model's renderer: a Jinja template (`templates`), or rules (`models`)."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

from msgspec.structs import replace

from router.api.openai import ChatRequest, Json
from router.tokens.content_format import ContentFormat
from router.tokens.json_memo import JsonMemo
from router.tokens.needs_engine import NeedsEngine
from router.tokens.template_probes import disabled_effort, wants_system_first, with_system_first


class Renderer(ABC):
    """Renders chat requests of one model as the engine does.

    Args:
        given: The engine's `--chat-template`. A renderer without a template only uses it for the
            Messages API, as the engine does.

    is_dated: Whether prompts contain the engine's date.
    today: Returns the engine's date.
    efforts: The engine's `--reasoning-effort-map`.
    defaults: The engine's `--default-chat-template-kwargs`.
    """

    __slots__ = (
        "_disabled_effort",
        "_given",
        "_is_system_first",
        "_memo",
        "defaults",
        "efforts",
        "today",
    )

    is_dated: ClassVar[bool] = False

    def __init__(self, given: str | None = None) -> None:
        self._given = given
        self._memo = JsonMemo()
        self._is_system_first: bool | None = None  # None: not tried yet
        self._disabled_effort: str | None = None
        self.today: Callable[[], datetime.date] = datetime.date.today
        self.efforts: Mapping[str, str] = {}
        self.defaults: Json | None = None

    @abstractmethod
    def render_parts(
        self,
        request: ChatRequest,
        *,
        by_the_book: bool = False,
        apart: bool = False,
        owner: str = "",
    ) -> Sequence[str]:
        """Render the prompt's text, in parts to join.

        One wide character makes all of a text wide, and ten times slower to encode. Most parts
        have none. Threads other than the loop's must set `by_the_book` or `apart`.

        Args:
            by_the_book: Render without shortcuts, to compare.
            apart: Remember nothing.
            owner: Whose request it is. Remembered parts speed up only the same owner's requests.

        Raises:
            NeedsEngine: only the engine knows how it renders the request.
            TemplateFailed: the template or the rules refuse the messages. The engine will
                answer 400.
        """

    def render(
        self,
        request: ChatRequest,
        *,
        by_the_book: bool = False,
        apart: bool = False,
        owner: str = "",
    ) -> str:
        """Render the prompt's text; see `render_parts`."""
        parts = self.render_parts(request, by_the_book=by_the_book, apart=apart, owner=owner)
        return "".join(parts)

    def adapted(self, request: ChatRequest) -> ChatRequest:
        """Change the fields that depend on the template, and set the engine's defaults.

        A request that depends on neither stays as it is. Each property of the template is tried
        out once.

        Raises:
            NeedsEngine: the template cannot be tried out here.
        """
        if request.has_inline_system:
            if self._is_system_first is None:
                self._is_system_first = self.wants_system_first()
            if self._is_system_first:
                messages = with_system_first(request.messages)
                request = replace(request, messages=messages, has_inline_system=False)
        if request.is_thinking_disabled:
            if self._disabled_effort is None:
                self._disabled_effort = disabled_effort(
                    partial(self.render, apart=True), self.efforts, self.defaults
                )
            request = replace(
                request, reasoning_effort=self._disabled_effort, is_thinking_disabled=False
            )
        if self.defaults is not None:
            request = replace(request, template_defaults=self.defaults)
        effort = request.reasoning_effort
        if effort is not None and effort in self.efforts:
            request = replace(request, reasoning_effort=self.efforts[effort])
        return request

    def use_format(self, content_format: ContentFormat) -> None:  # noqa: B027 (few have a choice)
        """Use the engine's `--chat-template-content-format`, if the renderer has a choice."""

    def wants_system_first(self) -> bool:
        """Return whether the Messages API joins all system messages into one in front.

        Raises:
            NeedsEngine: that depends on a template which is not known here.
        """
        try:
            return wants_system_first(self._given or "")
        except Exception as exc:  # whatever a template may raise
            raise NeedsEngine("template", type(exc).__name__) from exc

    def _memo_of(self, owner: str, *, is_alone: bool) -> JsonMemo:
        """Return an owner's memo; a new one if nothing may be remembered."""
        return JsonMemo() if is_alone else self._memo.of(owner)


class NoRenderer(Renderer):
    """Stands for a chat template that cannot be used here: the engine has to render.

    Args:
        reason: Why.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str = "") -> None:
        super().__init__()
        self.reason = reason

    def render_parts(
        self,
        request: ChatRequest,
        *,
        by_the_book: bool = False,
        apart: bool = False,
        owner: str = "",
    ) -> Sequence[str]:
        raise NeedsEngine("model", self.reason)

    def adapted(self, request: ChatRequest) -> ChatRequest:
        if request.has_inline_system or request.is_thinking_disabled:
            raise NeedsEngine("model", self.reason)
        return request
