"""Compare two encoders on texts that encoders get wrong, before one is used.

The texts are the same in each run for a tokenizer:

- characters of every class that pre-tokenizers distinguish, at the ends of their runs
- characters that normalizers change
- added tokens: whole, broken and overlapping
- words of the vocabulary: alone, behind a space and joined at random
- long runs
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from router.api.openai import TokenIds
from router.tokens.fast_encoder import FastEncoder

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
