"""Hash ids as tokens and as text: exact repeats, with tokenizers of several kinds."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from loadtest import agents
from loadtest.generated import Agents
from loadtest.text import Prompts, UnstableTokenizer, Vocabulary, of_range, of_tokenizer, salted
from loadtest.traces.blocks import load_tokenizer
from loadtest.traces.building import num_common
from loadtest.workload import Turn
from router.base.contracts import HashContract

SOURCES = [path.read_text() for path in sorted(Path(agents.__file__).parent.glob("*.py"))]


def _byte_level() -> Tokenizer:
    return load_tokenizer(None)


def _sentence_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=1500, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
    )
    tokenizer.train_from_iterator(SOURCES, trainer)
    return tokenizer


def _sentence_piece_bpe() -> Tokenizer:
    """Like Llama 2's: spaces become a sign by a normalizer, and nothing parts the words.

    Its tokens were learned from parted words.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=2500, show_progress=False, special_tokens=["<unk>"], max_token_length=12
    )
    lines = [line.strip() for text in SOURCES for line in text.splitlines() if line.strip()]
    tokenizer.train_from_iterator(lines, trainer)
    model = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**model, "pre_tokenizer": None}))


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    kinds = {
        "byte-level BPE": _byte_level,
        "Unigram": _sentence_piece,
    }
    return kinds[kind]()


@cache
def vocabulary_of(kind: str) -> Vocabulary:
    return of_tokenizer(tokenizer_of(kind))


KINDS = ["byte-level BPE", "Unigram"]
ids_of_prompt = st.lists(st.integers(0, 30), min_size=1, max_size=8)


def turn_of(ids: list[int], num_missing: int, block_size: int) -> Turn:
    """Make a turn whose last block lacks so many tokens."""
    return Turn(
        session_id="s", number=0, arrival_s=0.0, num_output_tokens=1, hash_ids=tuple(ids),
        num_input_tokens=len(ids) * block_size - num_missing % block_size,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(ids=ids_of_prompt, num_missing=st.integers(0, 63), block_size=st.sampled_from([16, 64]))
def test_text_tokenizes_to_the_ids(
    kind: str, ids: list[int], num_missing: int, block_size: int
) -> None:
    """Exactly, with every kind of tokenizer, and as many tokens as the turn has."""
    tokenizer = tokenizer_of(kind)
    prompts = Prompts(vocabulary_of(kind), block_size)
    turn = turn_of(ids, num_missing, block_size)

    tokens = prompts.token_ids(turn)

    assert len(tokens) == turn.num_input_tokens
    assert tokenizer.encode(prompts.text(turn), add_special_tokens=False).ids == tokens
    stripped = tokenizer.encode(prompts.text(turn).strip(), add_special_tokens=False).ids
    assert (len(stripped), stripped[1:]) == (len(tokens), tokens[1:])


@given(one=ids_of_prompt, other=ids_of_prompt, seed=st.integers(0, 3))
def test_tokens_repeat_where_ids_do(one: list[int], other: list[int], seed: int) -> None:
    """Wherever a block stands, and in another process's prompts as well."""
    vocabulary = of_range(100, 5000)
    here, there = (Prompts(vocabulary, 32, salt=str(seed)) for _ in range(2))

    first, second = here.token_ids(turn_of(one, 0, 32)), there.token_ids(turn_of(other, 0, 32))

    for k, mine in enumerate(one):
        for n, theirs in enumerate(other):
            same = first[32 * k : 32 * k + 32] == second[32 * n : 32 * n + 32]
            assert same == (mine == theirs)


@pytest.mark.parametrize("engine_block", [16, 64, 512])
def test_an_engines_own_hashes_repeat_as_the_ids_do(engine_block: int) -> None:
    """Of blocks smaller than, or as large as, those of the ids: shared as far as these are."""
    workload = Agents(num_sessions=3, num_turns=6, seed=5).workload()
    prompts = Prompts(vocabulary_of("byte-level BPE"), workload.block_size)
    contract = HashContract(algorithm="xxhash", block_size=engine_block, seed="0")
    hashed = [
        (turn, contract.digests(None, prompts.token_ids(turn)))
        for turn in random.Random(1).sample(workload.turns, 8)
    ]
    shares = set()

    for (turn, digests), (other, others) in combinations(hashed, 2):
        num_shared = num_common(turn.hash_ids, other.hash_ids)
        assert num_common(digests, others) == num_shared * 512 // engine_block
        shares.add(num_shared)

    assert min(shares) == 22  # the shared preamble
    assert max(shares) > 30


def test_salts_make_unseen_bytes() -> None:
    """Another salt changes every block of the same workload; no salt is one, too."""
    vocabulary = vocabulary_of("byte-level BPE")
    turn = turn_of([1, 2, 3], 5, 16)
    texts = [Prompts(vocabulary, 16, salt=salt).text(turn) for salt in ("", "a", "b")]

    blocks = [{" ".join(text.split()[k : k + 11]) for k in (0, 16, 32)} for text in texts]

    assert len(set.union(*blocks)) == 9


def test_blocks_are_forgotten_and_made_again() -> None:
    """The memory is bounded; what was dropped comes back the same."""
    vocabulary = vocabulary_of("byte-level BPE")
    small, large = Prompts(vocabulary, 16, max_tokens=32), Prompts(vocabulary, 16)

    for ids in ([1, 2, 3, 4], [4, 3, 2, 1], [1, 2, 3, 4]):
        turn = turn_of(ids, 3, 16)
        assert small.token_ids(turn) == large.token_ids(turn)
        assert small.text(turn) == large.text(turn)
    assert small._block_ids.cache_info().currsize == 2


def test_tokenizers_without_such_words_are_refused() -> None:
    """Characters as tokens: the message says how few words there are, and what to do instead."""
    letters = Tokenizer(models.BPE(unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=257, show_progress=False, special_tokens=["?"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    letters.train_from_iterator(SOURCES[:1], trainer)

    with pytest.raises(UnstableTokenizer, match=r"has 0 words .* 64 are needed .*token ids"):
        of_tokenizer(letters)


def test_tokenizers_that_put_the_first_space_themselves() -> None:
    """Their texts begin without it."""
    tokenizer = _sentence_piece_bpe()
    vocabulary = of_tokenizer(tokenizer)
    prompts = Prompts(vocabulary, 64)
    turn = turn_of(list(range(200)), 7, 64)

    encoded = tokenizer.encode(prompts.text(turn), add_special_tokens=False).ids

    assert vocabulary.is_bare
    assert encoded == prompts.token_ids(turn)


def test_blocks_that_are_too_alike_are_refused() -> None:
    """Too small, out of too few tokens."""
    with pytest.raises(ValueError, match=r"blocks of 4 tokens out of 100 .* 40 bits .* have 27"):
        Prompts(of_range(0, 100), 4)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hello", "[arm 1] hello"),
        (None, "[arm 1] "),
        ([{"type": "text", "text": "a"}],
         [{"type": "text", "text": "[arm 1]"}, {"type": "text", "text": "a"}]),
    ],
)  # fmt: skip
def test_recorded_messages_are_salted(content: Any, expected: Any) -> None:
    """In their first text; the others, and the originals, stay as they are."""
    messages = [{"role": "system", "content": content}, {"role": "user", "content": "x"}]

    made = salted(messages, "arm 1")

    assert made == [{"role": "system", "content": expected}, messages[1]]
    assert messages[0]["content"] is content
    assert salted(messages, "") == messages
    assert salted([], "arm 1") == []
