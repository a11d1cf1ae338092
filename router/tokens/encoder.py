"""Make token ids of what a renderer writes, and of plain text.

A renderer writes a chat's prompt as parts: all are text, or all are framed.

| part     | by                                                                               |
|----------|----------------------------------------------------------------------------------|
| `str`    | `TextEncoder`: fastokens if it is proven, else `tokenizers`                      |
| `Framed` | `FramedEncoder`, in `models`: a header's tokens, and texts encoded one by one    |

fastokens makes the same ids faster, for the byte-pair tokenizers that it knows. vLLM itself can use
it (VLLM_USE_FASTOKENS: vllm/tokenizers/fastokens.py at 0.32.0). Each tokenizer is proven first, on
texts that encoders get wrong. They are the same in each run for a tokenizer:

- characters of every class that pre-tokenizers distinguish, at the ends of their runs
- characters that normalizers change
- added tokens: whole, broken and overlapping
- words of the vocabulary: alone, behind a space and joined at random
- long runs

While fastokens serves, samples are encoded again by `tokenizers` (`request.audit`).
"""

from __future__ import annotations

import json
import os
import random
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, cast

import msgspec
from tokenizers import Tokenizer

from router.api.openai import TokenIds
from router.tokens.boundaries import MIN_SEGMENT_BYTES, Boundaries, TextCuts, find_boundaries
from router.tokens.needs_engine import NeedsEngine, is_failure
from router.tokens.prompt_tree import Boundary, NewSegment, PromptBoundaries

pack = msgspec.msgpack.Encoder().encode


