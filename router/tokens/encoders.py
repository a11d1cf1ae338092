"""What makes token ids of what a renderer writes, and of plain text.

of                         kept in
a text                     encoder.py (tokenizers, fastokens), mistral_encoder.py
marked text                harmony_encoder.py, mistral_encoder.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.api.openai import TokenIds
from router.tokens.incremental import Boundaries, NewSegment


class ChatEncoder(Protocol):
    """Makes token ids of what a renderer writes."""

    def cuts(self, data: bytes) -> Boundaries:
        """Find the boundaries of a prompt."""
        ...

    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        """Encode segments of a prompt; pure and thread-safe."""
        ...

    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Encode a prompt at once, as the engine does."""
        ...


class PlainEncoder(ChatEncoder, Protocol):
    """Makes token ids of text; `TextEncoder` says what each member is."""

    failure: str | None
    max_chars_per_token: int
    prefix: TokenIds | None
    suffix: TokenIds | None

    @property
    def is_fast(self) -> bool: ...

    def token_apart(self, token_id: int) -> str | None: ...

    def texts_of(self, ids: Sequence[int]) -> list[str]: ...

    def quicken(self) -> str | None: ...

    def slow_down(self) -> bool: ...
