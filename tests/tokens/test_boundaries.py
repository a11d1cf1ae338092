"""Which tokens are safe to cut at, by rule and by trial against the tokenizers library."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from router.tokens.boundaries import Needle, TextCuts, find_boundaries
from router.tokens.encoder import TextEncoder
from router.tokens.prompt_tree import NewSegment
from tests.effort import examples

_CHARS = " ▁\nab<>|_-ﬁé.cd"


def _tokenizer(added: list[AddedToken], pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    """Make a small BPE tokenizer that joins letters."""
    vocab = {char: index for index, char in enumerate(["?", *dict.fromkeys(_CHARS)])}
    merges = [("a", "b"), ("ab", "ab"), ("▁", "a"), ("<", "|"), ("c", "d"), ("▁", "▁")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_tokens(added)
    return tokenizer


def _safe(tokenizer: Tokenizer, hints: str = "") -> list[str]:
    found = find_boundaries(json.loads(tokenizer.to_str()), hints)
    return sorted(needle.token for needle in found.needles)


def _raw(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, normalized=False, special=True, **flags)


PLAIN = pre_tokenizers.WhitespaceSplit()


@pytest.mark.parametrize(
    ("added", "safe"),
    [
        ([_raw("<a>")], ["<a>"]),
        ([AddedToken("<a>", normalized=True)], ["<a>"]),  # nothing normalizes
        ([AddedToken("<a>", normalized=True), _raw("c<a>")], ["c<a>"]),
        ([AddedToken("<a>", normalized=True), _raw("a")], ["a"]),
        ([AddedToken("<a>", normalized=True), _raw(">b")], [">b"]),
        ([AddedToken("<a>", normalized=True), _raw("b<")], ["b<"]),
        ([AddedToken("<a>", normalized=True), AddedToken("a>", normalized=True)], ["<a>"]),
        ([_raw("<a>", single_word=True)], []),
        ([_raw(" <a>")], []),
        ([_raw("<a>"), _raw("<a>b")], ["<a>b"]),  # the longer one wins where both begin
        ([_raw("<a>"), _raw("c<a>")], ["c<a>"]),
        ([_raw("<a>"), _raw("c<")], ["c<"]),  # may take the first character of <a>
        ([_raw("<a"), _raw("<a>b")], ["<a>b"]),
        ([_raw("abab")], []),  # overlaps itself
        ([_raw("<a>"), _raw("ab", single_word=True)], ["<a>"]),
        ([_raw("a>c"), _raw("d", single_word=True)], []),
        ([_raw("<a>", lstrip=True)], ["<a>"]),
        ([_raw("<a>", rstrip=True)], ["<a>"]),
        ([_raw("<a>", lstrip=True, rstrip=True)], []),
    ],
)
def test_rule(added: list[AddedToken], safe: list[str]) -> None:
    """A token is safe if no other added token can claim a character of it."""
    assert _safe(_tokenizer(added, PLAIN)) == safe


def test_normalized_tokens_are_not_safe_where_something_normalizes() -> None:
    """What becomes of the text around them before they are looked for is not known."""
    added = [AddedToken("<a>", normalized=True), _raw("<b>")]

    assert _safe(_tokenizer(added, PLAIN, normalizers.Sequence([]))) == ["<a>", "<b>"]
    assert _safe(_tokenizer(added, PLAIN, normalizers.Lowercase())) == ["<b>"]


def test_cut_is_in_front_of_a_token_that_strips_behind_it() -> None:
    """White space behind an `rstrip` token belongs to it, so it must stay in one piece with it."""
    tokenizer = _tokenizer([_raw("<a>", rstrip=True), _raw("<b>")], PLAIN)

    found = find_boundaries(json.loads(tokenizer.to_str()))

    offsets = {needle.token: (needle.offset, needle.guard) for needle in found.needles}
    assert offsets == {"<a>": (0, b"<a>"), "<b>": (3, b"")}


def test_hints_choose() -> None:
    """Of many safe tokens, those in the chat template are looked for, most frequent first."""
    tokenizer = _tokenizer([_raw(f"<{c}>") for c in "abcdefghijklmn"], PLAIN)

    assert _safe(tokenizer, "<c> <h> <c>") == ["<c>", "<h>"]
    assert len(_safe(tokenizer, "nothing")) == 12


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "FromTheFuture"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "FromTheFuture"}]}},
        {"model": {"type": "FromTheFuture"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "first"}},
    ],
)
def test_unknown_parts_mean_no_cuts(change: dict[str, Any]) -> None:
    """Nor do parts that depend on a piece's position, or on chance."""
    tokenizer = json.loads(_tokenizer([_raw("<a>")], PLAIN).to_str()) | change

    assert find_boundaries(tokenizer).needles == ()


