"""Find where a text may be cut so that the pieces' joined tokens are the whole text's tokens.

The `tokenizers` library works in this order:

1. It finds the added tokens that are not normalized in the raw text, and splits the text at them.
   The leftmost match wins, then the longest.
2. It normalizes each piece between them.
3. It splits the pieces in the same way at the normalized added tokens.
4. It pre-tokenizes each piece.
5. It encodes each piece on its own.
6. The post-processor puts fixed tokens around the whole.

So a cut beside a match of step 1 changes nothing. Nor does a cut beside a match of step 3 if step 2
does nothing. An occurrence in the text is such a match if no other added token can claim any of its
characters. A forged `<|im_end|>` that a user typed is a match like any other.

A token is *safe* if all of these hold:

1. It is not normalized, or the tokenizer does not normalize. It is not `single_word`. It neither
   begins nor ends with white space: an `lstrip` or `rstrip` neighbour only takes white space.
2. Every occurrence is a match. No other token of its own step contains it. No token, itself
   included, has an ending that is its beginning. If it is found in step 3, no token of step 1
   shares any character with it.
3. If some added token is `single_word`, its ends are no word characters: such a token looks around.

The cut is behind a safe token. It is in front of an `rstrip` token, and nowhere if the token is
`lstrip` too.

Steps 2 to 5 see nothing outside their piece, with one exception: a Metaspace pre-tokenizer with
prepend_scheme "first" checks whether the piece starts the text. Such a tokenizer, and one with
unknown parts, has no safe tokens: its texts are encoded whole.
Source: tokenizers 0.23, added_vocabulary.rs, tokenizer/mod.rs, pre_tokenizers/metaspace.rs.

`TextCuts` and `IdCuts` find where a prompt's bytes are cut: text at safe tokens, token ids by their
number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from router.api.openai import TokenIds
from router.tokens.prompt_tree import Boundary, NewSegment

_NORMALIZERS = frozenset(
    "BertNormalizer ByteLevel Lowercase NFC NFD NFKC NFKD Nmt Precompiled Prepend Replace Sequence "
    "Strip StripAccents".split()
)
_PRE_TOKENIZERS = frozenset(
    "BertPreTokenizer ByteLevel CharDelimiterSplit Digits FixedLength Metaspace Punctuation "
    "Sequence Split UnicodeScripts Whitespace WhitespaceSplit".split()
)
_POST_PROCESSORS = frozenset("ByteLevel Sequence TemplateProcessing".split())
_MODELS = frozenset("BPE Unigram WordLevel WordPiece".split())

_MAX_NEEDLES = 12  # each is one pass over the text that is new: 0.03 ms per 100 KB


class Needle(Struct, frozen=True):
    """A safe token. The cut is `offset` bytes behind the start of its UTF-8 bytes.

    `guard` must follow the cut: it is the token itself if the cut is in front of it.
    """

    token: str
    text: bytes
    offset: int
    guard: bytes


class Boundaries(Struct, frozen=True):
    """Where a tokenizer's own description allows cuts.

    needles: Safe tokens to cut at; empty: no text can be cut.
    has_plain_ends: The post-processor only adds fixed tokens around the whole, or nothing.
    apart: All safe tokens that do not change the white space around them. The text before such a
        token and the text behind it can be encoded on their own.
    """

    needles: tuple[Needle, ...]
    has_plain_ends: bool
    apart: frozenset[str] = frozenset()


def find_boundaries(tokenizer: dict[str, Any], hints: str = "") -> Boundaries:
    """Analyse a `tokenizer.json`.

    Args:
        tokenizer: Its content.
        hints: Text in which useful tokens occur: the chat template.
    """
    tokens = _safe_tokens(tokenizer) if _is_known(tokenizer) else []
    safe = [needle for needle in map(_needle, tokens) if needle is not None]
    special = {token["content"] for token in tokens if token.get("special")}
    safe.sort(key=lambda needle: (-hints.count(needle.token), needle.token not in special))
    useful = [needle for needle in safe if needle.token in hints] or safe
    return Boundaries(
        needles=tuple(useful[:_MAX_NEEDLES]),
        has_plain_ends=_types(tokenizer.get("post_processor"), "processors") <= _POST_PROCESSORS,
        apart=frozenset(
            token["content"]
            for token in tokens
            if not token.get("lstrip") and not token.get("rstrip")
        ),
    )


def _is_known(tokenizer: dict[str, Any]) -> bool:
    model = tokenizer.get("model") or {}
    return (
        _types(tokenizer.get("normalizer"), "normalizers") <= _NORMALIZERS
        and _types(tokenizer.get("pre_tokenizer"), "pretokenizers") <= _PRE_TOKENIZERS
        and model.get("type", "BPE") in _MODELS
        and not model.get("dropout")
        and not _asks_for_first(tokenizer.get("pre_tokenizer"))
    )


def _types(part: dict[str, Any] | None, children: str) -> set[str]:
    """Collect the type names of a component and of those nested in it."""
    if not part:
        return set()
    found = {part.get("type", "?")}
    for child in part.get(children) or ():
        found |= _types(child, children)
    return found


def _asks_for_first(part: dict[str, Any] | None) -> bool:
    if not part:
        return False
    if part.get("type") == "Metaspace":
        return bool(part.get("prepend_scheme", "always") == "first")
    return any(_asks_for_first(child) for child in part.get("pretokenizers") or ())


def _safe_tokens(tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    added = [token for token in tokenizer.get("added_tokens") or [] if token.get("content")]
    has_single_word = any(token.get("single_word") for token in added)
    raw = _Step([token["content"] for token in added if not token.get("normalized")])
    late = _Step([token["content"] for token in added if token.get("normalized")])
    can_be_late = _is_identity(tokenizer.get("normalizer"))
    safe: list[dict[str, Any]] = []
    for token in added:
        content = token["content"]
        if (
            token.get("single_word")
            or content != content.strip()
            or (has_single_word and (_is_word(content[0]) or _is_word(content[-1])))
        ):
            continue
        if token.get("normalized"):
            is_match = can_be_late and late.leaves(content) and raw.is_apart_from(content)
        else:
            is_match = raw.leaves(content)
        if is_match:
            safe.append(token)
    return safe


class _Step:
    """The added tokens of one step of the search."""

    __slots__ = ("_beginnings", "_contents", "_endings")

    def __init__(self, contents: list[str]) -> None:
        self._contents = frozenset(contents)
        self._beginnings = {c[:length] for c in contents for length in range(1, len(c))}
        self._endings = {c[start:] for c in contents for start in range(1, len(c))}

    def leaves(self, content: str) -> bool:
        """Return whether each occurrence of one of these tokens is a match of it."""
        return self._endings.isdisjoint(_beginnings(content)) and not any(
            content in other for other in self._contents if other != content
        )

    def is_apart_from(self, content: str) -> bool:
        """Return whether a token of another step can share no character with one of these."""
        return (
            self._endings.isdisjoint(_beginnings(content))
            and self._beginnings.isdisjoint(content[start:] for start in range(1, len(content)))
            and not any(content in other or other in content for other in self._contents)
        )


def _beginnings(content: str) -> list[str]:
    return [content[:length] for length in range(1, len(content))]


def _is_identity(normalizer: dict[str, Any] | None) -> bool:
    return not normalizer or (
        normalizer.get("type") == "Sequence" and not normalizer.get("normalizers")
    )


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _needle(token: dict[str, Any]) -> Needle | None:
    content = token["content"]
    text = content.encode()
    if not token.get("rstrip"):
        return Needle(content, text, len(text), b"")
    if not token.get("lstrip"):
        return Needle(content, text, 0, text)
    return None


MIN_SEGMENT_BYTES = 512
"""Boundaries nearer to the last one are skipped. About 130 tokens are encoded again at most, and a
prompt of 400 KB has about a hundred segments, not thousands."""

ID_STRIDE = 1024
"""Tokens per segment of a prompt that came as token ids."""

_NO_BOUNDARY = 1 << 62


class TextCuts:
    """The boundaries in one text's UTF-8 bytes, found lazily."""

    __slots__ = ("_data", "_found", "_min_bytes", "_needles")

    def __init__(
        self, data: bytes, needles: Sequence[Needle], min_bytes: int = MIN_SEGMENT_BYTES
    ) -> None:
        self._data = data
        self._needles = needles
        self._min_bytes = min_bytes
        self._found = [-1] * len(needles)  # the next boundary at each needle

    def after(self, position: int) -> Boundary | None:
        earliest = position + self._min_bytes
        best, guard = _NO_BOUNDARY, b""
        for index, needle in enumerate(self._needles):
            found = self._found[index]
            if found < earliest:
                start = self._data.find(needle.text, max(earliest - needle.offset, 0))
                found = self._found[index] = start + needle.offset if start >= 0 else _NO_BOUNDARY
            if found < best:
                best, guard = found, needle.guard
        return Boundary(best, guard) if best < _NO_BOUNDARY else None


class IdCuts:
    """The boundaries in the bytes of an array of token ids: one every `ID_STRIDE`."""

    __slots__ = ("_num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def after(self, position: int) -> Boundary | None:
        end = position + 4 * ID_STRIDE
        return Boundary(end, b"") if end <= self._num_bytes else None


def slice_ids(data: bytes, new: Sequence[NewSegment]) -> list[TokenIds]:
    """Return the segments' ids from the bytes of an array of ids."""
    return [array("I", data[segment.start : segment.end]) for segment in new]
