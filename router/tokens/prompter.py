"""One model's way from a request to its tokens and block keys, in three steps.

    plan    on the loop: render, find what is known; cheap (about 0.5 ms for 80,000 tokens)
    encode  anywhere: only what no earlier prompt had; long ones off the loop
    commit  on the loop: remember it, return the tokens

A plan may be dropped at any time; two plans of the same text may both be committed.
"""

from __future__ import annotations

import copy
import datetime
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from router.api.openai import ChatRequest, CompletionRequest, Json, TokenIds
from router.contracts import NO_EXTRA, BlockKey, ExtraKeys, HashContract, MediaSpan
from router.errors import TemplateFailed
from router.tokens.content_format import ContentFormat
from router.tokens.cuts import IdCuts, slice_ids
from router.tokens.encoders import ChatEncoder, PlainEncoder
from router.tokens.incremental import Chain, Segment, SegmentTree, Walk
from router.tokens.media import KnownMedia, MediaBook, tokens_between
from router.tokens.media_names import MediaKind
from router.tokens.media_text import MediaEncoder, MediaText
from router.tokens.needs_engine import NeedsEngine
from router.tokens.panics import is_failure
from router.tokens.renderer import Renderer
from router.tokens.template_probes import TemplateProbes
from router.tokens.templates import ChatRenderer, guesses
from router.tokens.trust import TokenTrust

Verdict = Literal["same", "fast", "pieces", "outdated"]
"""Of a proof: the same ids; others by fastokens, or by the pieces; of what is forgotten since."""

_NO_IDS: TokenIds = array("I")
_MAX_OWNERS = 4096


class _Roots(NamedTuple):
    """The beginnings of one owner's prompts: of ids, of text, of text in special tokens, of
    marked text."""

    ids: Segment
    bare: Segment
    special: Segment
    marked: Segment


class EncodePlan(Struct, frozen=True, kw_only=True):
    """What is left to encode of one prompt.

    num_new_chars: What of the text is not known yet, in UTF-8 bytes: the measure of the work in
        `encode`. 0 for a prompt of token ids.
    """

    num_new_chars: int
    tree: SegmentTree
    walk: Walk
    data: bytes
    encoder: ChatEncoder | MediaEncoder | None
    suffix: TokenIds
    is_whole: bool = False

    @property
    def num_known_tokens(self) -> int:
        """Count the tokens that need not be encoded."""
        return sum([len(segment.ids) for segment in self.walk.path])

    def encode(self) -> list[TokenIds]:
        """Encode what is new: pure, thread-safe, without the GIL for most of the time.

        About 0.7 ms per 1,000 new tokens.
        """
        if not self.walk.new:
            return []
        if self.encoder is None:
            return slice_ids(self.data, self.walk.new)
        if self.is_whole and not isinstance(self.encoder, MediaEncoder):
            return [self.encoder.encode_whole(self.data.decode(), add_special_tokens=True)]
        return self.encoder.encode(self.data, self.walk.new, self.suffix)


