"""The same ids, sooner: fastokens, for the byte-pair tokenizers that it knows.

vLLM itself can run on it (VLLM_USE_FASTOKENS: vllm/tokenizers/fastokens.py at 0.32.0). It is not
believed: what loads is proven first (`proof`), and samples are encoded again by `tokenizers` while
it serves (`request.audit`).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from router.api.openai import TokenIds
from router.tokens.panics import is_failure

if TYPE_CHECKING:
    from fastokens import Tokenizer


class FastEncoderFailed(Exception):
    """fastokens cannot do it; the message says what kind of failure, and quotes no text."""


class FastEncoder:
    """One tokenizer in fastokens; thread-safe, and without the GIL while it works.

    Args:
        description: The tokenizer's `tokenizer.json`, without truncation and padding.

    Takes seconds for a large vocabulary, and 50 to 250 MB.

    Raises:
        FastEncoderFailed: it is not installed, or does not know this kind of tokenizer.
    """

    __slots__ = ("_tokenizer",)

    def __init__(self, description: str) -> None:
        # Its threads would spin for more work while the loop's core is wanted.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        try:
            from fastokens import Tokenizer

            self._tokenizer: Tokenizer = Tokenizer.from_json_str(description)
        except ImportError as exc:  # no wheel for this machine
            raise FastEncoderFailed("fastokens is not installed") from exc
        except BaseException as exc:
            raise _failure(exc, f"fastokens: {exc}") from exc

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """Encode texts without the tokens that are put around one.

        Raises:
            FastEncoderFailed: it gives up on one of them.
        """
        try:
            data, offsets = self._tokenizer.encode_batch_flat(list(texts))
        except BaseException as exc:
            raise _failure(exc, type(exc).__name__) from exc
        ids = array("I", data)
        return [ids[start:end] for start, end in pairwise(array("Q", offsets))]


def _failure(exc: BaseException, reason: str) -> BaseException:
    """Return what to raise: an interrupt is no failure."""
    return FastEncoderFailed(reason) if is_failure(exc) else exc
