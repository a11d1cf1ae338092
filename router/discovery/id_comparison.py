"""Compare the token ids that an engine makes of texts and chats with ours, by its `/tokenize`.

That route renders with the engine's own defaults (template, its arguments, content format). No
other route shows them. Source: vLLM 0.32.0, entrypoints/serve/tokenize/serving.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import orjson

from router.api.engine_tokenize import tokenize_body
from router.api.openai import parse_chat
from router.base.errors import BadRequest, TemplateFailed
from router.tokens import NeedsEngine, Prompter
from router.tokens.id_probe import ALL_TEXTS, CHATS, TEXTS, Difference, of_chat, of_refused, of_text

Ask = Callable[[bytes], Awaitable[list[int]]]
"""`/tokenize` of one replica; raises as `EngineApi.tokenize`."""


async def compare(ask: Ask, prompter: Prompter, model: str) -> Difference | None:
    """Compare ids of texts, then of chats; None: all are the same.

    Raises:
        NeedsEngine: they cannot be made here (now).
        BadRequest, UpstreamError: the engine does not tokenize.
    """
    difference = await _texts(ask, prompter, model)
    if difference is not None or not prompter.asks_engine:
        return difference
    for chat in CHATS:
        difference = await _chat(ask, prompter, {"model": model, **chat})
        if difference is not None:
            return difference
    return None


async def _texts(ask: Ask, prompter: Prompter, model: str) -> Difference | None:
    if await _text(ask, prompter, model, "all", ALL_TEXTS) is None:
        return None
    for kind, texts in TEXTS.items():
        for text in texts:
            difference = await _text(ask, prompter, model, kind, text)
            if difference is not None:
                return difference
    return await _text(ask, prompter, model, "all", ALL_TEXTS)


async def _text(
    ask: Ask, prompter: Prompter, model: str, kind: str, text: str
) -> Difference | None:
    ours = prompter.reference.text_ids(text)
    theirs = await ask(orjson.dumps({"model": model, "prompt": text}))
    if theirs == ours:
        return None
    shown = prompter.reference.shown
    return of_text(kind, text, shown(theirs, text), shown(ours, text))


async def _chat(ask: Ask, prompter: Prompter, body: dict[str, Any]) -> Difference | None:
    """Compare a chat's ids; a chat that either side refuses is left out."""
    request, ours = parse_chat(body), None
    try:
        with suppress(TemplateFailed):  # it takes no system message, no tools
            ours = prompter.reference.chat_ids(request)
        theirs = await ask(orjson.dumps(tokenize_body(body)))
    except (BadRequest, NeedsEngine):
        return None
    if ours is None:
        return of_refused()
    if theirs == ours:
        return None
    return of_chat(theirs, ours)
