"""router.kv_events.translation: whose blocks are not found, and how the key looks that is new.

Translation's own limits; its use is tested in test_stream.
"""

from __future__ import annotations

from typing import Any

import pytest

from policies.view import CandidateId
from router.base.contracts import ExtraKeys, HashContract
from router.base.messages import decode_status, encode
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.kv_events.contract_search import StoredView
from router.kv_events.stream import RankStream
from router.kv_events.translation import Translation
from tests.engine import BLOCK_SIZE, batch, hashes, prompt, stored

R1 = CandidateId("r1")
PATHS = {"sql": "/l/1"}
SQL = ExtraKeys(lora=("sql", "/l/1"))
SALTED = ExtraKeys(cache_salt="acme-secret")


def streamed(*payloads: bytes) -> RankStream:
    """Follow an engine that says this, after a plain prompt."""
    stream = RankStream(
        R1, BlockIndex(), block_size=BLOCK_SIZE, capacity_blocks=9, lora_paths=PATHS
    )
    stream.opened(has_replay=False)
    for sequence, payload in enumerate((batch(stored(prompt(1))), *payloads)):
        stream.receive(sequence, payload)
    return stream


def strange(keys: list[Any], later: list[Any] | None, lora_name: str | None = "sql") -> bytes:
    """A prompt's event whose hashes cover extra keys that are not known here."""
    event = stored(prompt(2), extra=ExtraKeys(lora=("sql", "another path")))
    event.extra_keys = [keys, later, later]
    event.lora_name = lora_name
    return batch(event)


@pytest.mark.parametrize(
    ("keys", "later", "lora_name", "form"),
    [
        (["sql"], ["sql"], "sql", "'sql'"),
        ([["lora_v2", "sql", 3]], [["lora_v2", "sql", 3]], "sql", "('lora_v2', 'sql', int)"),
        (["sql", ["rank", 8]], ["sql", ["rank", 8]], "sql", "'sql', ('rank', int)"),
        (["sql", ["block", 0]], ["sql", ["block", 1]], "sql", "'sql', (str, int)"),
        ([["lora_v2", "sql"]], [["lora_v2", "sql"]], None, "('lora_v2', 'sql')"),
        (["sql", "acme-secret"], ["sql"], "sql", "'sql', str"),
        (["sql", ["salt_v2", "acme-secret"]], ["sql"], "sql", "'sql', (str, str)"),
        ([], None, "sql", "none in the event"),
    ],
)
def test_an_adapters_key_of_a_new_form_is_named_once(
    keys: list[Any], later: list[Any] | None, lora_name: str | None, form: str
) -> None:
    """By its tags and types; what is in the first block alone may be a client's salt."""
    event = strange(keys, later, lora_name)
    stream = streamed(event, event)

    (notice,) = stream.take_notices()
    assert notice.fields == {"key": form, "prompts": "adapter sql"}
    assert stream.take_notices() == []
    assert stream.state_and_reason() == ("exact", "")
    assert stream.unknown == {"adapter sql"}
    assert decode_status(encode(stream.status())) == stream.status()


def test_an_adapter_is_known_again_when_its_blocks_are_named_as_ours() -> None:
    """It was reloaded, or its path is known by now."""
    stream = streamed(strange(["sql"], ["sql"]), batch(stored(prompt(3), extra=SQL)))

    assert not stream.unknown


def test_what_says_nothing_of_an_adapter_is_not_held_against_it() -> None:
    """An image in the prompt, a path that is not known yet, no tokens for a block."""
    short = stored(prompt(2)[:2], extra=SQL)
    short.block_hashes = [7]
    stream = streamed(
        strange(["sql", ["a-picture", 2]], ["sql", ["a-picture", 2 - BLOCK_SIZE]]),
        strange(["sql", ["a-picture", 2]], ["sql"]),
        strange([["lora_v2", "other"]], None, "other"),
        batch(short),
    )

    assert not stream.unknown


def test_salted_prompts_are_unknown_after_several_alone() -> None:
    """One text may be the digest of embeddings; of a salt nothing is shown."""
    salted = strange([["salt_v2", "acme-secret"]], None, None)
    seen = [streamed(*[salted] * number) for number in (2, 3)]

    assert [set(stream.unknown) for stream in seen] == [set(), {"salted"}]
    (notice,) = seen[1].take_notices()
    assert notice.fields == {"key": "(str, str)", "prompts": "salted"}
    known = streamed(salted, salted, batch(stored(prompt(3), extra=SALTED)), salted)
    assert not known.unknown


def test_prompts_of_kinds_that_are_not_understood_are_told_apart() -> None:
    """The base model's are as ever."""
    stream = streamed(strange(["sql"], ["sql"]))
    view = CacheView(BlockIndex())
    view.add(R1, stream)

    assert view.is_unknown(R1, SQL)
    assert not view.is_unknown(R1, SALTED)
    assert not view.is_unknown(R1, ExtraKeys())
    assert not view.is_unknown(CandidateId("r2"), SQL)


OWN = HashContract(algorithm="warmroute", block_size=BLOCK_SIZE)


def view(number: int, num_blocks: int = 1) -> StoredView:
    tokens = prompt(number, num_blocks)
    return StoredView(hashes(tokens), None, tokens, BLOCK_SIZE)


def test_the_oldest_names_fall_out() -> None:
    """The table is bounded; the youngest blocks can still be named."""
    translation = Translation(OWN, max_blocks=3)
    for number in range(5):
        translation.stored(view(number), {})

    known = [translation.key_of(hashes(prompt(number, 1))[0]) is not None for number in range(5)]
    assert known == [False, False, True, True, True]


def test_another_block_size_is_not_translated() -> None:
    """Its blocks are no links of our chain."""
    translation = Translation(HashContract(algorithm="warmroute", block_size=2 * BLOCK_SIZE))

    assert translation.stored(view(1, 2), {}) == []
