"""One model's way from a request to its tokens and block keys, in three steps.

    plan    on the loop: render, and find the known part (about 0.5 ms for 80,000 tokens)
    encode  anywhere: only what no earlier prompt had; long texts off the loop
    commit  on the loop: remember it, and return the tokens

A plan may be dropped at any time. Two plans of the same text may both be committed.

`Reference` makes a prompt's ids as the engine does: whole, by `tokenizers`, without shortcuts.
Everything that `Prompter` makes is compared with these.
"""

from __future__ import annotations

import copy
import datetime
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, Literal, Self, cast

from router.api.openai import ChatRequest, CompletionRequest, TokenIds
from router.base.engines import V0_32, Release
from router.tokens.boundaries import IdCuts, slice_ids
from router.tokens.encoder import (
    Framed,
    FramedEncoder,
    FramedPrompt,
    NoEncoder,
    Part,
    PlainEncoder,
    text_of,
)
from router.tokens.media import (
    KnownMedia,
    MediaBook,
    MediaEncoder,
    MediaKind,
    MediaText,
    tokens_between,
)
from router.tokens.needs_engine import NeedsEngine, is_failure
from router.tokens.prompt_tree import EncodePlan, PromptMemory, Tokens
from router.tokens.templates import NoRenderer, Renderer
from router.tokens.trust import TokenTrust


class Reference:
    """Makes the ids of one model's prompts, even if its tokens are suspect.

    Args: as of `Prompter`.

    Raises: as `Prompter.plan_chat` and `plan_completion`.
    """

    __slots__ = ("_chat_encoder", "_encoder", "_media", "_renderer")

    def __init__(
        self,
        encoder: PlainEncoder,
        renderer: Renderer,
        chat_encoder: FramedEncoder | None,
        media: MediaBook,
    ) -> None:
        self._encoder = encoder
        self._renderer = renderer
        self._chat_encoder = chat_encoder
        self._media = media

    def chat_ids(self, request: ChatRequest) -> list[int]:
        """Return a chat's ids."""
        return self._chat_ids(request, self._renderer)

    def text_ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return a text's ids."""
        return self._encoder.encode_whole(text, add_special_tokens=add_special_tokens).tolist()

    def media_ids(
        self, request: ChatRequest, kind: MediaKind, ids: Sequence[int]
    ) -> TokenIds | None:
        """Find an engine's tokens for a request's one item; None: not certain."""
        shown = self._media.placeholders.get(kind)
        if shown is None:
            return None
        renderer = self._renderer
        text = text_of(renderer.render(renderer.adapted(request), by_the_book=True))
        return tokens_between(ids, self.text_ids(text, False), shown.token_id)

    def shown(self, ids: Sequence[int], text: str) -> list[str]:
        """Write the tokens of a text so that they can be read: as text, else as numbers."""
        try:
            texts = self._encoder.texts_of(ids)
        except BaseException as exc:  # ids of another vocabulary
            if not is_failure(exc):
                raise
            texts = []
        return texts if "".join(texts) == text else [str(each) for each in ids]

    def proves(self, request: ChatRequest | CompletionRequest, tokens: Tokens) -> bool:
        """Encode a prompt whole and compare; off the loop (about 150 ms).

        The verdict is for `Prompter.observe_proof`, on the loop. Prompts of ids prove nothing:
        True.
        """
        ids = tokens.ids()
        if isinstance(request, ChatRequest):
            if self.chat_ids(request) == ids:
                return True
            return self._renderer.is_dated and self._chat_ids(request, self._yesterday()) == ids
        text = request.prompts[0]
        return not isinstance(text, str) or self.text_ids(text, request.add_special_tokens) == ids

    def _chat_ids(self, request: ChatRequest, renderer: Renderer) -> list[int]:
        parts = renderer.render(renderer.adapted(request), by_the_book=True)
        if self._chat_encoder is None:
            return self.text_ids(text_of(parts), request.add_special_tokens)
        return self._chat_encoder.encode_whole(cast("Sequence[Framed]", parts)).tolist()

    def _yesterday(self) -> Renderer:
        """Return a renderer of the day before: a prompt may be proven after midnight."""
        renderer = copy.copy(self._renderer)
        today = renderer.today
        renderer.today = lambda: today() - datetime.timedelta(days=1)
        return renderer


Verdict = Literal["same", "fast", "pieces", "outdated"]
"""The result of a proof: the same ids; other ids by fastokens, or by the pieces; tokens that were
forgotten since."""

_MAX_BYTES: Final = 512 << 20
_NO_IDS: TokenIds = array("I")


