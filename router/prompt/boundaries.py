"""Where a text may be cut so that the pieces' tokens, put together, are the whole text's tokens.

The `tokenizers` library works in this order: (1) added tokens that are not normalized are found
in the raw text, leftmost, longest first, and split it; (2) each piece between them is normalized,
(3) split at the normalized added tokens, (4) pre-tokenized and (5) encoded on its own; (6) the
post-processor puts fixed tokens around the whole. So a cut beside a match of step 1 changes
nothing, and an occurrence in the text is such a match if no other added token can claim any of its
characters. That holds for forged ones too: a `<|im_end|>` that a user typed is a match like any
other.

A token is *safe* if
1. it is not normalized, not `single_word`, and neither begins nor ends with white space (an
   `lstrip` or `rstrip` neighbour eats white space, never more);
2. no other not-normalized added token contains it, and none (itself included) has an ending that is
   its beginning: so every occurrence is a match;
3. if some added token is `single_word`, its ends are no word characters (that one looks around).
The cut goes behind it; in front of it if it is `rstrip`, nowhere if it is `lstrip` too.

Steps 2 to 5 see nothing outside their piece, with one exception: a Metaspace pre-tokenizer with
prepend_scheme "first" asks whether the piece starts the text. There, a safe token is put in front
of every segment but the first, and its id dropped. Unknown parts of a tokenizer: no safe tokens.
Source: tokenizers 0.23, added_vocabulary.rs, tokenizer/mod.rs, pre_tokenizers/metaspace.rs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

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

    `guard` is what must follow the cut for it to be one: the token itself if the cut is in front.
    """

    token: str
    text: bytes
    offset: int
    guard: bytes


class Boundaries(Struct, frozen=True):
    """What a tokenizer's own description says about cutting.

    needles: Safe tokens to cut at; empty: no text can be cut.
    anchor: Put in front of all segments but the first and worth one token; "": nothing.
    has_plain_ends: The post-processor at most adds fixed tokens around the whole.
    """

    needles: tuple[Needle, ...]
    anchor: str
    has_plain_ends: bool


def find_boundaries(tokenizer: dict[str, Any], hints: str = "") -> Boundaries:
    """Analyse a `tokenizer.json`.

    Args:
        tokenizer: Its content.
        hints: Text in which useful tokens occur: the chat template.
    """
    added = tokenizer.get("added_tokens") or []
    is_known = _is_known(tokenizer)
    safe = [needle for needle in map(_needle, _safe_tokens(added)) if needle] if is_known else []
    anchor = ""
    if _asks_for_first(tokenizer.get("pre_tokenizer")):
        anchors = [needle.token for needle in safe if not needle.guard]
        anchor = anchors[0] if anchors else ""
        safe = safe if anchor else []
    special = {token["content"] for token in added if token.get("special")}
    safe.sort(key=lambda needle: (-hints.count(needle.token), needle.token not in special))
    useful = [needle for needle in safe if needle.token in hints] or safe
    return Boundaries(
        needles=tuple(useful[:_MAX_NEEDLES]),
        anchor=anchor,
        has_plain_ends=_types(tokenizer.get("post_processor"), "processors") <= _POST_PROCESSORS,
    )


def _is_known(tokenizer: dict[str, Any]) -> bool:
    model = tokenizer.get("model") or {}
    return (
        _types(tokenizer.get("normalizer"), "normalizers") <= _NORMALIZERS
        and _types(tokenizer.get("pre_tokenizer"), "pretokenizers") <= _PRE_TOKENIZERS
        and model.get("type", "BPE") in _MODELS
        and not model.get("dropout")
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


def _safe_tokens(added: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    raw = [token for token in added if token.get("content") and not token.get("normalized")]
    has_single_word = any(token.get("single_word") for token in raw)
    contents = {token["content"] for token in raw}
    endings = {content[start:] for content in contents for start in range(1, len(content))}
    for token in raw:
        content = token["content"]
        if (
            not token.get("single_word")
            and content == content.strip()
            and not (has_single_word and (_is_word(content[0]) or _is_word(content[-1])))
            and not any(content in other for other in contents if other != content)
            and endings.isdisjoint(content[:length] for length in range(1, len(content)))
        ):
            yield token


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
