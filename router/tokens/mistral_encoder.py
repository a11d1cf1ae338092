"""Token ids by Mistral's own tokenizers: of marked text (see `marked_text`), and of plain text.

A text is encoded in one call, as the engine does: it is cut nowhere but at special tokens, which
no text holds. Source: vLLM 0.32.0, tokenizers/mistral.py (encode, max_chars_per_token);
mistral-common 1.13, tokens/tokenizers/tekken.py, sentencepiece.py.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.utils import (
    download_tokenizer_from_hf_hub,
    get_one_valid_tokenizer_file,
)

from router.api.openai import TokenIds
from router.tokens.boundaries import Needle
from router.tokens.encoder import IdCuts, TextCuts
from router.tokens.incremental import NewSegment
from router.tokens.marked_text import MARK, split
from router.tokens.needs_engine import NeedsEngine
from router.tokens.panics import is_failure

_NEEDLES = (Needle(MARK, MARK.encode(), 0, MARK.encode()),)
_MAX_FILE_BYTES: Final = 256 << 20  # tekken.json has 20 MB


def load_tokenizer(model: str, *, local_files_only: bool = False) -> MistralTokenizer:
    """Load a model's tokenizer; blocking, for a second.

    Raises:
        NeedsEngine: it has none, or one that cannot be used here.
    """
    try:
        if Path(model).is_dir():
            path = Path(model, get_one_valid_tokenizer_file(os.listdir(model)))
        else:
            path = Path(download_tokenizer_from_hf_hub(model, local_files_only=local_files_only))
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise NeedsEngine("model", f"{path.name} is too large")
        return MistralTokenizer.from_file(path)
    except NeedsEngine:
        raise
    except BaseException as exc:  # whatever a broken file makes a library raise
        raise _failure(exc, "model") from exc


class MistralTextEncoder:
    """Encodes texts as `TextEncoder` does, whole, and never by fastokens."""

    __slots__ = ("_tokenizer", "failure", "max_chars_per_token", "prefix", "suffix")

    is_fast: Final = False

    def __init__(self, tokenizer: MistralTokenizer) -> None:
        self._tokenizer: Any = tokenizer.instruct_tokenizer.tokenizer
        self.failure: str | None = None
        self.max_chars_per_token = max(map(len, self._tokenizer.vocab()), default=1)
        self.prefix: TokenIds | None = array("I", [self._tokenizer.bos_id])
        self.suffix: TokenIds | None = array("I")

    def token_apart(self, token_id: int) -> str | None:
        """See `TextEncoder.token_apart`; no text has special tokens in it."""
        return None

    def cuts(self, data: bytes) -> IdCuts:
        """Find the boundaries of a text: there are none."""
        return IdCuts(0)

    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        """Encode segments of a text; thread-safe, without the GIL for most of the time.

        Raises:
            NeedsEngine: the tokenizer gives up on it, as the engine's will.
        """
        return [self.encode_text(data[segment.start : segment.end].decode()) for segment in new]

    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Encode a text at once, as the engine does; raises as `encode`."""
        ids = self.encode_text(text)
        return array("I", [self._tokenizer.bos_id]) + ids if add_special_tokens else ids

    def encode_text(self, text: str) -> TokenIds:
        """Encode a text without special tokens; raises as `encode`."""
        try:
            return array("I", self._tokenizer.encode(text, bos=False, eos=False))
        except BaseException as exc:  # its expressions have a limit, and one may panic
            raise _failure(exc, "encoder") from exc

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        """See `TextEncoder.texts_of`."""
        return [str(self._tokenizer.decode([each])) for each in ids]

    def quicken(self) -> str | None:
        """See `TextEncoder.quicken`."""
        return "Mistral's own tokenizer"

    def slow_down(self) -> bool:
        """See `TextEncoder.slow_down`."""
        return False


class MistralEncoder:
    """Encodes marked text. A prompt may be cut wherever special tokens begin."""

    __slots__ = ("_texts",)

    def __init__(self, texts: MistralTextEncoder) -> None:
        self._texts = texts

    def cuts(self, data: bytes) -> TextCuts:
        """Find the boundaries of a prompt."""
        return TextCuts(data, _NEEDLES)

    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        """Encode segments of a prompt; as `MistralTextEncoder.encode`."""
        return [self._encode(data[segment.start : segment.end].decode()) for segment in new]

    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Encode a prompt at once."""
        return self._encode(text)

    def _encode(self, marked: str) -> TokenIds:
        ids: TokenIds = array("I")
        for special, texts in split(marked):
            ids.extend(special)
            for text in texts:
                ids += self._texts.encode_text(text)
        return ids


def _failure(exc: BaseException, reason: str) -> BaseException:
    """Return what to raise: an interrupt is no failure."""
    if not is_failure(exc):
        return exc
    return NeedsEngine(reason, f"Mistral's tokenizer: {type(exc).__name__}")