class Prompter:
    """Makes the prompts of one model; `PromptMemory` says what an owner is.

    Args:
        encoder: The model's tokenizer.
        renderer: Its chat template.
        chat_encoder: Encodes what the renderer frames. None: that is text, and `encoder` does.
        asks_engine: Whether an engine's `/tokenize` has the tokens of its chats.
        media: Known images. None: the model has none.
        max_inline_items: With more messages, parts and calls (see `ChatRequest.num_items`), a chat
            is rendered off the loop.
        max_bytes: Budget for remembered prompts.

    reference: The same tokens, made without the shortcuts here.
    writes_text: Whether the renderer writes text, and not framed parts.
    """

    __slots__ = (
        "_chat_encoder",
        "_missing",
        "asks_engine",
        "encoder",
        "max_inline_items",
        "media",
        "memory",
        "reference",
        "renderer",
        "trust",
        "writes_text",
    )

    def __init__(
        self,
        encoder: PlainEncoder,
        renderer: Renderer,
        *,
        chat_encoder: FramedEncoder | None = None,
        asks_engine: bool = True,
        media: MediaBook | None = None,
        max_inline_items: int = 1_000,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self.trust = TokenTrust()
        self.asks_engine = asks_engine
        self.media = media or MediaBook({}, "")
        self.max_inline_items = max_inline_items
        self.encoder = encoder
        self.renderer = renderer
        self.writes_text = chat_encoder is None
        self._chat_encoder = chat_encoder
        self.memory = PromptMemory(max_bytes, encoder.prefix)
        self.reference = Reference(encoder, renderer, chat_encoder, self.media)
        self._missing: str | None = None
        if isinstance(encoder, NoEncoder):
            self._missing = encoder.reason or "no tokenizer"
        elif isinstance(renderer, NoRenderer):
            self._missing = renderer.reason or None

    @classmethod
    def missing(cls, reason: str, *, max_bytes: int = _MAX_BYTES) -> Self:
        """Return a prompter that only takes token ids, because a model cannot be loaded."""
        return cls(NoEncoder(reason), NoRenderer(reason), max_bytes=max_bytes)

    @property
    def engine_only(self) -> str | None:
        """Why no chat of this model is tokenized here; None: it is."""
        return self.trust.reason or self._missing

    # ---------------------------------------------------------------- render

    def render(
        self, request: ChatRequest, *, owner: str = "", apart: bool = False
    ) -> Sequence[Part]:
        """Render a chat request; see `Renderer.render`.

        Raises: as `plan_chat`.
        """
        self._check_trusted()
        renderer = self.renderer
        return renderer.render(renderer.adapted(request), apart=apart, owner=owner)

    def adapted(self, request: ChatRequest) -> ChatRequest:
        """Adapt as `Renderer.adapted` does.

        Raises:
            NeedsEngine: the request depends on a template that is not known here.
        """
        adapted = self.renderer.adapted(request)
        if adapted is not request:
            self._check_trusted()
        return adapted

    # ---------------------------------------------------------------- plan and commit

    def plan_chat(self, request: ChatRequest, owner: str = "") -> EncodePlan:
        """Render a chat request and find its new part.

        Raises:
            NeedsEngine: only the engine can make its tokens.
            TemplateFailed: the chat template refuses it; the engine will answer 400.
        """
        return self.plan_rendered(request, self.render(request, owner=owner), owner=owner)

    def plan_rendered(
        self, request: ChatRequest, parts: Sequence[Part], *, owner: str = ""
    ) -> EncodePlan:
        """Find the new part of what `render` returned.

        Raises:
            NeedsEngine: the text is no Unicode.
        """
        if self._chat_encoder is None:
            data = _bytes(cast("Sequence[str]", parts))
            return self._plan_text(data, request.add_special_tokens, owner)
        prompt = FramedPrompt(parts, self._chat_encoder)
        return self.memory.plan(self.memory.roots(owner).framed, prompt.data, prompt, prompt.encode)

    def plan_media(
        self,
        request: ChatRequest,
        texts: Sequence[str],
        media: Sequence[KnownMedia],
        *,
        owner: str = "",
    ) -> EncodePlan:
        """Find the new part of a prompt of texts with images between them.

        Args:
            texts: As `render` wrote them, without those behind the first unknown item.
            media: The items, one fewer.

        Raises:
            NeedsEngine: the tokenizer cannot be used here, or the text is no Unicode.
        """
        self._check_trusted()
        encoder, roots = self.encoder, self.memory.roots(owner)
        if request.add_special_tokens and (encoder.suffix is None or encoder.suffix):
            raise NeedsEngine("multimodal", "special tokens behind the text")
        try:
            text = MediaText(texts, media)
        except UnicodeEncodeError as exc:
            raise NeedsEngine("surrogate") from exc
        pieces = MediaEncoder(text, encoder)
        root = roots.special if request.add_special_tokens else roots.bare
        encode = partial(pieces.encode, suffix=_NO_IDS)
        return self.memory.plan(root, text.data, pieces.cuts(text.data), encode)

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
        root = self.memory.roots(owner).ids
        return self.memory.plan(root, data, IdCuts(len(data)), slice_ids, is_text=False)

    def commit(self, plan: EncodePlan, encoded: Sequence[TokenIds]) -> Tokens:
        """Remember what `plan.encode()` returned, and return the prompt's tokens."""
        path = plan.tree.commit(plan.walk, encoded)
        return Tokens(plan.tree, path, plan.num_known_tokens, len(plan.walk.path))

    def _plan_text(self, data: bytes, add_special_tokens: bool, owner: str) -> EncodePlan:
        self._check_trusted()
        encoder, roots = self.encoder, self.memory.roots(owner)
        root, suffix = roots.bare, _NO_IDS
        if add_special_tokens:
            root = roots.special
            if encoder.suffix is None:  # they depend on the text: it is encoded whole
                return self.memory.plan(root, data, IdCuts(0), partial(_encode_whole, encoder))
            suffix = encoder.suffix
        encode = partial(encoder.encode, suffix=suffix)
        return self.memory.plan(root, data, encoder.cuts(data), encode)

    # ---------------------------------------------------------------- proofs

    def observe_proof(
        self, tokens: Tokens, *, is_chat: bool, is_same: bool, now_s: float
    ) -> Verdict:
        """Record what `Reference.proves` returned, and draw the consequence; on the loop.

        If fastokens encoded, it is suspected first. The model goes on with `tokenizers`, and
        everything remembered is dropped. Only if `tokenizers` gives other ids, too, the engine
        tokenizes.
        """
        if not self.memory.has(tokens):
            return "outdated"
        may_be_fast = self.writes_text or not is_chat
        if not is_same and may_be_fast and self.give_up_fast():
            return "fast"
        return "same" if self.trust.observe_proof(is_same, now_s=now_s) else "pieces"

    def give_up_fast(self) -> bool:
        """Encode by `tokenizers` from now on, and forget what fastokens encoded.

        Returns False if fastokens was not in use.
        """
        if not self.encoder.slow_down():
            return False
        self.memory.clear()
        self.trust.start_again()
        return True

    def _check_trusted(self) -> None:
        if self.trust.reason is not None:
            raise NeedsEngine("distrusted", self.trust.reason)


def _encode_whole(encoder: PlainEncoder, data: bytes, new: object) -> list[TokenIds]:
    return [encoder.encode_whole(data.decode(), add_special_tokens=True)]


def _bytes(parts: Sequence[str]) -> bytes:
    if all(map(str.isascii, parts)):  # half of the time; a wide character would widen it all
        return "".join(parts).encode()
    try:
        return b"".join([part.encode() for part in parts])
    except UnicodeEncodeError as exc:
        raise NeedsEngine("surrogate") from exc


class Prompters:
    """One prompter per served model, loaded for the first replica that serves it.

    A replica of a newer release, with other rules for prompts, loads it again. The old prompter
    serves until then.

    An adapter has its base model's prompter. While a prompter is loading, prompts do not wait: they
    are routed without tokens.
    """

    __slots__ = ("_bases", "_by_model", "_loading", "_releases")

    def __init__(self) -> None:
        self._by_model: dict[str, Prompter] = {}
        self._loading: set[str] = set()
        self._bases: dict[str, str] = {}
        self._releases: dict[str, Release] = {}  # whose rules apply now, or once loading is done

    def adapt(self, adapters: Mapping[str, str]) -> None:
        """Serve adapters (name to base model) with their base models' prompters."""
        self._bases.update(adapters)

    def start_loading(self, model: str, release: Release = V0_32) -> bool:
        """Claim the loading of a model's prompter; False: it is loaded or being loaded."""
        if model in self._loading or self._releases.get(model, (0, 0)) >= release:
            return False
        self._loading.add(model)
        self._releases[model] = release
        return True

    def finish_loading(self, model: str, prompter: Prompter) -> None:
        """Use `prompter` for `model` from now on."""
        self._loading.discard(model)
        self._by_model[model] = prompter

    def loading(self) -> list[str]:
        """List the models whose prompters are being loaded."""
        return sorted(self._loading)

    def forget(self, replica: str) -> None:
        """Drop the evidence of a replica that is gone, or is another process now."""
        for prompter in self._by_model.values():
            prompter.trust.forget(replica)

    def base(self, model: str) -> str:
        """Return an adapter's base model; of any other model its own name."""
        return self._bases.get(model, model)

    def get(self, model: str) -> Prompter | None:
        """Return the prompter of a model or adapter; None: not loaded (yet)."""
        return self._by_model.get(self._bases.get(model, model))
