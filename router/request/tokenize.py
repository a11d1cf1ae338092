"""Tokenize: a prompt's token ids; locally, else at an engine, else not at all.

Local tokens are proven at run time, see `audit`. If they are wrong, the engine gets the
model's prompts for a while (see TokenTrust).
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final, TypeVar

from msgspec.structs import replace

from router.api.apis import MESSAGES
from router.api.fit import check_fits, check_text_fits, sizes_of, too_many_tokens
from router.api.openai import (
    ChatRequest,
    CompletionRequest,
    TokenIds,
)
from router.base.errors import RouterError, TemplateFailed
from router.config import TokensConfig
from router.metrics import Metrics
from router.request.engine_tokens import EngineTokenizer
from router.request.media_tokens import MediaFinder, num_media_chars
from router.request.results import Read, Tokenized
from router.tokens import NeedsEngine, Prompter, Prompters, Tokens
from router.tokens.media import KnownMedia, MediaBook, has_media, mark_media, media_items
from router.tokens.media_names import MediaItem
from router.tokens.panics import is_failure
from router.tokens.plan import EncodePlan

logger = logging.getLogger(__name__)

_BYTES_PER_TOKEN: Final = 4  # where a prompt's tokens cannot be known at all
_TOKENS_PER_ITEM: Final = 1_000  # a screenshot has some, where it is not known
_MEDIA_MARK: Final = "this message is unknown to the router"
_MAX_BYTES_PER_TOKEN: Final = 8  # in the mean of a whole prompt; text has about 4
_MAX_TOKENS: Final = 1_000_000  # where the engine does not say what it takes at most
_HEAVY_BYTES: Final = 1 << 20  # of a body or of new text: not in the way of others' prompts
_HEAVY_ITEMS: Final = 1_000  # that a template goes through: some 6 µs each, a tool 30
_MAX_ITEMS: Final = 10_000
_MAX_HEAVY: Final = 8  # waiting at once; more are routed without tokens
_T = TypeVar("_T")

MaxTokens = Callable[[str], int | None]
"""Model -> longest prompt its engines take, in tokens; None: not known."""


class Tokenizer:
    """Finds the tokens of prompts.

    Args:
        encoders: Where long encodes run; they hold the GIL little.
        heavy: Where what takes seconds runs, out of the way of other prompts.
        engine: Is asked what cannot be tokenized here.
        max_tokens: What is far too long is not tokenized: the engine refuses it, and here it
            would keep others waiting (about 0.2 s a megabyte).
    """

    def __init__(
        self,
        *,
        config: TokensConfig,
        prompters: Prompters,
        encoders: Executor,
        heavy: Executor,
        engine: EngineTokenizer,
        max_tokens: MaxTokens,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._prompters = prompters
        self._encoders = encoders
        self._heavy = heavy
        self._num_heavy = 0
        self._engine = engine
        self._media = MediaFinder(engine, encoders)
        self._max_tokens = max_tokens
        self._metrics = metrics

    async def find(self, read: Read) -> Tokenized:
        """Find a prompt's tokens; an estimate of their number where they cannot be known.

        Raises:
            BadRequest: it surely does not fit the model.
            TemplateFailed: the chat template, proven to be the engine's, refuses the prompt.
        """
        found = Tokenized()
        prompter = self._prompters.get(read.model) if read.model is not None else None
        self._check_fits(read, prompter)
        if prompter is not None:
            try:
                if prompter.trust.try_again(asyncio.get_running_loop().time()):
                    logger.info("local tokens are tried again", extra={"model": read.model})
                found = await self._find(read, prompter)
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
            return replace(found, num_tokens=len(read.inbound.body or b"") // _BYTES_PER_TOKEN)
        return replace(
            found,
            num_tokens=found.tokens.num_tokens + found.num_rest_tokens,
            num_more_tokens=_num_more_tokens(read.completion),
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
        try:
            tokens = await self._locally(read, prompter)
            return tokens.num_tokens if tokens is not None else None
        except (NeedsEngine, RouterError):
            return None
        except BaseException as exc:  # as in `find`
            if not is_failure(exc):
                raise
            self._log_bug(read, exc)
            return None

    async def _find(self, read: Read, prompter: Prompter) -> Tokenized:
        """Find the tokens here, or else at an engine.

        Raises:
            TemplateFailed: our chat template refuses the prompt.
        """
        chat = read.chat
        is_media = chat is not None and has_media(chat.messages)
        try:
            if is_media:
                return await self._with_media(read, prompter)
            tokens = await self._locally(read, prompter)
            return Tokenized(tokens=tokens, way="local") if tokens is not None else Tokenized()
        except NeedsEngine as exc:
            why = exc.detail if exc.reason == "field" else exc.reason
            self._metrics.needs_engine.labels(read.inbound.api.name, why).inc()
            may_ask = exc.reason not in ("field", "size")
            if chat is not None and not prompter.asks_engine:
                may_ask = False
        ids = await self._engine.ids(read, prompter) if may_ask else None
        if ids is None:
            return Tokenized(has_media=is_media)
        plan = prompter.plan_ids(ids, read.inbound.owner)
        tokens = prompter.commit(plan, plan.encode())
        return Tokenized(tokens=tokens, way="engine", has_media=is_media)

    def _check_fits(self, read: Read, prompter: Prompter | None) -> None:
        """Refuse what is surely too long, before anything is made of it.

        Raises:
            BadRequest: it is.
        """
        longest = self._max_tokens(read.model) if read.model is not None else None
        if longest is None or read.request is None:
            return
        chars = prompter.encoder.max_chars_per_token if prompter is not None else None
        check_fits(sizes_of(read.request), longest, chars)

    async def _locally(self, read: Read, prompter: Prompter) -> Tokens | None:
        longest = self._max_tokens(read.model or "")
        is_cut = read.chat is not None and read.chat.truncates
        may_refuse = prompter.trust.num_matches > 0 and not is_cut
        if read.chat is not None:
            parts = await self._rendered(read, read.chat, prompter)
            num_chars, most = sum(map(len, parts)), prompter.encoder.max_chars_per_token
            may_refuse &= prompter.writes_text
            if longest is not None and most is not None and may_refuse:
                check_text_fits(num_chars, longest, most)
            if num_chars > (longest or _MAX_TOKENS) * _MAX_BYTES_PER_TOKEN:
                return None
            plan = prompter.plan_rendered(read.chat, parts, owner=read.inbound.owner)
        else:
            assert read.completion is not None
            if _num_chars(read.completion) > (longest or _MAX_TOKENS) * _MAX_BYTES_PER_TOKEN:
                return None
            plan = prompter.plan_completion(read.completion, owner=read.inbound.owner)
        encoded = await self._encoded(plan)
        num_tokens = plan.num_known_tokens + sum(map(len, encoded))
        # Its chain would be worth nothing; of one that is cut a token less is left.
        if num_tokens > (longest or _MAX_TOKENS) - is_cut:
            if longest is not None and may_refuse:
                raise too_many_tokens(num_tokens, longest)
            return None
        return prompter.commit(plan, encoded)

    async def _encoded(self, plan: EncodePlan) -> list[TokenIds]:
        if plan.num_new_chars > _HEAVY_BYTES:
            return await self._heavily(plan.encode)
        if plan.num_new_chars > self._config.inline_chars:
            return await self._off_loop(plan.encode)
        return plan.encode()

    async def _with_media(self, read: Read, prompter: Prompter) -> Tokenized:
        """Make a prompt with images or sounds as far as they are known; of one with other media
        what is before their message. The rest is estimated.

        Raises:
            NeedsEngine: nothing of it can be made here.
        """
        if prompter.media.placeholders:
            try:
                return await self._with_items(read, prompter, prompter.media)
            except NeedsEngine as exc:
                if exc.reason != "multimodal":
                    raise
        found = await self._before_media(read, prompter)
        self._metrics.needs_engine.labels(read.inbound.api.name, "multimodal").inc()
        return found

    async def _before_media(self, read: Read, prompter: Prompter) -> Tokenized:
        """Make what stands before the first message with media.

        No engine is asked: it would fetch and decode them, and once more for the request itself.

        Raises:
            NeedsEngine: nothing of it can be made here.
        """
        assert read.chat is not None
        chat = replace(read.chat, messages=mark_media(read.chat.messages, _MEDIA_MARK))
        try:
            text = "".join(await self._rendered(read, chat, prompter))
        except TemplateFailed as exc:
            raise NeedsEngine("multimodal", "template") from exc
        before, mark, behind = text.partition(_MEDIA_MARK)
        if not mark or len(text) > _MAX_TOKENS * _MAX_BYTES_PER_TOKEN:
            raise NeedsEngine("multimodal")
        plan = prompter.plan_rendered(chat, [before], owner=read.inbound.owner)
        tokens = prompter.commit(plan, await self._encoded(plan)).before_tail()
        if not tokens.num_tokens:
            raise NeedsEngine("multimodal")
        num_media = 1 + behind.count(_MEDIA_MARK)
        return Tokenized(
            tokens=tokens,
            way="prefix",
            num_rest_tokens=len(behind) // _BYTES_PER_TOKEN + num_media * _TOKENS_PER_ITEM,
            num_head_tokens=tokens.num_tokens,
            num_named_tokens=tokens.num_tokens,
            has_media=True,
        )

    async def _with_items(self, read: Read, prompter: Prompter, book: MediaBook) -> Tokenized:
        """Make a prompt with images or sounds as far as they are known; the rest is estimated.

        Raises:
            NeedsEngine: nothing of it can be made here.
        """
        assert read.chat is not None
        items: list[MediaItem] = media_items(read.chat.messages)
        if any(item.kind not in book.placeholders for item in items):
            raise NeedsEngine("multimodal", "kind")
        chat = replace(read.chat, shows_media=True)
        num_chars = len(read.inbound.body or b"") - num_media_chars(items)
        try:
            text = "".join(await self._rendered(read, chat, prompter, num_chars))
        except TemplateFailed as exc:  # the engine will say so in its own words
            raise NeedsEngine("multimodal", "template") from exc
        texts, is_as_sent = book.split(text, [item.kind for item in items])
        if len(texts) == 1 or len(text) > _MAX_TOKENS * _MAX_BYTES_PER_TOKEN:
            raise NeedsEngine("multimodal")
        known: list[KnownMedia] = []
        if is_as_sent:  # else a client wrote such a token itself
            known = await self._media.find(read.model or "", prompter, items, read.inbound.owner)
        plan = prompter.plan_media(chat, texts[: len(known) + 1], known, owner=read.inbound.owner)
        tokens = prompter.commit(plan, await self._encoded(plan))
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
        rest = sum(map(len, texts[len(known) + 1 :])) // _BYTES_PER_TOKEN
        return replace(found, way="prefix", num_rest_tokens=rest + num_unknown * _TOKENS_PER_ITEM)

    async def _rendered(
        self, read: Read, chat: ChatRequest, prompter: Prompter, num_chars: int | None = None
    ) -> Sequence[str]:
        """Render a chat in parts; what is large off the loop, and what is huge not at all.

        Raises:
            NeedsEngine, TemplateFailed: as `Prompter.render_parts`.
        """
        num_items = chat.num_items
        if num_items > _MAX_ITEMS:
            raise NeedsEngine("size")
        num_chars = len(read.inbound.body or b"") if num_chars is None else num_chars
        if num_items > _HEAVY_ITEMS or num_chars > _HEAVY_BYTES:
            return await self._heavily(partial(prompter.render_parts, chat, apart=True))
        if num_items > prompter.max_inline_items:
            owner = read.inbound.owner
            render = partial(prompter.render_parts, chat, owner=owner, apart=True)
            return await self._off_loop(render)
        return prompter.render_parts(chat, owner=read.inbound.owner)

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

    async def _off_loop(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._encoders, work)

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


def _num_named_tokens(tokens: Tokens, items: Sequence[KnownMedia]) -> int:
    """Count the tokens in front of the first item of which no engine's name is known."""
    for item, span in zip(items, tokens.media_spans(), strict=True):
        if not item.is_named:
            return span.start
    return tokens.num_tokens


def _num_more_tokens(request: CompletionRequest | None) -> int:
    """Count the tokens of a batch's prompts behind the first; those of texts are estimated."""
    if request is None:
        return 0
    return sum(
        len(prompt) // _BYTES_PER_TOKEN if isinstance(prompt, str) else len(prompt)
        for prompt in request.prompts[1:]
    )


def _num_chars(request: CompletionRequest) -> int:
    first = request.prompts[0] if request.prompts else ""
    return len(first) if isinstance(first, str) else 0
