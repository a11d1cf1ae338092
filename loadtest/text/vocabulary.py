"""Words whose tokens do not depend on their neighbours.

A word here is a space and some letters. A usable word is one token behind any other word. It is
also one token without its space, because templates may strip the beginning of a message. Tokenizers
that split words at spaces have such words: byte-level BPE, WordPiece and SentencePiece. If tokens
reach across words, words that may become a part of one are left out. All of this is tested on the
given tokenizer, never assumed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Final

from msgspec import Struct
from tokenizers import Tokenizer

from loadtest.text.errors import UnstableTokenizer

MIN_WORDS: Final = 64
MAX_WORDS: Final = 4096
_LETTERS: Final = re.compile(r"[Ġ▁]?([a-z]{2,14})")  # behind the space's sign in BPE, SentencePiece
_ACROSS: Final = re.compile(r"((?:[Ġ▁])?[a-z]+)([Ġ▁])")  # the end of a word, then a space
_RUN: Final = 32  # words tried together
_NUM_ROUNDS: Final = 6  # in which every word gets new neighbours


class Vocabulary(Struct, frozen=True):
    """Tokens to make prompts of; `words[k]` is the text of `token_ids[k]`, None: there is none.

    A text begins without the space of its first word where `is_bare`: the tokenizer puts one
    there itself.
    """

    token_ids: tuple[int, ...]
    words: tuple[str, ...] | None = None
    is_bare: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)


def of_range(low: int, high: int) -> Vocabulary:
    """Return tokens in [low, high) for prompts of ids, where the tokenizer is not at hand.

    Keep clear of special tokens, which most models have at the ends of their vocabulary.
    """
    return Vocabulary(tuple(range(low, high)))


def of_tokenizer(tokenizer: Tokenizer) -> Vocabulary:
    """Find words that tokenize to the same single token wherever they stand.

    Raises:
        UnstableTokenizer: There are fewer than `MIN_WORDS`; use prompts of token ids instead.
    """
    num_most = 0
    for is_bare in (False, True):
        words = _Words(tokenizer, is_bare).stable()
        if len(words) >= MIN_WORDS:
            return Vocabulary(tuple(words.values()), tuple(words), is_bare)
        num_most = max(num_most, len(words))
    raise UnstableTokenizer(
        f"this tokenizer has {num_most} words that are the same single token wherever they "
        f"stand; {MIN_WORDS} are needed to write text with exact repeats. Send token ids instead "
        "(/v1/completions with a list)"
    )


class _Words:
    """Finds stable words, with texts that begin with a space or, `is_bare`, without."""

    __slots__ = ("_is_bare", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, is_bare: bool) -> None:
        self._tokenizer = tokenizer
        self._is_bare = is_bare

    def stable(self) -> dict[str, int]:
        """Map words to their tokens; none if some do not stand a last trial."""
        words = self._candidates()
        dice = random.Random(0)
        for _ in range(_NUM_ROUNDS):
            dropped = set(self._unstable(words, dice))
            words = {word: token for word, token in words.items() if word not in dropped}
        return {} if any(self._unstable(words, dice)) else words

    def _candidates(self) -> dict[str, int]:
        """List words that are one token alone, behind the space and without it."""
        letters = sorted(
            {
                found[1]
                for token in self._tokenizer.get_vocab(with_added_tokens=False)
                if (found := _LETTERS.fullmatch(token))
            }
        )
        spaced = self._encode([f" {word}" for word in letters])
        bare = self._tokenizer.encode_batch(letters, add_special_tokens=False)
        endings = self._endings()
        words = {
            f" {word}": tokens[0]
            for word, tokens, without in zip(letters, spaced, bare, strict=True)
            if len(tokens) == len(without.ids) == 1 and not f" {word}".endswith(endings)
        }
        kept = random.Random(0).sample(sorted(words), min(len(words), MAX_WORDS))
        return {word: words[word] for word in sorted(kept)}

    def _endings(self) -> tuple[str, ...]:
        """List what words end with that tokens join to the beginnings of others."""
        across = [
            (found[1].replace(found[2], " "), token)
            for token in self._tokenizer.get_vocab(with_added_tokens=False)
            if (found := _ACROSS.match(token))
        ]
        texts = [token.replace("▁", " ").replace("Ġ", " ") for _, token in across]
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        if not any(_ACROSS.match(token) for one in encoded for token in one.tokens):
            return ()  # words are parted first: such tokens never come about
        return tuple({ending for ending, _ in across})

    def _unstable(self, words: dict[str, int], dice: random.Random) -> Iterator[str]:
        """Try every word between two others; name those whose tokens changed."""
        order = list(words)
        dice.shuffle(order)
        runs = [order[start : start + _RUN] for start in range(0, len(order), _RUN)]
        for run, tokens in zip(runs, self._encode(map("".join, runs)), strict=True):
            if tokens == [words[word] for word in run]:
                continue
            pairs = list(pairwise(run))
            guilty = [
                pair
                for pair, both in zip(pairs, self._encode(map("".join, pairs)), strict=True)
                if both != [words[pair[0]], words[pair[1]]]
            ]
            yield from chain.from_iterable(guilty) if guilty else run

    def _encode(self, texts: Iterable[str]) -> list[list[int]]:
        begin = 1 if self._is_bare else 0
        encoded = self._tokenizer.encode_batch(
            [text[begin:] for text in texts], add_special_tokens=False
        )
        return [one.ids for one in encoded]
