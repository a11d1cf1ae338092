"""The interface of a model's renderer: a Jinja template (`templates`), or rules (`models`)."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from router.api.openai import ChatRequest
from router.tokens.json_memo import JsonMemo
from router.tokens.needs_engine import NeedsEngine
from router.tokens.template_probes import wants_system_first


class Renderer(ABC):
    """Renders chat requests of one model as the engine does.

    Args:
        given: The engine's `--chat-template`. A renderer without a template only uses it for the
            Messages API, as the engine does.

    is_dated: Whether prompts contain the engine's date.
    today: Returns the engine's date.
    """

    __slots__ = ("_given", "_memo", "today")

    is_dated: ClassVar[bool] = False

    def __init__(self, given: str | None = None) -> None:
        self._given = given
        self._memo = JsonMemo()
        self.today: Callable[[], datetime.date] = datetime.date.today

    @abstractmethod
    def render(
        self,
        request: ChatRequest,
        *,
        by_the_book: bool = False,
        apart: bool = False,
        owner: str = "",
    ) -> str:
        """Render the prompt's text.

        Threads other than the loop's must set `by_the_book` or `apart`.

        Args:
            by_the_book: Render without shortcuts, to compare.
            apart: Remember nothing.
            owner: Whose request it is. Remembered parts speed up only the same owner's requests.

        Raises:
            NeedsEngine: only the engine knows how it renders the request.
            TemplateFailed: the template or the rules refuse the messages. The engine will
                answer 400.
        """

    def render_parts(
        self, request: ChatRequest, *, apart: bool = False, owner: str = ""
    ) -> Sequence[str]:
        """Render as `render`, in parts to join.

        One wide character makes all of a text wide, and ten times slower to encode. Most parts
        have none.
        """
        return [self.render(request, apart=apart, owner=owner)]

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
