"""Make token ids by Mistral's own tokenizers, of marked text (see `marked_text`) and plain text.

A text is encoded in one call, as the engine does. Prompts are cut at special tokens only, which no
text contains. Source: vLLM 0.32.0, tokenizers/mistral.py (encode, max_chars_per_token);
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
from router.tokens.cuts import IdCuts
from router.tokens.encoders import MarkedEncoder, PlainEncoder
from router.tokens.incremental import NewSegment
from router.tokens.marked_text import split
from router.tokens.needs_engine import NeedsEngine
from router.tokens.panics import is_failure

_MAX_FILE_BYTES: Final = 256 << 20  # tekken.json has 20 MB


def load_tokenizer(model: str, *, local_files_only: bool = False) -> MistralTokenizer:
    """Load a model's tokenizer; blocking, for a second.

    Raises:
        NeedsEngine: it is missing, or cannot be used here.
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


class MistralTextEncoder(PlainEncoder):
    """Encodes texts whole. No text contains special tokens."""

    __slots__ = ("_tokenizer",)

    def __init__(self, tokenizer: MistralTokenizer) -> None:
        self._tokenizer: Any = tokenizer.instruct_tokenizer.tokenizer
        longest = max(map(len, self._tokenizer.vocab()), default=1)
        super().__init__(longest, array("I", [self._tokenizer.bos_id]), array("I"))

    def cuts(self, data: bytes) -> IdCuts:
        return IdCuts(0)

    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        return [self.encode_text(data[segment.start : segment.end].decode()) for segment in new]

    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        ids = self.encode_text(text)
        return array("I", [self._tokenizer.bos_id]) + ids if add_special_tokens else ids

    def encode_text(self, text: str) -> TokenIds:
        """Encode a text without special tokens; raises as `ChatEncoder.encode`."""
        try:
            return array("I", self._tokenizer.encode(text, bos=False, eos=False))
        except BaseException as exc:  # its expressions have a limit, and one may panic
            raise _failure(exc, "encoder") from exc

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        return [str(self._tokenizer.decode([each])) for each in ids]


class MistralEncoder(MarkedEncoder):
    """Encodes marked text."""

    __slots__ = ("_texts",)

    def __init__(self, texts: MistralTextEncoder) -> None:
        self._texts = texts

    def encode_marked(self, text: str) -> TokenIds:
        ids: TokenIds = array("I")
        for special, texts in split(text):
            ids.extend(map(int, special.split(",")))
            for each in texts:
                ids += self._texts.encode_text(each)
        return ids


def _failure(exc: BaseException, reason: str) -> BaseException:
    """Return the error to raise: an interrupt stays one."""
    if not is_failure(exc):
        return exc
    return NeedsEngine(reason, f"Mistral's tokenizer: {type(exc).__name__}")