class Tokens:
    """The tokens of one prompt, shared with every prompt that begins alike."""

    __slots__ = ("_path", "_tree", "num_new_tokens", "num_tokens")

    def __init__(self, tree: SegmentTree, path: list[Segment], num_known_segments: int) -> None:
        self._tree = tree
        self._path = path
        counts = [len(segment.ids) for segment in path]
        self.num_tokens = sum(counts)
        self.num_new_tokens = sum(counts[num_known_segments:])

    @property
    def num_before_media(self) -> int:
        """Count the tokens in front of the first image or sound; all where there is none."""
        spans = self.media_spans()
        return spans[0].start if spans else self.num_tokens

    def media_spans(self) -> list[MediaSpan]:
        """List where the prompt's images and sounds are, from its first token."""
        spans: list[MediaSpan] = []
        end = 0
        for segment in self._path:
            start, end = end, end + len(segment.ids)
            if segment.media is not None:
                spans.append(MediaSpan(segment.media, start, end))
        return spans

    def before_tail(self) -> Tokens:
        """Return the tokens that are the same whatever follows the text."""
        return Tokens(self._tree, self._path[:-1], len(self._path) - 1)

    def ids(self) -> list[int]:
        """List the token ids, shape (num_tokens,); O(num_tokens), for proofs and engines."""
        whole: TokenIds = array("I")
        for segment in self._path:
            whole += segment.ids
        return whole.tolist()

    def json(self) -> Generator[None, None, bytes]:
        """Write the token ids as JSON numbers, separated by commas; see `SegmentTree.json`."""
        return self._tree.json(self._path)

    def keys(self, contract: HashContract, extra: ExtraKeys = NO_EXTRA) -> Sequence[BlockKey]:
        """List the keys of the full blocks, shape (num_blocks(num_tokens),), as an array("Q").

        Known parts are put together (some 15 µs for 100,000 tokens in a hundred segments), the
        rest is hashed (about 1.3 µs a block) and remembered.
        """
        return self._tree.keys(self._path, contract, extra)

    def hashing(
        self, contract: HashContract, extra: ExtraKeys
    ) -> Generator[Callable[[], Chain] | None, Chain, None]:
        """Hash what is new in steps; see `SegmentTree.hashing`."""
        return self._tree.hashing(self._path, contract, extra)

    def digests(
        self, contract: HashContract, positions: Sequence[int], extra: ExtraKeys = NO_EXTRA
    ) -> list[bytes]:
        """List the full digests of some blocks; `positions` ascend, in [0, number of keys)."""
        return self._tree.digests(self._path, contract, extra, positions)

    def is_of(self, tree: SegmentTree) -> bool:
        """Return whether these tokens are remembered in `tree`."""
        return self._tree is tree


