"""Prompts in which tokens repeat exactly where hash ids do.

Every id stands for `block_size` tokens drawn by a hash of the salt and the id. They are the same at
every place and in every process. Two prompts therefore have equal tokens as far as their ids are
equal, and an engine's own block hashes repeat as far. A partial last block is the beginning of its
id's tokens.

Another salt gives tokens that no cache has seen, for the same workload. Each variant of a
comparison needs its own salt to start cold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from hashlib import shake_128
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from loadtest.text.vocabulary import Vocabulary
from loadtest.workload import Turn

_MIN_BITS: Final = 40
"""The fewest random bits of a block. With 40 bits, two of a million ids behind one prefix are equal
with a chance of one half; there are never so many."""


class Prompts:
    """Makes prompts of one workload, as token ids or as text, which say the same.

    Blocks are remembered, the most recently used `max_tokens` tokens of each form.
    """

    __slots__ = (
        "_block_ids",
        "_block_text",
        "_is_bare",
        "_salt",
        "_token_ids",
        "_words",
        "block_size",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        block_size: int,
        *,
        salt: str = "",
        max_tokens: int = 8_000_000,
    ) -> None:
        """Draw from a vocabulary.

        Raises:
            ValueError: Blocks are so small that different ids would often say the same.
        """
        bits = block_size * math.log2(max(1, len(vocabulary)))
        if bits < _MIN_BITS:
            raise ValueError(
                f"blocks of {block_size} tokens out of {len(vocabulary)} are too similar; "
                f"{_MIN_BITS} bits are needed, these have {bits:.0f}"
            )
        self.block_size = block_size
        self._salt = salt
        self._token_ids = np.array(vocabulary.token_ids, dtype=np.int64)
        self._words = vocabulary.words
        self._is_bare = vocabulary.is_bare
        num_blocks = max(1, max_tokens // block_size)
        self._block_ids = lru_cache(num_blocks)(self._make_ids)
        self._block_text = lru_cache(num_blocks)(self._make_text)

    def token_ids(self, turn: Turn) -> list[int]:
        """Make a prompt of token ids, `num_input_tokens` of them, for `/v1/completions`."""
        full, last = self._split(turn)
        tokens = list(chain.from_iterable(map(self._block_ids, full)))
        if last is not None:
            tokens += self._make_ids(*last)
        return tokens

    def text(self, turn: Turn) -> str:
        """Make a prompt of text that the vocabulary's tokenizer turns into `token_ids`.

        In a chat the template's own tokens come around it; what is in front of it is the same in
        every prompt, so repeats stay repeats.

        Raises:
            ValueError: The vocabulary has no words.
        """
        full, last = self._split(turn)
        parts = list(map(self._block_text, full))
        if last is not None:
            parts.append(self._make_text(*last))
        text = "".join(parts)
        return text[1:] if self._is_bare else text

    def _split(self, turn: Turn) -> tuple[Sequence[int], tuple[int, int] | None]:
        """Part a prompt into full blocks, and id and size of a partial last one."""
        num_full, num_left = divmod(turn.num_input_tokens, self.block_size)
        last = (turn.hash_ids[num_full], num_left) if num_left else None
        return turn.hash_ids[:num_full], last

    def _make_ids(self, hash_id: int, num_tokens: int | None = None) -> list[int]:
        tokens: list[int] = self._token_ids[self._draw(hash_id)[:num_tokens]].tolist()
        return tokens

    def _make_text(self, hash_id: int, num_tokens: int | None = None) -> str:
        if self._words is None:
            raise ValueError("these tokens have no text: take the vocabulary of a tokenizer")
        words = self._words
        return "".join([words[index] for index in self._draw(hash_id)[:num_tokens].tolist()])

    def _draw(self, hash_id: int) -> npt.NDArray[np.int64]:
        """Draw a block's words, as indices; the same on every machine."""
        raw = shake_128(f"{self._salt}\0{hash_id}".encode()).digest(4 * self.block_size)
        return np.frombuffer(raw, dtype="<u4").astype(np.int64) % len(self._token_ids)


def salted(messages: Sequence[dict[str, Any]], salt: str) -> list[dict[str, Any]]:
    """Add a salt in front of recorded messages, so that no cache has seen them.

    The first text says it: what comes before it (a template's opening) is shared still.
    """
    if not salt or not messages:
        return list(messages)
    first = messages[0]
    content = first.get("content")
    if isinstance(content, list):
        salted_content: Any = [{"type": "text", "text": f"[{salt}]"}, *content]
    else:
        salted_content = f"[{salt}] {content or ''}"
    return [{**first, "content": salted_content}, *messages[1:]]
