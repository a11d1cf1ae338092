"""Tokenize: a prompt's token ids; locally, else at an engine, else not at all.

| way     | prompts                                                   | made by               |
|---------|-----------------------------------------------------------|-----------------------|
| local   | chats, texts and ids of a model whose tokenizer is loaded | `Tokenizer._locally`  |
| media   | the same with images that are all known                   | `MediaTokenizer`      |
| prefix  | chats up to the first image or sound that is not known    | `MediaTokenizer`      |
| engine  | the others, if an engine's `/tokenize` has their tokens   | `EngineTokenizer`     |
| unknown | the rest; an estimate of the number of tokens             |                       |

Local prompts are rendered and encoded where that keeps no other prompt waiting: on the loop, or off
it. Their tokens are proven at run time (`TokenAudit`). If they are wrong, the engine gets the
model's prompts for a while (see `TokenTrust`). `Limit` decides what is too long.

The tokens of images are asked of an engine's `/tokenize`, once for each item, in a prompt of that
item alone. An item's name is computed here (`router.tokens.media`). If it cannot be, the item has a
name that no engine uses, and nothing behind it matches. Only items that came whole are named: an
address may lead to another picture the next time, and the router fetches nothing.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from time import monotonic
from typing import Any, Final, TypeVar

import orjson
from msgspec.structs import replace

from router.api.apis import MESSAGES, Request
from router.api.engine_bodies import tokenize_chat
from router.api.openai import ChatRequest, CompletionRequest, Limit, TokenIds, is_cut
from router.base.errors import BadRequest, RouterError, TemplateFailed, UpstreamError
from router.discovery.engine_api import EngineApi
from router.metrics import Metrics
from router.replicas.fleet import Fleet
from router.replicas.replica import Replica
from router.request.results import Read, Tokenized
from router.tokens import NeedsEngine, Prompter, Prompters, Tokens
from router.tokens.encoder import Part, text_of
from router.tokens.media import (
    KnownMedia,
    MediaBook,
    MediaItem,
    before_media,
    data_of,
    has_media,
    media_items,
    media_key,
    name_of,
    without_media,
)
from router.tokens.needs_engine import is_failure
from router.tokens.prompt_tree import EncodePlan

BYTES_PER_TOKEN: Final = 4  # where a prompt's tokens cannot be known at all
_TOKENS_PER_ITEM: Final = 1_000  # a screenshot has some, where it is not known
_MAX_ASKED: Final = 4  # new items of one request; the others when it comes again
_MAX_ASKING_S: Final = 2.0  # then no other is asked for
_MAX_MEDIA_ITEMS: Final = 1_000
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
        parts = await self._parts(chat, prompter, limit, num_chars, owner)
        texts, is_as_sent = book.split(text_of(parts), [item.kind for item in items])
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
        chat = replace(chat, messages=without_media(chat.messages))
        num_bytes, owner = len(read.inbound.body or b""), read.inbound.owner
        known = before_media(await self._parts(chat, prompter, limit, num_bytes, owner))
        if known is None:
            raise NeedsEngine("multimodal")
        plan = prompter.plan_rendered(chat, known.parts, owner=owner)
        tokens = prompter.commit(plan, await self._workers.encoded(plan)).before_tail()
        if not tokens.num_tokens:
            raise NeedsEngine("multimodal")
        num_rest_tokens = known.num_rest_chars // BYTES_PER_TOKEN
        return Tokenized(
            tokens=tokens,
            way="prefix",
            num_rest_tokens=num_rest_tokens + known.num_unknown * _TOKENS_PER_ITEM,
            num_head_tokens=tokens.num_tokens,
            num_named_tokens=tokens.num_tokens,
            has_media=True,
        )

    async def _parts(
        self, chat: ChatRequest, prompter: Prompter, limit: Limit, num_chars: int, owner: str
    ) -> Sequence[Part]:
        """Render a chat.

        Raises:
            NeedsEngine: it cannot be rendered here, or the text is far too long.
        """
        try:
            parts = await self._workers.rendered(prompter, chat, num_chars=num_chars, owner=owner)
        except TemplateFailed as exc:  # the engine will say so in its own words
            raise NeedsEngine("multimodal", "template") from exc
        if sum(map(len, parts)) > limit.max_chars:
            raise NeedsEngine("multimodal", "size")
        return parts


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
        if book.is_off(monotonic()) or len(items) > _MAX_MEDIA_ITEMS:
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
    ) -> Sequence[Part]:
        """Render a chat in parts; what is large off the loop, and what is huge not at all.

        Args:
            num_chars: About the size of its text.
            owner: See `PromptMemory`.

        Raises:
            NeedsEngine, TemplateFailed: as `Prompter.render`.
        """
        num_items = chat.num_items
        if num_items > _MAX_ITEMS:
            raise NeedsEngine("size")
        if num_items > _HEAVY_ITEMS or num_chars > _HEAVY_BYTES:
            return await self._heavily(partial(prompter.render, chat, apart=True))
        if num_items > prompter.max_inline_items:
            render = partial(prompter.render, chat, owner=owner, apart=True)
            return await asyncio.get_running_loop().run_in_executor(self._encoders, render)
        return prompter.render(chat, owner=owner)

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


logger = logging.getLogger(__name__)

_MAX_BYTES: Final = 2 << 20  # of a body that is written again for an engine


class EngineTokenizer:
    """Asks a replica."""

    def __init__(self, api: EngineApi, fleet: Fleet, *, timeout_s: float) -> None:
        self._api = api
        self._fleet = fleet
        self._timeout_s = timeout_s

    async def ids_of(self, model: str, body: bytes) -> list[int] | None:
        """Ask for the ids of a body that was made for it, in the same way."""
        try:
            return await self._ask(model, body)
        except BadRequest as exc:
            _log_failure(model, exc)
            return None

    async def ids(self, read: Read, prompter: Prompter) -> list[int] | None:
        """Ask within a deadline; late or failing means unknown (None), never an error."""
        if read.inbound.body is None or len(read.inbound.body) > _MAX_BYTES:
            return None
        if read.completion is not None and not _is_one_text(read.completion):
            return None  # `/tokenize` takes one text
        try:
            return await self._ask(read.model or "", orjson.dumps(_body(read, prompter)))
        except (BadRequest, orjson.JSONEncodeError):  # orjson writes 254 levels and reads 1,024
            return None  # forwarded, it will be refused in the engine's own words
        except NeedsEngine:  # what that route would have to be sent depends on the template
            return None

    async def _ask(self, model: str, body: bytes) -> list[int] | None:
        """Ask a replica; None: none is up, or it did not answer.

        Raises:
            BadRequest: it refuses the body.
        """
        replica = self._least_busy(model)
        if replica is None:
            return None
        try:
            return await self._api.tokenize(
                replica.name, replica.url, body, timeout_s=self._timeout_s
            )
        except UpstreamError as exc:
            _log_failure(model, exc)
            return None

    def _least_busy(self, model: str) -> Replica | None:
        """Choose the replica to ask; None: none serves the model."""
        now_s = monotonic()
        try:
            candidates = self._fleet.offers.candidates(model, now_s)
        except RouterError:
            return None
        views = self._fleet.load.views(candidates, {}, now_s)
        least = min(zip(views, candidates, strict=True), key=lambda pair: pair[0].num_requests)
        return least[1].replica


def _log_failure(model: str, error: RouterError) -> None:
    logger.warning("no engine tokenized", extra={"model": model, "reason": error.message})


def _body(read: Read, prompter: Prompter) -> dict[str, Any]:
    """Build what is asked.

    Raises:
        NeedsEngine: as `Prompter.adapted`.
    """
    write = read.inbound.api.tokenize_body
    if write is not None:
        return write(orjson.loads(read.inbound.body or b""))
    assert read.chat is not None
    return tokenize_chat(prompter.adapted(read.chat))


def _is_one_text(request: CompletionRequest) -> bool:
    return len(request.prompts) == 1 and isinstance(request.prompts[0], str)


_FOR_NO_ENGINE: Final = ("field", "size")
"""Reasons for which an engine is not asked either: it would answer something else, or too late."""


class Tokenizer:
    """Finds the tokens of prompts.

    Args:
        workers: Where prompts are rendered and encoded.
        engine: Is asked what cannot be tokenized here.
    """

    def __init__(
        self,
        *,
        prompters: Prompters,
        workers: Workers,
        engine: EngineTokenizer,
        media: MediaTokenizer,
        fleet: Fleet,
        metrics: Metrics,
    ) -> None:
        self._prompters = prompters
        self._workers = workers
        self._engine = engine
        self._media = media
        self._fleet = fleet
        self._metrics = metrics

    async def find(self, read: Read) -> Tokenized:
        """Find a prompt's tokens; an estimate of their number where they cannot be known.

        Raises:
            BadRequest: it surely does not fit the model.
            TemplateFailed: the chat template, proven to be the engine's, refuses the prompt.
        """
        request, found = read.request, Tokenized()
        assert request is not None
        prompter = self._prompters.get(read.model) if read.model is not None else None
        limit = self._limit(read.model, request, prompter)
        limit.check(request)
        if prompter is not None:
            try:
                trust = prompter.trust
                if trust.reason is not None and trust.try_again(asyncio.get_running_loop().time()):
                    logger.info("local tokens are tried again", extra={"model": read.model})
                found = await self._find(read, request, prompter, limit)
            except TemplateFailed:
                if prompter.trust.num_matches:
                    raise
                found = Tokenized(is_refused_here=True)  # the engine may have another template
            except RouterError:
                raise
            except BaseException as exc:  # our bug or a library's: it costs a match, not a request
                if not is_failure(exc):
                    raise
                self._log_bug(read, exc)
        self._metrics.tokenized.labels(found.way).inc()
        if found.tokens is None:
            return replace(found, num_tokens=len(read.inbound.body or b"") // BYTES_PER_TOKEN)
        return replace(
            found,
            num_tokens=found.tokens.num_tokens + found.num_rest_tokens,
            num_more_tokens=0 if isinstance(request, ChatRequest) else _num_more_tokens(request),
        )

    async def count(self, read: Read) -> int | None:
        """Count the tokens of a chat. None: an engine might count otherwise, or refuse it.

        Counted only where engines have counted such requests as we do, and the model has not been
        suspect since.
        """
        prompter = self._prompters.get(read.model) if read.model is not None else None
        chat = read.chat
        if prompter is None or chat is None or chat.model is None:
            return None
        if chat.tool_choice is not None and not (chat.tool_choice == "auto" and chat.tools):
            return None  # a parser may refuse it, an engine leave out tools that must not be called
        if (MESSAGES.name, chat.has_tool_choice) not in prompter.trust.proven:
            return None
        limit = self._limit(read.model, chat, prompter)
        try:
            tokens = await self._locally(read, chat, prompter, limit)
            return tokens.num_tokens if tokens is not None else None
        except (NeedsEngine, RouterError):
            return None
        except BaseException as exc:  # as in `find`
            if not is_failure(exc):
                raise
            self._log_bug(read, exc)
            return None

    def _limit(self, model: str | None, request: Request, prompter: Prompter | None) -> Limit:
        max_tokens = self._fleet.offers.longest(model) if model is not None else None
        if prompter is None:
            return Limit(max_tokens=max_tokens, is_cut=is_cut(request))
        is_text = prompter.writes_text or not isinstance(request, ChatRequest)
        truncates = is_cut(request)
        return Limit(
            max_tokens=max_tokens,
            max_chars_per_token=prompter.encoder.max_chars_per_token,
            is_proven=is_text and not truncates and prompter.trust.num_matches > 0,
            is_cut=truncates,
        )

    async def _find(
        self, read: Read, request: Request, prompter: Prompter, limit: Limit
    ) -> Tokenized:
        """Find the tokens here, or else at an engine.

        Raises:
            BadRequest: it surely does not fit the model.
            TemplateFailed: our chat template refuses the prompt.
        """
        chat = request if isinstance(request, ChatRequest) else None
        is_media = chat is not None and has_media(chat.messages)
        try:
            if chat is not None and is_media:
                return await self._media.find(read, chat, prompter, limit)
            tokens = await self._locally(read, request, prompter, limit)
            return Tokenized(tokens=tokens, way="local") if tokens is not None else Tokenized()
        except NeedsEngine as exc:
            why = exc.detail if exc.reason == "field" else exc.reason
            self._metrics.needs_engine.labels(read.inbound.api.name, why).inc()
            may_ask = exc.reason not in _FOR_NO_ENGINE and (prompter.asks_engine or chat is None)
        ids = await self._engine.ids(read, prompter) if may_ask else None
        if ids is None:
            return Tokenized(has_media=is_media)
        plan = prompter.plan_ids(ids, read.inbound.owner)
        tokens = prompter.commit(plan, plan.encode())
        return Tokenized(tokens=tokens, way="engine", has_media=is_media)

    async def _locally(
        self, read: Read, request: Request, prompter: Prompter, limit: Limit
    ) -> Tokens | None:
        """Return the tokens of a prompt without media. None: it is too long to be worth it.

        Raises:
            BadRequest, TemplateFailed: as `find`.
            NeedsEngine: they cannot be made here.
        """
        owner = read.inbound.owner
        if isinstance(request, ChatRequest):
            num_bytes = len(read.inbound.body or b"")
            parts = await self._workers.rendered(
                prompter, request, num_chars=num_bytes, owner=owner
            )
            if not limit.takes_text(sum(map(len, parts))):
                return None
            plan = prompter.plan_rendered(request, parts, owner=owner)
        else:
            first = request.prompts[0] if request.prompts else ""
            if isinstance(first, str) and not limit.takes_text(len(first)):
                return None
            plan = prompter.plan_completion(request, owner=owner)
        encoded = await self._workers.encoded(plan)
        if not limit.takes_tokens(plan.num_known_tokens + sum(map(len, encoded))):
            return None  # its chain would be worth nothing
        return prompter.commit(plan, encoded)

    def _log_bug(self, read: Read, bug: BaseException) -> None:
        """Log where it happened, but not what it says: that may quote the prompt."""
        where = traceback.extract_tb(bug.__traceback__, limit=-1)[0]
        logger.error(
            "prompt was not tokenized",
            extra={
                "model": read.model,
                "request": read.request_id,
                "error": type(bug).__name__,
                "where": f"{where.filename}:{where.lineno}",
            },
        )


def _num_more_tokens(request: CompletionRequest) -> int:
    """Count the tokens of a batch's prompts behind the first; those of texts are estimated."""
    return sum(
        len(prompt) // BYTES_PER_TOKEN if isinstance(prompt, str) else len(prompt)
        for prompt in request.prompts[1:]
    )
