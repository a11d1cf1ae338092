"""A prompt's images as their engine has them: names, and the tokens in their place.

The tokens are asked of an engine's `/tokenize`, once for each item, in a prompt of that item alone.
Its name is computed here (`router.tokens.media`); if it cannot be, the item has a name that
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
from msgspec.structs import replace

from router.api.openai import ChatRequest, Limit
from router.base.errors import TemplateFailed
from router.metrics import Metrics
from router.request.results import Read, Tokenized
from router.request.tokenize import EngineTokenizer, Workers
from router.tokens import NeedsEngine, Prompter, Tokens
from router.tokens.media import (
    KnownMedia,
    MediaBook,
    MediaItem,
    data_of,
    mark_media,
    media_items,
    media_key,
    name_of,
)

BYTES_PER_TOKEN: Final = 4  # where a prompt's tokens cannot be known at all
_TOKENS_PER_ITEM: Final = 1_000  # a screenshot has some, where it is not known
_MEDIA_MARK: Final = "this message is unknown to the router"
_MAX_ASKED: Final = 4  # new items of one request; the others when it comes again
_MAX_ASKING_S: Final = 2.0  # then no other is asked for
_MAX_ITEMS: Final = 1_000
MAX_ASKED_CHARS: Final = 8 << 20
_INLINE_CHARS: Final = 2 << 20  # digested on the loop: 0.2 ms


class MediaTokenizer:
    """Makes prompts with images as far as they are known; the rest is estimated.

    Args:
        finder: Finds what engines make of the items.
        workers: Where prompts are rendered and encoded.
    """

    def __init__(self, finder: MediaFinder, workers: Workers, metrics: Metrics) -> None:
        self._finder = finder
        self._workers = workers
        self._metrics = metrics

    async def find(
        self, read: Read, chat: ChatRequest, prompter: Prompter, limit: Limit
    ) -> Tokenized:
        """Find the tokens of a prompt; with unknown media, of what is before their message.

        Raises:
            NeedsEngine: nothing of it can be made here.
        """
        try:
            return await self._with_items(read, chat, prompter, limit)
        except NeedsEngine as exc:
            if exc.reason != "multimodal":
                raise
        found = await self._before_media(read, chat, prompter, limit)
        self._metrics.needs_engine.labels(read.inbound.api.name, "multimodal").inc()
        return found

    async def _with_items(
        self, read: Read, chat: ChatRequest, prompter: Prompter, limit: Limit
    ) -> Tokenized:
        """Return a prompt up to the first item that is not known.

        Raises:
            NeedsEngine: nothing of it can be made here.
        """
        book, owner = prompter.media, read.inbound.owner
        items: list[MediaItem] = media_items(chat.messages)
        if any(item.kind not in book.placeholders for item in items):
            raise NeedsEngine("multimodal", "kind")
        chat = replace(chat, shows_media=True)
        num_chars = len(read.inbound.body or b"") - num_media_chars(items)
        text = await self._text(chat, prompter, limit, num_chars, owner)
        texts, is_as_sent = book.split(text, [item.kind for item in items])
        if len(texts) == 1:
            raise NeedsEngine("multimodal")
        known: list[KnownMedia] = []
        if is_as_sent:  # else a client wrote such a token itself
            known = await self._finder.find(read.model or "", prompter, items, owner)
        plan = prompter.plan_media(chat, texts[: len(known) + 1], known, owner=owner)
        tokens = prompter.commit(plan, await self._workers.encoded(plan))
        found = Tokenized(
            tokens=tokens,
            way="media",
            num_head_tokens=tokens.num_before_media,
            num_named_tokens=_num_named_tokens(tokens, known),
            has_media=True,
            has_named_media=any(item.uuid is not None for item in items),
        )
        num_unknown = len(texts) - 1 - len(known)
        if not num_unknown:
            return found
        why = items[len(known)].kind
        self._metrics.needs_engine.labels(read.inbound.api.name, why).inc()
        rest = sum(map(len, texts[len(known) + 1 :])) // BYTES_PER_TOKEN
        return replace(found, way="prefix", num_rest_tokens=rest + num_unknown * _TOKENS_PER_ITEM)

    async def _before_media(
        self, read: Read, chat: ChatRequest, prompter: Prompter, limit: Limit
    ) -> Tokenized:
        """Return what stands before the first message with media.

        No engine is asked: it would fetch and decode them, and once more for the request itself.

        Raises:
            NeedsEngine: nothing of it can be made here.
        """
        chat = replace(chat, messages=mark_media(chat.messages, _MEDIA_MARK))
        num_bytes, owner = len(read.inbound.body or b""), read.inbound.owner
        text = await self._text(chat, prompter, limit, num_bytes, owner)
        before, mark, behind = text.partition(_MEDIA_MARK)
        if not mark:
            raise NeedsEngine("multimodal")
        plan = prompter.plan_rendered(chat, [before], owner=owner)
        tokens = prompter.commit(plan, await self._workers.encoded(plan)).before_tail()
        if not tokens.num_tokens:
            raise NeedsEngine("multimodal")
        num_media = 1 + behind.count(_MEDIA_MARK)
        return Tokenized(
            tokens=tokens,
            way="prefix",
            num_rest_tokens=len(behind) // BYTES_PER_TOKEN + num_media * _TOKENS_PER_ITEM,
            num_head_tokens=tokens.num_tokens,
            num_named_tokens=tokens.num_tokens,
            has_media=True,
        )

    async def _text(
        self, chat: ChatRequest, prompter: Prompter, limit: Limit, num_chars: int, owner: str
    ) -> str:
        """Render a chat.

        Raises:
            NeedsEngine: it cannot be rendered here, or the text is far too long.
        """
        try:
            parts = await self._workers.rendered(prompter, chat, num_chars=num_chars, owner=owner)
        except TemplateFailed as exc:  # the engine will say so in its own words
            raise NeedsEngine("multimodal", "template") from exc
        text = "".join(parts)
        if len(text) > limit.max_chars:
            raise NeedsEngine("multimodal", "size")
        return text


class MediaFinder:
    """Finds what engines make of images and videos.

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
        if url is None or url[:5].lower() != "data:" or len(url) > MAX_ASKED_CHARS:
            return None
        field = f"{item.kind}_url"
        messages = [{"role": "user", "content": [{"type": field, field: {"url": url}}]}]

        def prepare() -> tuple[str | None, bytes] | None:
            data = data_of(url)
            if data is None:
                return None
            name = name_of(item, data, book.model_id, book.release)
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
    """Count the characters of images and videos in a body."""
    return sum(len(item.url) for item in items if item.url is not None)


def _num_named_tokens(tokens: Tokens, items: Sequence[KnownMedia]) -> int:
    """Count the tokens in front of the first item of which no engine's name is known."""
    for item, span in zip(items, tokens.media_spans(), strict=True):
        if not item.is_named:
            return span.start
    return tokens.num_tokens
