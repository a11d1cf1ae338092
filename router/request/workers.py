"""Render and encode where that keeps no other prompt waiting: on the loop, or off it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final, TypeVar

from router.api.openai import ChatRequest, TokenIds
from router.tokens import NeedsEngine, Prompter
from router.tokens.prompt_tree import EncodePlan

INLINE_CHARS: Final = 32_768
"""New text of at most this size is encoded on the event loop."""

_HEAVY_BYTES: Final = 1 << 20  # of a body or of new text: not in the way of others' prompts
_HEAVY_ITEMS: Final = 1_000  # that a template goes through: some 6 µs each, a tool 30
_MAX_ITEMS: Final = 10_000
_MAX_HEAVY: Final = 8  # waiting at once; more are routed without tokens
_T = TypeVar("_T")


class Workers:
    """Runs the work.

    Args:
        encoders: Where long encodes run; they hold the GIL little.
        heavy: Where what takes seconds runs, out of the way of other prompts.
    """

    def __init__(self, encoders: Executor, heavy: Executor) -> None:
        self._encoders = encoders
        self._heavy = heavy
        self._num_heavy = 0

    async def rendered(
        self, prompter: Prompter, chat: ChatRequest, *, num_chars: int, owner: str
    ) -> Sequence[str]:
        """Render a chat in parts; what is large off the loop, and what is huge not at all.

        Args:
            num_chars: About the size of its text.
            owner: See `PromptMemory`.

        Raises:
            NeedsEngine, TemplateFailed: as `Prompter.render_parts`.
        """
        num_items = chat.num_items
        if num_items > _MAX_ITEMS:
            raise NeedsEngine("size")
        if num_items > _HEAVY_ITEMS or num_chars > _HEAVY_BYTES:
            return await self._heavily(partial(prompter.render_parts, chat, apart=True))
        if num_items > prompter.max_inline_items:
            render = partial(prompter.render_parts, chat, owner=owner, apart=True)
            return await asyncio.get_running_loop().run_in_executor(self._encoders, render)
        return prompter.render_parts(chat, owner=owner)

    async def encoded(self, plan: EncodePlan) -> list[TokenIds]:
        """Encode the new part of a plan.

        Raises:
            NeedsEngine: it is huge, and too much of that waits already.
        """
        if plan.num_new_chars > _HEAVY_BYTES:
            return await self._heavily(plan.encode)
        if plan.num_new_chars > INLINE_CHARS:
            return await asyncio.get_running_loop().run_in_executor(self._encoders, plan.encode)
        return plan.encode()

    async def _heavily(self, work: Callable[[], _T]) -> _T:
        """Do work of up to seconds off the loop, one at a time.

        Raises:
            NeedsEngine: too much of it waits already.
        """
        if self._num_heavy >= _MAX_HEAVY:
            raise NeedsEngine("size")
        self._num_heavy += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._heavy, work)
        finally:
            self._num_heavy -= 1
