"""Translation's own limits; its use is tested in test_stream."""

from __future__ import annotations

from router.base.contracts import HashContract
from router.kv_events.stored_view import StoredView
from router.kv_events.translation import Translation
from tests.engine import BLOCK_SIZE, hashes, prompt

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
