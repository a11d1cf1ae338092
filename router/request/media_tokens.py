"""A prompt's images and sounds as their engine has them: names, and the tokens in their place.

The tokens are asked of an engine's `/tokenize`, once for each item, in a prompt of that item alone.
Its name is computed here (`router.tokens.media_names`); if it cannot be, the item has a name that
no engine uses, and nothing behind it matches. Only items that came whole are named: an address may
lead to another picture the next time, and the router fetches nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from time import monotonic
from typing import Final

import orjson

from router.api.openai import ChatRequest
from router.base.errors import TemplateFailed
from router.request.engine_tokens import EngineTokenizer
from router.tokens import NeedsEngine, Prompter
from router.tokens.media import KnownMedia, MediaBook, media_key
from router.tokens.media_names import MediaItem, data_of, name_of

_MAX_ASKED: Final = 4  # new items of one request; the others when it comes again
_MAX_ASKING_S: Final = 2.0  # then no other is asked for
_MAX_ITEMS: Final = 1_000
_MAX_ASKED_CHARS: Final = 8 << 20
_INLINE_CHARS: Final = 2 << 20  # digested on the loop: 0.2 ms


class MediaFinder:
    """Finds what engines make of images and sounds.

    Args:
        encoders: Where they are decoded and hashed.
    """

    def __init__(self, engine: EngineTokenizer, encoders: Executor) -> None:
        self._engine = engine
        self._encoders = encoders

    async def find(
        self, model: str, prompter: Prompter, items: Sequence[MediaItem], owner: str
    ) -> list[KnownMedia]:
        """List the first items up to one that is not known. Slow, late or refused: unknown."""
        book = prompter.media
        if book.is_off(monotonic()) or len(items) > _MAX_ITEMS:
            return []
        keys = await self._keys(items, owner)
        found: list[KnownMedia] = []
        num_asked, started_s = 0, monotonic()
        for item, key in zip(items, keys, strict=True):
            known = book.get(key)
            if known is None:
                now_s = monotonic()
                is_late = num_asked >= _MAX_ASKED or now_s - started_s > _MAX_ASKING_S
                if is_late or not book.may_ask(key, now_s):
                    break
                num_asked += 1
                keys_of: tuple[int, ...] = (key,)
                if item.uuid is not None:  # it may be sent by its name alone from now on
                    keys_of = (key, media_key(item._replace(url=None), owner))
                known = await self._ask(model, prompter, book, item, keys_of)
                if known is None:
                    book.refuse(key, monotonic())
                    break
                for each in keys_of:
                    book.put(each, known)
            found.append(known)
        return found

    async def _keys(self, items: Sequence[MediaItem], owner: str) -> list[int]:
        def digest() -> list[int]:
            return [media_key(item, owner) for item in items]

        if num_media_chars(items) <= _INLINE_CHARS:
            return digest()
        return await asyncio.get_running_loop().run_in_executor(self._encoders, digest)

    async def _ask(
        self,
        model: str,
        prompter: Prompter,
        book: MediaBook,
        item: MediaItem,
        keys: tuple[int, ...],
    ) -> KnownMedia | None:
        """Name an item, and let an engine tell its tokens; None: that was not possible."""
        url = item.url
        if url is None or url[:5].lower() != "data:" or len(url) > _MAX_ASKED_CHARS:
            return None
        field = f"{item.kind}_url"
        messages = [{"role": "user", "content": [{"type": field, field: {"url": url}}]}]

        def prepare() -> tuple[str | None, bytes] | None:
            data = data_of(url)
            if data is None:
                return None
            name = name_of(item, data, book.model_id, book.sample_rate, book.release)
            return name, orjson.dumps({"model": model, "messages": messages})

        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._encoders, prepare)
        if prepared is None:
            return None
        name, body = prepared
        ids = await self._engine.ids_of(model, body)
        if ids is None:
            return None
        try:
            request = ChatRequest(model=model, messages=messages, shows_media=True)
            placed = prompter.reference.media_ids(request, item.kind, ids)
        except (NeedsEngine, TemplateFailed):
            return None
        if placed is None:
            return None
        return KnownMedia(name or f"{keys[0]:032x}?", placed, name is not None)


def num_media_chars(items: Sequence[MediaItem]) -> int:
    """Count the characters of images and sounds in a body."""
    return sum(len(item.url) for item in items if item.url is not None)
