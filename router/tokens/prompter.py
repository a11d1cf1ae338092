"""One model's way from a request to its tokens and block keys, in three steps.

    plan    on the loop: render, and find the known part (about 0.5 ms for 80,000 tokens)
    encode  anywhere: only what no earlier prompt had; long texts off the loop
    commit  on the loop: remember it, and return the tokens

A plan may be dropped at any time. Two plans of the same text may both be committed.
"""

from __future__ import annotations

import copy
import datetime
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from router.api.openai import ChatRequest, CompletionRequest, Json, TokenIds
from router.tokens.content_format import ContentFormat
from router.tokens.cuts import IdCuts, slice_ids
from router.tokens.encoders import ChatEncoder, PlainEncoder
from router.tokens.media import KnownMedia, MediaBook, tokens_between
from router.tokens.media_names import MediaKind
from router.tokens.media_text import MediaEncoder, MediaText
from router.tokens.memory import PromptMemory
from router.tokens.needs_engine import NeedsEngine
from router.tokens.panics import is_failure
from router.tokens.plan import EncodeNew, EncodePlan, Tokens
from router.tokens.renderer import Renderer
from router.tokens.template_probes import TemplateProbes
from router.tokens.templates import ChatRenderer
from router.tokens.trust import TokenTrust

Verdict = Literal["same", "fast", "pieces", "outdated"]
"""The result of a proof: the same ids; other ids by fastokens, or by the pieces; tokens that were
forgotten since."""

_NO_IDS: TokenIds = array("I")