class Framed:
    """Texts behind a header that no text can imitate; each is encoded on its own.

    Args:
        header: Special token ids, or what the family's encoder makes tokens of; msgspec writes it.
        texts: The texts.

    packed: The whole as bytes. No packed part is the beginning of another.
    """

    __slots__ = ("header", "packed", "texts")

    def __init__(self, header: Any, texts: Sequence[str] = ()) -> None:
        self.header = header
        self.texts = texts
        self.packed = pack((header, texts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Framed) and self.packed == other.packed

    def __len__(self) -> int:
        """Return the size in bytes."""
        return len(self.packed)


Part = str | Framed


def text_of(parts: Sequence[Part]) -> str:
    """Join parts that are text."""
    return "".join(cast("Sequence[str]", parts))


class FramedEncoder(ABC):
    """Makes token ids of framed parts."""

    __slots__ = ()

    @abstractmethod
    def encode(self, parts: Sequence[Framed]) -> TokenIds:
        """Encode some parts; pure and thread-safe.

        Raises:
            NeedsEngine: the library fails on it, as the engine's will.
        """

    def encode_whole(self, parts: Sequence[Framed]) -> TokenIds:
        """Encode a prompt at once, as the engine does."""
        return self.encode(parts)


class FramedPrompt:
    """A prompt's bytes, which may be cut behind each part.

    Args:
        parts: As a renderer wrote them.
        encoder: Makes their ids.
    """

    __slots__ = ("_encoder", "_ends", "_parts", "data")

    def __init__(self, parts: Sequence[Part], encoder: FramedEncoder) -> None:
        self._parts = cast("Sequence[Framed]", parts)
        self.data = b"".join([part.packed for part in self._parts])
        self._encoder = encoder
        self._ends = [0, *accumulate(map(len, parts))]

    def after(self, position: int) -> Boundary | None:
        """Find the next boundary, as `PromptBoundaries.after` does."""
        index = bisect_left(self._ends, position + MIN_SEGMENT_BYTES)
        return Boundary(self._ends[index], b"") if index < len(self._ends) else None

    def encode(self, data: bytes, new: Sequence[NewSegment]) -> list[TokenIds]:
        """Encode segments; pure and thread-safe; raises as `FramedEncoder.encode`."""
        at, parts = partial(bisect_left, self._ends), self._parts
        return [self._encoder.encode(parts[at(each.start) : at(each.end)]) for each in new]


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
        """Encode segments of a text; pure and thread-safe.

        Args:
            suffix: Goes behind the last of `new`, the tail.

        Raises:
            NeedsEngine: the library fails on it, as the engine's will.
        """

    @abstractmethod
    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Encode a text at once, as the engine does."""

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


class FastEncoderFailed(Exception):
    """fastokens failed; the message says how, and quotes no text."""


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
        # Its idle threads would keep the loop's core busy.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        try:
            from fastokens import Tokenizer

            self._tokenizer: Tokenizer = Tokenizer.from_json_str(description)
        except ImportError as exc:  # no wheel for this machine
            raise FastEncoderFailed("fastokens is not installed") from exc
        except BaseException as exc:
            raise _failure(exc, f"fastokens: {exc}") from exc

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """Encode texts without special tokens around them.

        Raises:
            FastEncoderFailed: it fails on one of them.
        """
        try:
            data, offsets = self._tokenizer.encode_batch_flat(list(texts))
        except BaseException as exc:
            raise _failure(exc, type(exc).__name__) from exc
        ids = array("I", data)
        return [ids[start:end] for start, end in pairwise(array("Q", offsets))]


def _failure(exc: BaseException, reason: str) -> BaseException:
    """Return the error to raise: an interrupt stays one."""
    return FastEncoderFailed(reason) if is_failure(exc) else exc


_NUM_MIXED = 1_500
_NUM_WORDS = 600  # of the vocabulary, spread over it
_MAX_ADDED = 300
_BATCH = 200  # to free the memory of one large encode would block the interpreter

_HARD = (
    *("", " ", "  ", "   ", "\t", "\n", "\r", "\r\n", "\n\n", " \n", "\n ", "\t\n \n", "\x0b\x0c"),
    *("\u00a0", "\u2003\u2003x", "\u3000中", "\u2028\u2029", "\x85", "\ufeff", "\u200b", "\u180e"),
    *("a  b", "a   b ", "  a", "a \n b", "a\n\n\nb\n", " \r\n\r\n a", "x \t y", "\n\t\tif x:\n"),
    *("I'll we've he'S DON'T it's", "'s't're've'm'll'd", "'S 'LL'", "’s l’été", "o'clock'll"),
    *("1", "12", "123", "1234", "1234567 89", "3.14159e-10", "0x1F", "٣٤٥", "१२३४", "½Ⅷ²³", "1,2"),
    *("word" * 40, "CamelCaseHTTPServer", "snake_case__x", "SHOUT", "ﬁ ﬂ ſ ẞ", "İstanbul ıI"),
    *("!!!", "...", "?!?!\n\n", "))];\n", "=>->||&&", "/* */ // #!", "$%^", "«»“”", "、。！", "۔؟"),
    *("你好，世界", "中文English混排123", "ひらがなカタカナ漢字", "한국어 문장", "각가힣"),
    *("\u1100\u1161\u11a8", "\u1100\u1161", "\uac00\u11a8"),
    *("e\u0301", "\u0301", "a\u0301\u0323b", "q\u0307\u0323", "Å\u212b\u00c5", "\u1e9b\u0323"),
    *("हिन्दी में", "தமிழ்", "ไทยภาษา", "العربية مُشَكَّلة", "עִבְרִית", "Ελληνικά ΣΑΣ", "Русский ё"),
    *("🚀", "👩‍👩‍👧", "👍🏽👍", "🏳️‍🌈", "🇩🇪🇫🇷", "#️⃣", "☃︎☃️", "𝒳𝕐", "𐍈", "\U000e0001", "\U0010ffff"),
    *("\x00", "\x01\x02", "\x7f", "\x1b[0m", "\ue000", "\ufdd0", "\uffff", "\ufffd", "\u00ad"),
    *("\u202eabc\u202c", "a\u200db", "a\u0300" * 9, "\u0e33\u0e33", "\ufb2f", "ǅǈ", "ʰʲ", "ªº"),
    *(" " * 200 + "x", "x" + " " * 300, "\n" * 150, "a" * 700, "ab" * 500, "1" * 400, "中" * 300),
    *("-" * 300, "=" * 300 + "\n", "\t" * 90 + "return", "é" * 200, "🙂" * 60, "\u0301" * 60),
    '{"role": "user", "n": [1, 2.5e3, null], "s": "a\\n\\u00e9 \\"q\\""}',
    "def f(self, x: int) -> None:\n    return {'a': x ** 2}  # naïve\n\n\n\tpass\r\n",
    "diff --git a/x.py b/x.py\n@@ -1,3 +1,4 @@\n-    old\n+\tnew\n \n",
    "https://example.org/a?b=c&d=%20#frag user@example.org ~/.config C:\\Temp\\x",
    "aGVsbG8gd29ybGQhIGJhc2U2NA==  3f2a9c0e-77aa-4b1e 0xDEADBEEF $1,234.56 50%",
    "<|", "|>", "<", "</s", "<s>", "<unk>", "[INST]", "<|im_", "▁", "▁▁a ▁b", "Ġ", "ĠaĊ", "##ing",
)  # fmt: skip
_RANGES = (
    *((0x20, 0x7F), (0x20, 0x7F), (0x20, 0x7F), (0x0, 0x20), (0x7F, 0x100), (0x100, 0x250)),
    *((0x2B0, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE00), (0xE00, 0x1200)),
    *((0x1E00, 0x2000), (0x2000, 0x2070), (0x2070, 0x2400), (0x2600, 0x27C0), (0x3000, 0x3100)),
    *((0x4E00, 0xA000), (0xAC00, 0xD7A4), (0xE000, 0x10000), (0x10000, 0x20000)),
    *((0x1F000, 0x1FB00), (0x20000, 0x30000), (0xE0000, 0xE0200), (0xF0000, 0x110000)),
)


def find_difference(tokenizer: Tokenizer, fast: FastEncoder) -> str | None:
    """Encode the texts by both; blocking, about 0.3 s.

    Returns the difference, without quoting a text; None: there is none.

    Raises:
        FastEncoderFailed: it fails on one of them.
    """
    texts = list(texts_for(tokenizer))
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        wanted = encode_plainly(tokenizer, batch)
        given = fast.encode(batch)
        if given != wanted:
            position = next(n for n, ids in enumerate(wanted) if ids != given[n])
            return f"other ids for text {start + position} of the proof"
    return None


def encode_plainly(tokenizer: Tokenizer, texts: Sequence[str]) -> list[TokenIds]:
    """Encode texts by `tokenizers`, without special tokens around them."""
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [array("I", encoding.ids) for encoding in encodings]


def texts_for(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the texts for the proof of a tokenizer."""
    rng = random.Random(0)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    added = rng.sample(added, min(len(added), _MAX_ADDED))
    words = _words(tokenizer, rng)
    yield from _HARD
    for content in added:
        yield content
        yield f"a {content} b"
        yield f"a{content}{content}\n"
        yield f" \n{content[:-1]}{content}{content[1:]}  "
    yield from words
    yield from (f" {word}" for word in words)
    for _ in range(_NUM_MIXED):
        pieces = (_piece(rng, words, added) for _ in range(rng.randrange(1, 12)))
        yield "".join(pieces)


def _words(tokenizer: Tokenizer, rng: random.Random) -> list[str]:
    """Collect texts of the vocabulary's tokens, and of random ones in a row."""
    num_ids = tokenizer.get_vocab_size(with_added_tokens=False)
    ids = rng.sample(range(num_ids), min(num_ids, _NUM_WORDS))
    words = [str(tokenizer.decode([each], skip_special_tokens=False)) for each in ids]
    for _ in range(_NUM_WORDS // 4):
        row = [rng.randrange(num_ids) for _ in range(8)]
        words.append(str(tokenizer.decode(row, skip_special_tokens=False)))
    return words


def _piece(rng: random.Random, words: Sequence[str], added: Sequence[str]) -> str:
    kind = rng.random()
    if kind < 0.3 and words:
        return rng.choice(words)
    if kind < 0.4 and added:
        content = rng.choice(added)
        return content if rng.random() < 0.7 else content[: rng.randrange(len(content) + 1)]
    if kind < 0.6:
        return rng.choice(_HARD)[:60]
    if kind < 0.75:
        return rng.choice((" ", "  ", "\n", "\n\n", "\t", "\r\n", "'s", "'", "."))
    start, end = rng.choice(_RANGES)
    return "".join(chr(rng.randrange(start, end)) for _ in range(rng.randrange(1, 8)))


_BATCH_BYTES = 256 * 1024


class TextEncoder(PlainEncoder):
    """One model's tokenizer. Texts are cut where its own description allows it.

    Segments are encoded by fastokens once it is proven (`quicken`), whole texts by `tokenizers`.

    Args:
        tokenizer: The backend; its truncation and padding are switched off.
        hints: Text that contains useful boundary tokens: the chat template.

    fast: Encodes segments, once it is proven. None: it is not in use.
    """

    __slots__ = ("_apart", "_needles", "_tokenizer", "fast")

    def __init__(self, tokenizer: Tokenizer, hints: str = "") -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.fast: FastEncoder | None = None
        found: Boundaries = find_boundaries(json.loads(tokenizer.to_str()), hints)
        self._needles = found.needles
        self._apart = found.apart
        # Source: vllm/tokenizers/hf.py at 0.32.0, max_chars_per_token
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        ends = _ends(tokenizer) if found.has_plain_ends else None
        super().__init__(longest, *(ends or (None, None)))

    def token_apart(self, token_id: int) -> str | None:
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token if token in self._apart else None

    def cuts(self, data: bytes) -> TextCuts:
        return TextCuts(data, self._needles)

    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        """Encode as `PlainEncoder.encode` does, without the GIL for most of the time."""
        encoded: list[TokenIds] = []
        is_small = not new or new[-1].end - new[0].start <= _BATCH_BYTES
        for batch in (new,) if is_small else _batches(new):
            encoded += self._encode([data[each.start : each.end].decode() for each in batch])
        if suffix:
            encoded[-1] = encoded[-1] + suffix
        return encoded

    def _encode(self, texts: list[str]) -> list[TokenIds]:
        fast = self.fast
        if fast is not None:
            try:
                return fast.encode(texts)
            except FastEncoderFailed as exc:
                self.failure = str(exc)
                self.fast = None
        return encode_plainly(self._tokenizer, texts)

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        return [self._decode([each], skip_special_tokens=False) for each in ids]

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    @property
    def is_fast(self) -> bool:
        return self.fast is not None

    def quicken(self) -> str | None:
        try:
            fast = FastEncoder(self._tokenizer.to_str())
            difference = find_difference(self._tokenizer, fast)
        except FastEncoderFailed as exc:
            return str(exc)
        if difference is None:
            self.fast = fast
        return difference

    def slow_down(self) -> bool:
        was_fast = self.fast is not None
        self.fast = None
        return was_fast

    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Encode a text at once by `tokenizers`: everything else is compared with this."""
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("I", encodings[0].ids)


def _batches(new: Sequence[NewSegment]) -> Iterator[Sequence[NewSegment]]:
    """Group segments. To free the memory of one large encode would block the interpreter."""
    start = size = 0
    for index, segment in enumerate(new):
        size += segment.end - segment.start
        if size > _BATCH_BYTES:
            yield new[start : index + 1]
            start, size = index + 1, 0
    if start < len(new):
        yield new[start:]


def _ends(tokenizer: Tokenizer) -> tuple[TokenIds, TokenIds] | None:
    """Find the tokens that special-token processing puts around any text; None: not clear.

    Two probes must agree, since the text's own tokens might look like the added ones.
    """
    candidates: list[set[tuple[tuple[int, ...], tuple[int, ...]]]] = []
    for probe in ("a", "0 b"):
        bare = tokenizer.encode(probe, add_special_tokens=False).ids
        whole = tokenizer.encode(probe, add_special_tokens=True).ids
        candidates.append(
            {
                (tuple(whole[:start]), tuple(whole[start + len(bare) :]))
                for start in range(len(whole) - len(bare) + 1)
                if whole[start : start + len(bare)] == bare
            }
        )
    agreed = candidates[0] & candidates[1]
    if len(agreed) != 1:
        return None
    prefix, suffix = agreed.pop()
    return array("I", prefix), array("I", suffix)