class Prompter:
    """Makes the prompts of one model.

    What is remembered of a prompt makes the next one quicker, by 150 ms where it is long. So that
    no client can find out in this way what others sent, it is remembered for its *owner* alone: any
    text, best a secret one; all prompts without an owner are one owner's.

    Args:
        encoder: The model's tokenizer; None: it cannot be used here.
        renderer: Its chat template; None: it cannot be used here.
        chat_encoder: Makes ids of what the renderer writes; None: `encoder` does.
        asks_engine: Whether an engine's `/tokenize` has the tokens of its chats.
        media: What is known of its images; None: prompts with images are not made here.
        max_inline_items: More messages, parts, calls (see `ChatRequest.num_items`) are rendered
            off the loop.
        reason: Why something is missing, for `NeedsEngine`; "" if nothing is.
        max_bytes: Budget for what is remembered of prompts.
    """

    __slots__ = (
        "_chat_encoder",
        "_encoder",
        "_max_bytes",
        "_prefix",
        "_probes",
        "_reason",
        "_renderer",
        "_roots",
        "_tree",
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
        self._max_bytes = max_bytes
        self._tree = SegmentTree(max_bytes)
        self._prefix = encoder.prefix if encoder is not None else None
        self._roots: dict[str, _Roots] = {}

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
        """Whether the engine's date is part of its chats."""
        return self._renderer is not None and self._renderer.is_dated

    def set_clock(self, today: Callable[[], datetime.date]) -> None:
        """Render with the date that `today` returns: the engine's."""
        if self._renderer is not None:
            self._renderer.today = today

    @property
    def size_bytes(self) -> int:
        """Estimate the memory held for prompts."""
        return self._tree.size_bytes

    def plan_chat(self, request: ChatRequest, owner: str = "") -> EncodePlan:
        """Render a chat request and find what is new in it.

        Raises:
            NeedsEngine: only the engine can make its tokens.
            TemplateFailed: the chat template refuses it; the engine will answer 400.
        """
        return self.plan_rendered(request, self.render_parts(request, owner=owner), owner=owner)

    def plan_rendered(
        self, request: ChatRequest, parts: Sequence[str], *, owner: str = ""
    ) -> EncodePlan:
        """Find what is new in what `render_parts` returned.

        Raises:
            NeedsEngine: the text is no Unicode.
        """
        if self._chat_encoder is None:
            special = request.add_special_tokens
            return self._plan(_bytes(parts), add_special_tokens=special, owner=owner)
        data = _bytes(parts)
        walk = self._tree.walk(self._roots_of(owner).marked, data, self._chat_encoder.cuts(data))
        return EncodePlan(
            num_new_chars=len(data) - walk.new[0].start if walk.new else 0,
            tree=self._tree,
            walk=walk,
            data=data,
            encoder=self._chat_encoder,
            suffix=_NO_IDS,
        )

    def plan_media(
        self,
        request: ChatRequest,
        texts: Sequence[str],
        media: Sequence[KnownMedia],
        *,
        owner: str = "",
    ) -> EncodePlan:
        """Find what is new in a prompt of texts with images or sounds between them.

        Args:
            texts: As `render` wrote them; those behind the first item that is not known left out.
            media: The items, one fewer.

        Raises:
            NeedsEngine: the tokenizer cannot be used here, or the text is no Unicode.
        """
        encoder, roots = self._usable_encoder(), self._roots_of(owner)
        if request.add_special_tokens and (encoder.suffix is None or encoder.suffix):
            raise NeedsEngine("multimodal", "special tokens behind the text")
        try:
            text = MediaText(texts, media)
        except UnicodeEncodeError as exc:
            raise NeedsEngine("surrogate") from exc
        pieces = MediaEncoder(text, encoder)
        root = roots.special if request.add_special_tokens else roots.bare
        walk = self._tree.walk(root, text.data, pieces.cuts(text.data))
        return EncodePlan(
            num_new_chars=len(text.data) - walk.new[0].start if walk.new else 0,
            tree=self._tree,
            walk=walk,
            data=text.data,
            encoder=pieces,
            suffix=_NO_IDS,
        )

    def media_ids(
        self, request: ChatRequest, kind: MediaKind, ids: Sequence[int]
    ) -> TokenIds | None:
        """Find what an engine put in the place of a request's one item; None: not certain.

        Raises: as `plan_chat`.
        """
        shown = self.media.placeholders.get(kind) if self.media is not None else None
        if shown is None:
            return None
        text = self.render(request)
        ours = self._present_encoder().encode_whole(text, add_special_tokens=False)
        return tokens_between(ids, ours, shown.token_id)

    @property
    def writes_text(self) -> bool:
        """Whether what `render` returns is the prompt's text, and not marked."""
        return self._chat_encoder is None

    def plan_completion(
        self, request: CompletionRequest, index: int = 0, *, owner: str = ""
    ) -> EncodePlan:
        """Find what is new in one prompt of a completion request (of a batch, the first).

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
        """Find what is new in a text.

        Raises:
            NeedsEngine: the tokenizer cannot be used here, or the text is no Unicode.
        """
        return self._plan(_bytes([text]), add_special_tokens=add_special_tokens, owner=owner)

    def _plan(self, data: bytes, *, add_special_tokens: bool, owner: str) -> EncodePlan:
        encoder = self._usable_encoder()
        roots = self._roots_of(owner)
        root, suffix, is_whole = roots.bare, _NO_IDS, False
        if add_special_tokens:
            root = roots.special
            is_whole = encoder.suffix is None
            suffix = encoder.suffix or _NO_IDS
        cuts = IdCuts(0) if is_whole else encoder.cuts(data)
        walk = self._tree.walk(root, data, cuts)
        return EncodePlan(
            num_new_chars=len(data) - walk.new[0].start if walk.new else 0,
            tree=self._tree,
            walk=walk,
            data=data,
            encoder=encoder,
            suffix=suffix,
            is_whole=is_whole,
        )

    def plan_ids(self, ids: Sequence[int], owner: str = "") -> EncodePlan:
        """Find what is new in token ids: a prompt sent as such, or an engine's own answer.

        Raises:
            ValueError, TypeError, OverflowError: these are no token ids.
        """
        data = (ids if isinstance(ids, array) else array("I", ids)).tobytes()
        walk = self._tree.walk(self._roots_of(owner).ids, data, IdCuts(len(data)))
        return EncodePlan(
            num_new_chars=0,
            tree=self._tree,
            walk=walk,
            data=data,
            encoder=None,
            suffix=_NO_IDS,
        )

    def commit(self, plan: EncodePlan, encoded: Sequence[TokenIds]) -> Tokens:
        """Remember what `plan.encode()` returned, and return the prompt's tokens."""
        path = plan.tree.commit(plan.walk, encoded)
        return Tokens(plan.tree, path, len(plan.walk.path))

    def prove(self, request: ChatRequest | CompletionRequest, tokens: Tokens) -> bool:
        """Encode a prompt whole by `tokenizers` and compare; off the loop (some 150 ms).

        For a sample. The verdict is for `observe_proof`, on the loop. Prompts of ids prove
        nothing: True.

        Raises: as `plan_chat` and `plan_completion`, but not where the tokenizer is suspect: it may
        not be any more after this.
        """
        if isinstance(request, ChatRequest):
            ids = tokens.ids()
            if self.chat_ids(request) == ids:
                return True
            return self.is_dated and self._yesterday().chat_ids(request) == ids
        text = request.prompts[0]
        if not isinstance(text, str):
            return True
        return self.text_ids(text, request.add_special_tokens) == tokens.ids()

    def chat_ids(self, request: ChatRequest) -> list[int]:
        """Make a chat's ids by `tokenizers`, without the shortcuts; raises as `prove`."""
        text = self._rendered(request, by_the_book=True)
        encoder: ChatEncoder = self._chat_encoder or self._present_encoder()
        return encoder.encode_whole(text, add_special_tokens=request.add_special_tokens).tolist()

    def _yesterday(self) -> Prompter:
        """Return a prompter of the day before: a prompt may be proven after midnight."""
        other, renderer = copy.copy(self), copy.copy(self._renderer)
        if renderer is not None:
            today = renderer.today
            renderer.today = lambda: today() - datetime.timedelta(days=1)
        other._renderer = renderer
        return other

    def text_ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Make a text's ids by `tokenizers`, without the shortcuts; raises as `prove`."""
        encoder = self._present_encoder()
        return encoder.encode_whole(text, add_special_tokens=add_special_tokens).tolist()

    def shown(self, ids: Sequence[int], text: str) -> list[str]:
        """Write the tokens of a text so that they can be read: as text, else as numbers."""
        try:
            texts = self._present_encoder().texts_of(ids)
        except BaseException as exc:  # ids of another vocabulary
            if not is_failure(exc):
                raise
            texts = []
        return texts if "".join(texts) == text else [str(each) for each in ids]

    def guesses(self, request: ChatRequest, model: str) -> Iterator[tuple[str, list[int]]]:
        """Yield what a chat's ids would be with other settings, and how to set them."""
        if not isinstance(self._renderer, ChatRenderer):
            return
        request = self.adapted(request)
        seen = {self._renderer.render(request, apart=True)}
        for setting, renderer, arguments in guesses(self._renderer, model):
            tried = replace(request, chat_template_kwargs=arguments)
            try:
                text = renderer.render(tried, apart=True)
            except (NeedsEngine, TemplateFailed):
                continue
            if text not in seen:
                seen.add(text)
                encoder = self._present_encoder()
                yield setting, encoder.encode_whole(text, add_special_tokens=False).tolist()

    def observe_proof(
        self, tokens: Tokens, *, is_chat: bool, is_same: bool, now_s: float
    ) -> Verdict:
        """Note what `prove` returned, and draw the consequence; on the loop.

        Where fastokens encoded, it is suspected first: it is given up, with all that is remembered,
        and the model goes on with `tokenizers`. Only where that gives other ids, too, the engine
        tokenizes.
        """
        if not tokens.is_of(self._tree):
            return "outdated"
        may_be_fast = self._chat_encoder is None or not is_chat
        if not is_same and may_be_fast and self.give_up_fast():
            return "fast"
        return "same" if self.trust.observe_proof(is_same, now_s=now_s) else "pieces"

    @property
    def is_fast(self) -> bool:
        """Return whether fastokens encodes."""
        return self._encoder is not None and self._encoder.is_fast

    def quicken(self) -> str | None:
        """See `TextEncoder.quicken`."""
        return self._encoder.quicken() if self._encoder is not None else self._reason

    def failure(self) -> str | None:
        """Return why fastokens broke down, the first time that it is asked for; else None."""
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
        self._tree = SegmentTree(self._max_bytes)  # plans in flight end in the old one
        self._roots.clear()
        self.trust.start_anew()
        return True

    def _roots_of(self, owner: str) -> _Roots:
        """Find where an owner's prompts begin; never part of the tree's budget, so bounded."""
        roots = self._roots.get(owner)
        if roots is None:
            if len(self._roots) >= _MAX_OWNERS:
                self._roots.clear()  # their keys are digests: new ones lead to the same
            root, suffix = self._tree.make_root, f"\0{owner}" if owner else ""
            roots = self._roots[owner] = _Roots(
                root(f"ids{suffix}"),
                root(f"text{suffix}"),
                root(f"text with special tokens{suffix}", self._prefix),
                root(f"marked text{suffix}"),
            )
        return roots

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
        if self._renderer is None:
            raise NeedsEngine("model", self._reason)
        return self._renderer.render_parts(self.adapted(request), apart=apart, owner=owner)

    def _rendered(
        self,
        request: ChatRequest,
        *,
        owner: str = "",
        by_the_book: bool = False,
        apart: bool = False,
    ) -> str:
        if self._renderer is None:
            raise NeedsEngine("model", self._reason)
        request = self.adapted(request)
        return self._renderer.render(request, by_the_book=by_the_book, apart=apart, owner=owner)

    def adapted(self, request: ChatRequest) -> ChatRequest:
        """See `TemplateProbes.adapted`; a request that depends on no template stays as it is.

        Raises:
            NeedsEngine: it does depend on it, and the template is not known here.
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

    def map_efforts(self, efforts: Mapping[str, str]) -> None:
        """Replace reasoning efforts as the engine's `--reasoning-effort-map` does."""
        if self._probes is not None:
            self._probes.efforts = efforts

    def set_content_format(self, content_format: ContentFormat) -> None:
        """See `ChatRenderer.use_format`; nothing else has a choice."""
        if isinstance(self._renderer, ChatRenderer):
            self._renderer.use_format(content_format)

    def set_defaults(self, arguments: Json | None) -> None:
        """Give the template what the engine's `--default-chat-template-kwargs` gives it."""
        if self._probes is not None:
            self._probes.defaults = arguments or None

    def _usable_encoder(self) -> PlainEncoder:
        if self.trust.reason is not None:
            raise NeedsEngine("distrusted", self.trust.reason)
        return self._present_encoder()

    def _present_encoder(self) -> PlainEncoder:
        if self._encoder is None:
            raise NeedsEngine("model", self._reason)
        return self._encoder


def _bytes(parts: Sequence[str]) -> bytes:
    if all(map(str.isascii, parts)):  # half of the time; a wide character would widen it all
        return "".join(parts).encode()
    try:
        return b"".join([part.encode() for part in parts])
    except UnicodeEncodeError as exc:
        raise NeedsEngine("surrogate") from exc
