"""Hash contracts: bit for bit vLLM's own, and found from what an engine says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base import contracts
from router.base.contracts import (
    ALGORITHMS,
    DEFAULT_SEED,
    KEY_MASK,
    Algorithm,
    ExtraKeys,
    HashContract,
    block_key,
)
from router.kv_events.contract_search import StoredView, find_contract, obeys

GOLDEN = json.loads((Path(__file__).parent / "data" / "hash_vectors.json").read_text())["vectors"]

TOKENS = list(range(100, 148))


def contract_of(vector: dict[str, Any]) -> HashContract:
    return HashContract(
        algorithm=vector["algorithm"],
        block_size=vector["block_size"],
        seed=vector["seed"],
        tagged=vector["tagged"],
    )


def extra_of(vector: dict[str, Any]) -> ExtraKeys:
    lora = tuple(vector["lora"]) if vector["lora"] else None
    return ExtraKeys(lora=lora, cache_salt=vector["cache_salt"])


def stored_by(
    contract: HashContract, extra: ExtraKeys = contracts.NO_EXTRA, **changes: Any
) -> StoredView:
    """Say what an engine under `contract` publishes for TOKENS, extra keys untagged."""
    keys, _ = contract.extend(None, TOKENS, extra)
    lora_name = extra.lora[0] if extra.lora else None
    bare = [key for key in (lora_name, extra.cache_salt) if key is not None]
    fields: dict[str, Any] = {
        "block_hashes": [int(key) | 0xA << 60 for key in keys],
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": contract.block_size,
        "lora_name": lora_name,
        "extra_keys": [bare or None, *[None] * (len(keys) - 1)],
    }
    return StoredView(**{**fields, **changes})


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda v: f"{v['algorithm']}-{v['seed']}")
def test_digests_equal_vllms(vector: dict[str, Any]) -> None:
    """Every algorithm, seed, adapter and salt gives the digests of vLLM's own functions."""
    keys, digest = contract_of(vector).extend(None, vector["token_ids"], extra_of(vector))

    assert keys == [int(d, 16) & KEY_MASK for d in vector["digests"]]
    assert digest is not None
    assert digest.hex() == vector["digests"][-1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_chain_can_be_cut_anywhere(algorithm: Algorithm) -> None:
    """Hashing in two steps gives the same keys: the second turn of a session costs its own."""
    contract = HashContract(algorithm=algorithm, block_size=4)
    extra = ExtraKeys(lora=("a", "/a"), cache_salt="s")

    head, digest = contract.extend(None, TOKENS[:20], extra)
    tail, last = contract.extend(digest, TOKENS[20:], extra)

    assert (head + tail, last) == contract.extend(None, TOKENS, extra)


def test_a_prompt_below_one_block_has_no_keys() -> None:
    """A partial block is not hashed and the parent stays what it was."""
    contract = HashContract(algorithm="sha256", block_size=64)

    assert contract.extend(None, TOKENS) == ([], None)
    assert contract.extend(b"parent", TOKENS) == ([], b"parent")


def test_an_adapter_named_like_its_path_hashes_as_two_strings() -> None:
    """Pickle would write one object twice as a reference; the engine has two."""
    contract = HashContract(algorithm="sha256", block_size=16)
    name = "adapter"

    same = contract.extend(None, TOKENS, ExtraKeys(lora=(name, name)))
    two = contract.extend(None, TOKENS, ExtraKeys(lora=(name, "adap" + "".join("ter"))))

    assert same == two


def test_a_key_is_the_low_bits_of_int_and_bytes_alike() -> None:
    """Events with integer and with raw hashes name the same block."""
    digest = bytes(range(32))

    assert block_key(digest) == block_key(int.from_bytes(digest[-8:], "big"))
    assert block_key(2**64 - 1) == KEY_MASK


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    st.binary(min_size=16, max_size=32),
    st.sampled_from([None, (("cache_salt", "x"),), (("lora", "a", "/b"), ("cache_salt", "y"))]),
)
def test_own_cbor_is_cbor2s(tokens: list[int], parent: bytes, extra: Any) -> None:
    """The fast writer and the canonical one agree."""
    value = (parent, tuple(tokens), extra)

    assert contracts.cbor(*value) == cbor2.dumps(value, canonical=True)


def test_the_token_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids beyond the limit are encoded each time."""
    table = contracts.CborTokens()
    monkeypatch.setattr(contracts.CborTokens, "limit", 1)

    assert [table[1], table[2]] == [b"\x01", b"\x02"]
    assert list(table) == [1]


@pytest.mark.parametrize("extra", [contracts.NO_EXTRA, ExtraKeys(cache_salt="t1")])
@pytest.mark.parametrize("seed", [DEFAULT_SEED, "0", "mine"])
@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a != "warmroute"])
def test_the_contract_is_found(algorithm: Algorithm, seed: str, extra: ExtraKeys) -> None:
    """One event that starts a prompt names algorithm, seed and block size, salted or not."""
    contract = HashContract(algorithm=algorithm, block_size=16, seed=seed)

    assert find_contract(stored_by(contract, extra), seeds=["mine"]) == contract


@pytest.mark.parametrize("tagged", [True, False])
def test_an_adapters_event_shows_whether_extra_keys_are_tagged(tagged: bool) -> None:
    """With the adapter's path known, tagged and bare are distinguished."""
    contract = HashContract(algorithm="sha256", block_size=16, tagged=tagged)
    stored = stored_by(contract, ExtraKeys(lora=("sql", "/sql"), cache_salt="t1"))

    assert find_contract(stored, lora_paths={"sql": "/sql"}) == contract


