"""fastokens is used where it gives the ids of `tokenizers`, and given up where it does not."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from router.api.openai import TokenIds, parse_completion
from router.base.contracts import NO_EXTRA, HashContract
from router.tokens import NeedsEngine, Prompter, Tokens
from router.tokens.encoder import (
    FastEncoder,
    FastEncoderFailed,
    TextEncoder,
    encode_plainly,
    find_difference,
)
from router.tokens.templates import NoRenderer
from tests.effort import examples
from tests.tokens.corpus import text
from tests.tokens.vllm_routes import MODEL

FILE = str(MODEL / "tokenizer.json")
CONTRACT = HashContract(algorithm="sha256", block_size=16)


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(FILE)


def _prompter(fast: Any = None) -> Prompter:
    """A prompter of the tiny tokenizer, with `fast` instead of what it would load."""
    encoder = TextEncoder(_tokenizer())
    encoder.fast = fast
    return Prompter(encoder, NoRenderer())


def _tokens(prompter: Prompter, prompt: str) -> Tokens:
    plan = prompter.plan_text(prompt, add_special_tokens=False)
    return prompter.commit(plan, plan.encode())


class Liar:
    """Encodes as `tokenizers` does, except texts that hold a given word."""

    def __init__(self, word: str) -> None:
        self._word = word
        self._tokenizer = _tokenizer()

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        encoded = encode_plainly(self._tokenizer, texts)
        return [
            ids[::-1] if self._word in each else ids
            for each, ids in zip(texts, encoded, strict=True)
        ]


class Broken:
    """Fails on every text."""

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        raise FastEncoderFailed("PanicException")


@functools.cache
def _fast() -> FastEncoder:
    return FastEncoder(_tokenizer().to_str())


@settings(max_examples=examples(100))
@given(st.lists(st.text(), max_size=20) | st.builds(text, st.randoms(), st.integers(0, 200)))
def test_any_text(texts: list[str] | str) -> None:
    """Ids of both are the same for whatever text there is."""
    texts = [texts] if isinstance(texts, str) else texts

    assert _fast().encode(texts) == encode_plainly(_tokenizer(), texts)


def test_the_proof_finds_a_difference() -> None:
    """A difference in any class of text is found; the reason quotes no text."""
    for word in ("  ", "\u0301", "1234", "中", "\r\n", "<|im_end|>", "'ll", "🇩🇪"):
        difference = find_difference(_tokenizer(), Liar(word))  # type: ignore[arg-type]

        assert difference is not None
        assert difference.startswith("other ids for text ")
        assert word not in difference


_WORDS = {"[UNK]": 0, "a": 1, "b": 2, "ab": 3}


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel(_WORDS, unk_token="[UNK]"),
        models.WordPiece(_WORDS, unk_token="[UNK]"),
        models.Unigram([("<unk>", 0.0), ("a", -1.0), ("ab", -1.5)], unk_id=0),
    ],
)
def test_other_kinds_of_tokenizers_stay_as_they_are(model: models.Model) -> None:
    """What fastokens does not know, or knows in another way, is left to `tokenizers`."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = TextEncoder(tokenizer)

    assert encoder.quicken() is not None
    assert not encoder.is_fast
    assert len(encoder.encode_whole("ab", add_special_tokens=False)) == 1


def test_without_fastokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no wheel of it, `tokenizers` encodes."""
    monkeypatch.setitem(sys.modules, "fastokens", None)
    encoder = TextEncoder(_tokenizer())

    assert encoder.quicken() == "fastokens is not installed"
    assert not encoder.is_fast


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
@pytest.mark.parametrize("content", ["<tool>", "word", "  ", "\n\n", "é"])
def test_added_tokens_of_all_kinds(flag: str, content: str) -> None:
    """Either both find the same tokens, or the proof says that they do not."""
    tokenizer = Tokenizer.from_file(FILE)
    tokenizer.add_tokens([AddedToken(content, **{"normalized": False, flag: True})])
    fast = _loaded(tokenizer)
    if fast is None or find_difference(tokenizer, fast) is not None:
        return
    texts = [before + content * number + after for before, number, after in _around()]

    assert fast.encode(texts) == encode_plainly(tokenizer, texts)


@functools.cache
def _around() -> list[tuple[str, int, str]]:
    """Draw what stands in front of a token and behind it, and how many there are."""
    rng = random.Random(2)
    return [(text(rng, 5), rng.randrange(3), text(rng, 5)) for _ in range(500)]


def _loaded(tokenizer: Tokenizer) -> FastEncoder | None:
    try:
        return FastEncoder(tokenizer.to_str())
    except FastEncoderFailed:
        return None


def test_one_that_breaks_down_is_given_up() -> None:
    """`tokenizers` encodes this text and all that follow; the failure is to be reported."""
    prompter = _prompter(Broken())

    tokens = _tokens(prompter, "some words")

    assert tokens.ids() == encode_plainly(_tokenizer(), ["some words"])[0].tolist()
    assert not prompter.encoder.is_fast
    assert prompter.encoder.failure == "PanicException"


def _panic() -> BaseException:
    return type("PanicException", (BaseException,), {})("it quotes the text")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (_panic, FastEncoderFailed),
        (lambda: ValueError("it quotes the text"), FastEncoderFailed),
        (KeyboardInterrupt, KeyboardInterrupt),
    ],
)
def test_failures(
    raised: Callable[[], BaseException],
    expected: type[BaseException],
) -> None:
    """A panic of the library is a failure that quotes nothing; an interrupt remains one."""

    class Raises:
        def encode_batch_flat(self, texts: list[str]) -> None:
            raise raised()

    fast = FastEncoder(_tokenizer().to_str())
    fast._tokenizer = Raises()

    with pytest.raises(expected) as caught:
        fast.encode(["a"])
    assert "quotes" not in str(caught.value)


def test_other_ids_for_a_prompt() -> None:
    """fastokens is given up with all that it encoded, and our tokens are trusted again."""
    prompter = _prompter(Liar("lie"))
    request = parse_completion({"prompt": "here is a lie " * 400, "add_special_tokens": False})
    prompt = str(request.prompts[0])
    wrong = _tokens(prompter, prompt)
    wrong.keys(CONTRACT)
    in_flight = prompter.plan_text(prompt + "more", add_special_tokens=False)
    prompter.trust.observe_usage("r1", 5, 6, has_others=False, now_s=0.0)
    with pytest.raises(NeedsEngine):
        prompter.plan_completion(request)

    assert not prompter.reference.proves(request, wrong)
    assert prompter.observe_proof(wrong, is_chat=False, is_same=False, now_s=0.0) == "fast"
    prompter.commit(in_flight, in_flight.encode())  # ends in what is forgotten
    right = _tokens(prompter, prompt)

    assert prompter.reference.proves(request, right)
    assert prompter.observe_proof(right, is_chat=False, is_same=True, now_s=0.0) == "same"
    assert prompter.observe_proof(wrong, is_chat=False, is_same=False, now_s=0.0) == "outdated"
    assert list(right.keys(CONTRACT)) == list(CONTRACT.extend(None, right.ids(), NO_EXTRA)[0])
    assert prompter.engine_only is None


def test_other_ids_for_the_pieces() -> None:
    """Where `tokenizers` encodes already, a difference is the pieces': the engine tokenizes."""
    prompter = _prompter()
    tokens = _tokens(prompter, "a few words")

    assert prompter.observe_proof(tokens, is_chat=True, is_same=False, now_s=0.0) == "pieces"
    assert prompter.engine_only is not None