class Prompter:
    """Makes the prompts of one model; `PromptMemory` says what an owner is.

    Args:
        encoder: The model's tokenizer; None: it cannot be used here.
        renderer: Its chat template; None: it cannot be used here.
        chat_encoder: Encodes what the renderer writes; None: `encoder` does.
        asks_engine: Whether an engine's `/tokenize` has the tokens of its chats.
        media: Known images and sounds; None: prompts with media are not made here.
        max_inline_items: With more messages, parts and calls (see `ChatRequest.num_items`), a chat
            is rendered off the loop.
        reason: Why something is missing, for `NeedsEngine`; "" if nothing is.
        max_bytes: Budget for remembered prompts.
    """

    __slots__ = (
        "_chat_encoder",
        "_encoder",
        "_memory",
        "_probes",
        "_reason",
        "_renderer",
        "asks_engine",
        "max_inline_items",
        "media",
        "trust",
    )

    def __init__(
        self,
        encoder: PlainEncoder | None,
        renderer: Renderer | None,
        *,
        chat_encoder: ChatEncoder | None = None,
        asks_engine: bool = True,
        media: MediaBook | None = None,
        max_inline_items: int = 1_000,
        reason: str = "",
        max_bytes: int = 512 << 20,
    ) -> None:
        self.trust = TokenTrust()
        self.asks_engine = asks_engine
        self.media = media
        self.max_inline_items = max_inline_items
        self._encoder = encoder
        self._renderer = renderer
        self._probes = TemplateProbes(renderer) if renderer is not None else None
        self._chat_encoder = chat_encoder
        self._reason = reason
        self._memory = PromptMemory(max_bytes, encoder.prefix if encoder is not None else None)

    # ---------------------------------------------------------------- state

    @property
    def max_chars_per_token(self) -> int | None:
        """Length of the longest token in the vocabulary; None: not known here."""
        return self._encoder.max_chars_per_token if self._encoder is not None else None

    @property
    def engine_only(self) -> str | None:
        """Why no chat of this model is tokenized here; None: it is."""
        if self.trust.reason is not None:
            return self.trust.reason
        if self._encoder is None:
            return self._reason or "no tokenizer"
        return self._reason or None if self._renderer is None else None

    @property
    def is_dated(self) -> bool:
        """Whether chats contain the engine's date."""
        return self._renderer is not None and self._renderer.is_dated

    @property
    def is_fast(self) -> bool:
        """Whether fastokens encodes."""
        return self._encoder is not None and self._encoder.is_fast

    @property
    def writes_text(self) -> bool:
        """Whether `render` returns the prompt's text, and not marked text."""
        return self._chat_encoder is None

    @property
    def size_bytes(self) -> int:
        """Estimate the memory held for prompts."""
        return self._memory.size_bytes

    # ---------------------------------------------------------------- the engine's flags

    def set_clock(self, today: Callable[[], datetime.date]) -> None:
        """Render with the date that `today` returns: the engine's."""
        if self._renderer is not None:
            self._renderer.today = today

    def map_efforts(self, efforts: Mapping[str, str]) -> None:
        """Replace reasoning efforts as the engine's `--reasoning-effort-map` does."""
        if self._probes is not None:
            self._probes.efforts = efforts

    def set_content_format(self, content_format: ContentFormat) -> None:
        """See `ChatRenderer.use_format`; other renderers have no choice."""
        if isinstance(self._renderer, ChatRenderer):
            self._renderer.use_format(content_format)

    def set_defaults(self, arguments: Json | None) -> None:
        """Give the template the engine's `--default-chat-template-kwargs`."""
        if self._probes is not None:
            self._probes.defaults = arguments or None

    # ---------------------------------------------------------------- render

    def render(
        self,
        request: ChatRequest,
        *,
        owner: str = "",
        by_the_book: bool = False,
        apart: bool = False,
    ) -> str:
        """Render a chat request's text; see `Renderer.render`.

        Raises: as `plan_chat`.
        """
        self._usable_encoder()
        return self._rendered(request, by_the_book=by_the_book, apart=apart, owner=owner)

    def render_parts(
        self, request: ChatRequest, *, owner: str = "", apart: bool = False
    ) -> Sequence[str]:
        """Render a chat request's text in parts; see `Renderer.render_parts`.

        Raises: as `plan_chat`.
        """
        self._usable_encoder()
        renderer = self._present_renderer()
        return renderer.render_parts(self.adapted(request), apart=apart, owner=owner)

    def _rendered(
        self, request: ChatRequest, *, by_the_book: bool, apart: bool = False, owner: str = ""
    ) -> str:
        renderer = self._present_renderer()
        request = self.adapted(request)
        return renderer.render(request, by_the_book=by_the_book, apart=apart, owner=owner)

    def adapted(self, request: ChatRequest) -> ChatRequest:
        """See `TemplateProbes.adapted`; a request that depends on no template stays as it is.

        Raises:
            NeedsEngine: it depends on a template that is not known here.
        """
        probes = self._probes
        is_set = probes is not None and (
            probes.defaults is not None or request.reasoning_effort in probes.efforts
        )
        if not (request.has_inline_system or request.is_thinking_disabled or is_set):
            return request
        self._usable_encoder()
        if probes is None:
            raise NeedsEngine("model", self._reason)
        return probes.adapted(request)

    # ---------------------------------------------------------------- plan and commit

    def plan_chat(self, request: ChatRequest, owner: str = "") -> EncodePlan:
        """Render a chat request and find its new part.

        Raises:
            NeedsEngine: only the engine can make its tokens.
            TemplateFailed: the chat template refuses it; the engine will answer 400.
        """
        return self.plan_rendered(request, self.render_parts(request, owner=owner), owner=owner)

    def plan_rendered(
        self, request: ChatRequest, parts: Sequence[str], *, owner: str = ""
    ) -> EncodePlan:
        """Find the new part of the text that `render_parts` returned.

        Raises:
            NeedsEngine: the text is no Unicode.
        """
        data, encoder = _bytes(parts), self._chat_encoder
        if encoder is None:
            return self._plan_text(data, request.add_special_tokens, owner)
        root = self._memory.roots(owner).marked
        return self._memory.plan(root, data, encoder.cuts(data), _encoding(encoder))

    def plan_media(
        self,
        request: ChatRequest,
        texts: Sequence[str],
        media: Sequence[KnownMedia],
        *,
        owner: str = "",
    ) -> EncodePlan:
        """Find the new part of a prompt of texts with images or sounds between them.

        Args:
            texts: As `render` wrote them, without those behind the first unknown item.
            media: The items, one fewer.

        Raises:
            NeedsEngine: the tokenizer cannot be used here, or the text is no Unicode.
        """
        encoder, roots = self._usable_encoder(), self._memory.roots(owner)
        if request.add_special_tokens and (encoder.suffix is None or encoder.suffix):
            raise NeedsEngine("multimodal", "special tokens behind the text")
        try:
            text = MediaText(texts, media)
        except UnicodeEncodeError as exc:
            raise NeedsEngine("surrogate") from exc
        pieces = MediaEncoder(text, encoder)
        root = roots.special if request.add_special_tokens else roots.bare
        return self._memory.plan(root, text.data, pieces.cuts(text.data), _encoding(pieces))

    def plan_completion(
        self, request: CompletionRequest, index: int = 0, *, owner: str = ""
    ) -> EncodePlan:
        """Find the new part of one prompt of a completion request (by default the first).

        Raises:
            NeedsEngine: only the engine can make its tokens.
        """
        if request.engine_only is not None:
            raise NeedsEngine("field", request.engine_only)
        if not request.prompts:
            raise NeedsEngine("field", "prompt")
        prompt = request.prompts[index]
        if isinstance(prompt, str):
            special = request.add_special_tokens
            return self.plan_text(prompt, add_special_tokens=special, owner=owner)
        return self.plan_ids(prompt, owner)

    def plan_text(self, text: str, *, add_special_tokens: bool, owner: str = "") -> EncodePlan:
        """Find the new part of a text.

        Raises:
            NeedsEngine: the tokenizer cannot be used here, or the text is no Unicode.
        """
        return self._plan_text(_bytes([text]), add_special_tokens, owner)

    def plan_ids(self, ids: Sequence[int], owner: str = "") -> EncodePlan:
        """Find the new part of token ids: a prompt of ids, or an engine's answer.

        Raises:
            ValueError, TypeError, OverflowError: these are no token ids.
        """
        data = (ids if isinstance(ids, array) else array("I", ids)).tobytes()
        root = self._memory.roots(owner).ids
        return self._memory.plan(root, data, IdCuts(len(data)), slice_ids, is_text=False)

    def commit(self, plan: EncodePlan, encoded: Sequence[TokenIds]) -> Tokens:
        """Remember what `plan.encode()` returned, and return the prompt's tokens."""
        return self._memory.commit(plan, encoded)

    def _plan_text(self, data: bytes, add_special_tokens: bool, owner: str) -> EncodePlan:
        encoder, roots = self._usable_encoder(), self._memory.roots(owner)
        if not add_special_tokens:
            return self._memory.plan(roots.bare, data, encoder.cuts(data), _encoding(encoder))
        if encoder.suffix is None:  # special tokens that depend on the text: it is encoded whole
            encode: EncodeNew = partial(_encode_whole, encoder)
            return self._memory.plan(roots.special, data, IdCuts(0), encode)
        encode = _encoding(encoder, encoder.suffix)
        return self._memory.plan(roots.special, data, encoder.cuts(data), encode)

    # ---------------------------------------------------------------- proofs

    def chat_ids(self, request: ChatRequest) -> list[int]:
        """Make a chat's ids by `tokenizers`, without the shortcuts; raises as `prove`."""
        text = self._rendered(request, by_the_book=True)
        encoder: ChatEncoder = self._chat_encoder or self._present_encoder()
        return encoder.encode_whole(text, add_special_tokens=request.add_special_tokens).tolist()

    def text_ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Make a text's ids by `tokenizers`, without the shortcuts; raises as `prove`."""
        encoder = self._present_encoder()
        return encoder.encode_whole(text, add_special_tokens=add_special_tokens).tolist()

    def media_ids(
        self, request: ChatRequest, kind: MediaKind, ids: Sequence[int]
    ) -> TokenIds | None:
        """Find an engine's tokens for a request's one item; None: not certain.

        Raises: as `plan_chat`.
        """
        shown = self.media.placeholders.get(kind) if self.media is not None else None
        if shown is None:
            return None
        text = self.render(request)
        ours = self._present_encoder().encode_whole(text, add_special_tokens=False)
        return tokens_between(ids, ours, shown.token_id)

    def shown(self, ids: Sequence[int], text: str) -> list[str]:
        """Write the tokens of a text so that they can be read: as text, else as numbers."""
        try:
            texts = self._present_encoder().texts_of(ids)
        except BaseException as exc:  # ids of another vocabulary
            if not is_failure(exc):
                raise
            texts = []
        return texts if "".join(texts) == text else [str(each) for each in ids]

    def prove(self, request: ChatRequest | CompletionRequest, tokens: Tokens) -> bool:
        """Encode a prompt whole by `tokenizers` and compare; off the loop (about 150 ms).

        The verdict is for `observe_proof`, on the loop. Prompts of ids prove nothing: True.

        Raises: as `plan_chat` and `plan_completion`, even if the tokenizer is suspect.
        """
        ids = tokens.ids()
        if isinstance(request, ChatRequest):
            if self.chat_ids(request) == ids:
                return True
            return self.is_dated and self._yesterday().chat_ids(request) == ids
        text = request.prompts[0]
        return not isinstance(text, str) or self.text_ids(text, request.add_special_tokens) == ids

    def _yesterday(self) -> Prompter:
        """Return a prompter of the day before: a prompt may be proven after midnight."""
        renderer = copy.copy(self._present_renderer())
        today = renderer.today
        renderer.today = lambda: today() - datetime.timedelta(days=1)
        other = copy.copy(self)
        other._renderer = renderer
        return other

    def observe_proof(
        self, tokens: Tokens, *, is_chat: bool, is_same: bool, now_s: float
    ) -> Verdict:
        """Record what `prove` returned, and draw the consequence; on the loop.

        If fastokens encoded, it is suspected first. The model goes on with `tokenizers`, and
        everything remembered is dropped. Only if `tokenizers` gives other ids, too, the engine
        tokenizes.
        """
        if not self._memory.has(tokens):
            return "outdated"
        may_be_fast = self._chat_encoder is None or not is_chat
        if not is_same and may_be_fast and self.give_up_fast():
            return "fast"
        return "same" if self.trust.observe_proof(is_same, now_s=now_s) else "pieces"

    def quicken(self) -> str | None:
        """See `PlainEncoder.quicken`."""
        return self._encoder.quicken() if self._encoder is not None else self._reason

    def failure(self) -> str | None:
        """Return why fastokens failed, the first time that it is asked for; else None."""
        encoder = self._encoder
        if encoder is None or encoder.failure is None:
            return None
        failure, encoder.failure = encoder.failure, None
        return failure

    def give_up_fast(self) -> bool:
        """Encode by `tokenizers` from now on, and forget what fastokens encoded.

        Returns False if fastokens was not in use.
        """
        if self._encoder is None or not self._encoder.slow_down():
            return False
        self._memory.clear()
        self.trust.start_again()
        return True

    # ---------------------------------------------------------------- parts that may be missing

    def _usable_encoder(self) -> PlainEncoder:
        if self.trust.reason is not None:
            raise NeedsEngine("distrusted", self.trust.reason)
        return self._present_encoder()

    def _present_encoder(self) -> PlainEncoder:
        if self._encoder is None:
            raise NeedsEngine("model", self._reason)
        return self._encoder

    def _present_renderer(self) -> Renderer:
        if self._renderer is None:
            raise NeedsEngine("model", self._reason)
        return self._renderer


def _encoding(encoder: ChatEncoder | MediaEncoder, suffix: TokenIds = _NO_IDS) -> EncodeNew:
    return partial(encoder.encode, suffix=suffix)


def _encode_whole(encoder: PlainEncoder, data: bytes, new: object) -> list[TokenIds]:
    return [encoder.encode_whole(data.decode(), add_special_tokens=True)]


def _bytes(parts: Sequence[str]) -> bytes:
    if all(map(str.isascii, parts)):  # half of the time; a wide character would widen it all
        return "".join(parts).encode()
    try:
        return b"".join([part.encode() for part in parts])
    except UnicodeEncodeError as exc:
        raise NeedsEngine("surrogate") from exc