def test_an_adapters_event_without_extra_keys_is_understood() -> None:
    """Older engines name the adapter but do not publish extra keys."""
    contract = HashContract(algorithm="sha256", block_size=16, tagged=False)
    stored = stored_by(contract, ExtraKeys(lora=("sql", "/sql")), extra_keys=None)

    assert find_contract(stored, lora_paths={"sql": "/sql"}) == contract


@pytest.mark.parametrize(
    "changes",
    [
        {"parent_block_hash": 5},
        {"block_hashes": []},
        {"block_size": 0},
        {"block_size": 64},
        {"token_ids": []},
        {"extra_keys": [[["image-id", 3]]]},
        {"extra_keys": [["salt", b"embeds"]]},
        {"extra_keys": [[b"embeds"]]},
    ],
)
def test_an_undecidable_event_finds_nothing(changes: dict[str, Any]) -> None:
    """A later part of a prompt, one without tokens, an image: wait for another event."""
    contract = HashContract(algorithm="sha256", block_size=16)
    stored = stored_by(contract, **changes)

    assert find_contract(stored) is None
    assert obeys(contract, stored) is None


def test_an_unknown_seed_finds_nothing() -> None:
    """A random seed cannot be guessed; the caller counts such events and translates."""
    stored = stored_by(HashContract(algorithm="xxhash", block_size=16, seed="random"))

    assert find_contract(stored) is None
    assert stored.is_computable
    assert stored.is_plain


def test_obeys_answers_yes_and_no() -> None:
    """A found contract is verified against later events."""
    contract = HashContract(algorithm="sha256", block_size=16)
    other = HashContract(algorithm="sha256", block_size=16, seed="0")

    assert obeys(contract, stored_by(contract)) is True
    assert obeys(other, stored_by(contract)) is False
    assert not stored_by(contract, ExtraKeys(cache_salt="t1")).is_plain


AHEAD = json.loads((Path(__file__).parent / "data" / "lookahead_vectors.json").read_text())


@pytest.mark.parametrize("vector", AHEAD["vectors"])
def test_digests_that_cover_the_next_tokens_are_vllms(vector: dict[str, Any]) -> None:
    """With lookahead, salts, adapters and items: as 0.33's hasher, at once or in two pieces."""
    contract = HashContract(
        algorithm=vector["algorithm"],
        block_size=vector["block_size"],
        lookahead=vector["lookahead"],
    )
    extra, ids = extra_of(vector), vector["token_ids"]
    media = [contracts.MediaSpan(*item) for item in vector["items"]]
    cut = len(vector["digests"]) // 2
    start = cut * contract.block_size
    later = [contracts.MediaSpan(n, s - start, e - start) for n, s, e in vector["items"]]

    whole = contract.digests(None, ids, extra, media)
    head = contract.digests(None, ids[: start + contract.lookahead], extra, media) if cut else []
    tail = contract.digests(head[-1] if head else None, ids[start:], extra, later)

    assert [digest.hex() for digest in whole] == vector["digests"]
    assert len(whole) == contract.num_blocks(len(ids))
    assert head + tail == whole


@given(
    st.lists(st.integers(0, 2**18), max_size=60),
    st.integers(0, 5),
    st.sampled_from((1, 4, 16)),
    st.sampled_from(("sha256", "sha256_cbor")),
)
def test_a_prompts_blocks_with_lookahead_are_those_of_any_that_goes_on(
    tokens: list[int], lookahead: int, block_size: int, algorithm: Algorithm
) -> None:
    """What follows adds blocks and changes none; another next token changes the last one."""
    contract = HashContract(algorithm=algorithm, block_size=block_size, lookahead=lookahead)

    keys, _ = contract.extend(None, tokens)
    longer, _ = contract.extend(None, [*tokens, *range(40)])

    assert longer[: len(keys)] == keys
    assert len(keys) == max(0, len(tokens) - lookahead) // block_size
    if keys and lookahead:
        last = len(keys) * block_size + lookahead - 1
        other, _ = contract.extend(None, [*tokens[:last], tokens[last] + 1])
        assert [a == b for a, b in zip(keys, other, strict=True)] == [
            *[True] * (len(keys) - 1),
            False,
        ]


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("lookahead", [1, 3])
def test_the_lookahead_is_found(lookahead: int, says: bool) -> None:
    """By the event's own tokens, or, where it has none, from what follows the first block."""
    contract = HashContract(algorithm="sha256_cbor", block_size=16, lookahead=lookahead)
    keys, _ = contract.extend(None, TOKENS)
    ahead = [TOKENS[end : end + lookahead] for end in (16, 32)]
    stored = stored_by(
        contract,
        block_hashes=list(keys),
        token_ids=TOKENS[:32],
        extra_keys=[None, None],
        lookahead=ahead if says else None,
    )

    assert find_contract(stored) == contract
    assert obeys(contract, stored) is True
    assert not obeys(HashContract(algorithm="sha256_cbor", block_size=16), stored)


@pytest.mark.parametrize(
    "ahead", [[], [[]], [[1] * 100], [[-1]], [[1], [2], [3], [4]]], ids=lambda a: str(a)[:20]
)
def test_a_lookahead_that_makes_no_sense_finds_nothing(ahead: list[list[int]]) -> None:
    """An engine may say anything: other tokens, none, too many."""
    contract = HashContract(algorithm="sha256", block_size=16, lookahead=2)
    stored = stored_by(contract, lookahead=ahead)

    assert find_contract(stored) is None
    assert not obeys(contract, stored)