_TOKENS = ["<a>", "<a", "<a>b", "c<", "<|", "|>", "<b>", "abab", "ﬁ", "<é>", " <c>", "d", "-"]
_TRAPS = [
    "c<a>",
    "ababab",
    " <c> <c>",
    "a<a>d",
    "d-d",
    "-d-",
    "  ",
    "ab",
    "cd",
    "\n<a>\n",
    "<b> <c>",
]
_FLAGS = st.fixed_dictionaries(
    {}, optional={"lstrip": st.booleans(), "rstrip": st.booleans(), "single_word": st.booleans()}
)
_PRE_TOKENIZERS = [
    PLAIN,
    pre_tokenizers.ByteLevel(add_prefix_space=True),
    pre_tokenizers.Metaspace(prepend_scheme="always"),
    pre_tokenizers.Metaspace(prepend_scheme="first"),
    pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
    pre_tokenizers.Metaspace(prepend_scheme="never"),
    pre_tokenizers.Split("ab", "merged_with_next"),
    pre_tokenizers.Punctuation(),
]
_NORMALIZERS = [
    None,
    normalizers.NFKC(),
    normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    normalizers.Strip(),
    normalizers.Lowercase(),
]


@settings(max_examples=examples(600))
@given(
    added=st.dictionaries(st.sampled_from(_TOKENS), _FLAGS, min_size=1, max_size=6),
    normalized=st.sets(st.sampled_from(_TOKENS), max_size=4),
    pieces=st.lists(st.sampled_from([*_TOKENS, *_CHARS, *_TRAPS]), max_size=30),
    pre_tokenizer=st.sampled_from(_PRE_TOKENIZERS),
    normalizer=st.sampled_from(_NORMALIZERS),
)
def test_pieces_make_the_whole(
    added: dict[str, dict[str, bool]],
    normalized: set[str],
    pieces: list[str],
    pre_tokenizer: Any,
    normalizer: Any,
) -> None:
    """Cut at every safe place: the pieces' tokens are those of the whole."""
    tokens = [
        AddedToken(content, normalized=content in normalized, special=True, **flags)
        for content, flags in added.items()
    ]
    tokenizer = _tokenizer(tokens, pre_tokenizer, normalizer)
    encoder = TextEncoder(tokenizer)
    data = "".join(pieces).encode()

    new = _cut_everywhere(data, find_boundaries(json.loads(tokenizer.to_str())).needles)
    encoded = encoder.encode(data, new, array("I"))

    whole = encoder.encode_whole(data.decode(), add_special_tokens=False)
    assert [i for ids in encoded for i in ids] == whole.tolist()


def _cut_everywhere(data: bytes, needles: tuple[Needle, ...]) -> list[NewSegment]:
    cuts = TextCuts(data, needles, min_bytes=1)
    new, position = [], 0
    while (boundary := cuts.after(position)) is not None:
        new.append(NewSegment(0, position, boundary.position, boundary.guard))
        position = boundary.position
    return [*new, NewSegment(0, position, len(data), b"")]
