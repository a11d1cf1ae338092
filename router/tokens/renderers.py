"""What renders a model's chats: one class per mode of the engine (`modes.find_mode`).

mode                       renders by                                in
hf                         a Jinja template                          renderer.py
deepseek_v32, _v4, _v41    rules of their own                        deepseek_v32.py and so on
harmony, mistral           marked text, for an encoder of its own    harmony.py, mistral.py
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from router.api.openai import ChatRequest
from router.releases import Release
from router.tokens import modes
from router.tokens.deepseek_v4 import DeepSeekV4Renderer
from router.tokens.deepseek_v32 import DeepSeekV32Renderer
from router.tokens.deepseek_v41 import DeepSeekV41Renderer


class Renderer(Protocol):
    """Renders chat requests of one model as the engine does.

    today: Returns the engine's date.
    """

    today: Callable[[], datetime.date]

    @property
    def is_dated(self) -> bool:
        """Whether the engine's date is part of its prompts."""
        ...

    def render(
        self,
        request: ChatRequest,
        *,
        by_the_book: bool = False,
        apart: bool = False,
        owner: str = "",
    ) -> str:
        """Render the prompt's text; `by_the_book` without the shortcuts.

        In another thread than the loop's only `by_the_book` or `apart`: nothing is remembered.

        Args:
            owner: Whose request it is; what is remembered of it helps no other's.

        Raises:
            NeedsEngine: only the engine knows what it makes of the request.
            TemplateFailed: the template or the rules refuse the messages; the engine will
                answer 400.
        """
        ...

    def render_parts(
        self, request: ChatRequest, *, apart: bool = False, owner: str = ""
    ) -> Sequence[str]:
        """Render as `render`, in parts that are to be put together.

        One wide character makes all of a text wide, and to encode it ten times as slow: most parts
        have none.
        """
        ...

    def wants_system_first(self) -> bool:
        """Return whether the Messages API puts all system messages into one in front.

        Raises:
            NeedsEngine: that depends on a template which is not known here.
        """
        ...


WITHOUT_TEMPLATE: Final[dict[str, Callable[[str | None, Release], Renderer]]] = {
    modes.DEEPSEEK_V32: DeepSeekV32Renderer,
    modes.DEEPSEEK_V4: DeepSeekV4Renderer,
    modes.DEEPSEEK_V41: DeepSeekV41Renderer,
}
"""Modes that take a model's tokenizer.json, and no template; they get the engine's, if given."""
