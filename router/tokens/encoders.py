"""Make token ids of what a renderer writes, and of plain text.

| of          | by                                                       |
|-------------|----------------------------------------------------------|
| text        | `encoder.TextEncoder` (tokenizers, fastokens), `models`  |
| marked text | `models`                                                 |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Protocol

from router.api.openai import TokenIds
from router.tokens.boundaries import Needle, TextCuts
from router.tokens.incremental import NewSegment, PromptBoundaries
from router.tokens.marked_text import MARK
from router.tokens.needs_engine import NeedsEngine

_NEEDLES = (Needle(MARK, MARK.encode(), 0, MARK.encode()),)


class ChatEncoder(Protocol):
    """Makes token ids of what a renderer writes."""

    def cuts(self, data: bytes) -> PromptBoundaries:
        """Find the boundaries of a prompt."""
        ...

    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        """Encode segments of a prompt; pure and thread-safe.

        Raises:
            NeedsEngine: the library fails on it, as the engine's will.
        """
        ...

    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Encode a prompt at once, as the engine does."""
        ...


class MarkedEncoder(ABC):
    """Makes token ids of marked text. A prompt may be cut in front of each mark."""

    __slots__ = ()

    def cuts(self, data: bytes) -> TextCuts:
        """Find the boundaries of a prompt."""
        return TextCuts(data, _NEEDLES)

    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        """Encode as `ChatEncoder.encode` does."""
        return [self.encode_marked(data[segment.start : segment.end].decode()) for segment in new]

    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Encode as `ChatEncoder.encode_whole` does."""
        return self.encode_marked(text)

    @abstractmethod
    def encode_marked(self, text: str) -> TokenIds:
        """Encode marked text; raises as `ChatEncoder.encode`."""


class PlainEncoder(ABC):
    """Makes token ids of text; by default not by fastokens.

    max_chars_per_token: Of the longest token in the vocabulary, as vLLM counts it. None: the
        vocabulary is not known here.
    prefix, suffix: Tokens that `add_special_tokens` puts around a text. None: it does more than
        that, and such texts are not cut.
    failure: Why fastokens was given up while it worked. None: it was not, or that was reported.
    """

    __slots__ = ("failure", "max_chars_per_token", "prefix", "suffix")

    def __init__(
        self, max_chars_per_token: int | None, prefix: TokenIds | None, suffix: TokenIds | None
    ) -> None:
        self.max_chars_per_token = max_chars_per_token
        self.prefix = prefix
        self.suffix = suffix
        self.failure: str | None = None

    @abstractmethod
    def cuts(self, data: bytes) -> PromptBoundaries:
        """Find the boundaries of a text."""

    @abstractmethod
    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        """Encode as `ChatEncoder.encode`. `suffix` goes behind the last of `new`, the tail."""

    @abstractmethod
    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Encode as `ChatEncoder.encode_whole` does."""

    @abstractmethod
    def texts_of(self, ids: Sequence[int]) -> list[str]:
        """Decode each token by itself. A token that is no whole character is not readable."""

    def token_apart(self, token_id: int) -> str | None:
        """Return an added token's text if the text around it can be encoded without it."""
        return None

    @property
    def is_fast(self) -> bool:
        """Return whether segments are encoded by fastokens."""
        return False

    def quicken(self) -> str | None:
        """Load fastokens and prove it; blocking, up to seconds: off the loop.

        Returns why it is not used; None: it is, from now on.
        """
        return "the model has a tokenizer of its own"

    def slow_down(self) -> bool:
        """Encode without fastokens from now on; return whether it was in use."""
        return False


class NoEncoder(PlainEncoder):
    """Stands for a tokenizer that cannot be used here: the engine has to encode.

    Args:
        reason: Why.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str = "") -> None:
        super().__init__(None, None, array("I"))
        self.reason = reason

    def cuts(self, data: bytes) -> PromptBoundaries:
        raise NeedsEngine("model", self.reason)

    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        raise NeedsEngine("model", self.reason)

    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        raise NeedsEngine("model", self.reason)

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        raise NeedsEngine("model", self.reason)

    def quicken(self) -> str | None:
        return self.reason
