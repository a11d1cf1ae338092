"""Prompts that grow and fork."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.generated.prefix import Prefix


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.sampled_from([1, 7, 16]))
def test_prompts_extend_one_another(grown: list[int], block_size: int) -> None:
    """An id for each block; full ones stay, a partial one is never seen again."""
    prefix = Prefix(block_size)
    before: tuple[int, ...] = ()
    num_full = 0
    partial: set[int] = set()

    for num_tokens in grown:
        ids = prefix.grow(num_tokens).prompt()
        assert len(ids) == -(-prefix.num_tokens // block_size)
        assert ids[:num_full] == before[:num_full]
        assert not partial & set(ids)
        before, num_full = ids, prefix.num_tokens // block_size
        partial |= set(ids[num_full:])
