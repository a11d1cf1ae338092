"""The simulated cache against the emulator's block manager, call by call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.emulator.block_manager import Block, BlockManager, CachedSequence
from loadtest.simulator.blocks import Blocks, Held
from router.contracts import BlockKey
from router.kv_events.wire import BlockRemoved, BlockStored
from tests.effort import examples

SIZE = 4


class Pair:
    """Both caches, given the same calls and compared after each."""

    def __init__(self, num_blocks: int) -> None:
        self.emulated = BlockManager(num_blocks, SIZE)
        self.simulated = Blocks(num_blocks, SIZE, lambda: BlockKey(0))
        self.held: list[tuple[CachedSequence, Held]] = []

    def begin(self, prefix: Sequence[int], num_rest: int) -> None:
        """Admit a request for blocks of these names and so many tokens more."""
        num_tokens = SIZE * len(prefix) + num_rest
        names = [hash(tuple(prefix[: i + 1])) & 0xFFFF for i in range(len(prefix))]
        sequence = CachedSequence([0] * num_tokens, [name.to_bytes(8, "big") for name in names])
        held = Held([BlockKey(name) for name in names], num_tokens)
        hits: tuple[list[Block], list[int]]
        hits = self.emulated.match(sequence), self.simulated.match(held)
        assert len(hits[0]) == len(hits[1])
        given = self.emulated.allocate(sequence, num_tokens, hits[0], whole=True)
        assert self.simulated.allocate(held, num_tokens, hits[1], whole=True) is given
        if given:
            self.held.append((sequence, held))

    def end(self, index: int) -> None:
        """Free one of the requests."""
        if self.held:
            sequence, held = self.held.pop(index % len(self.held))
            self.emulated.free(sequence)
            self.simulated.free(held)

    def compare(self) -> None:
        assert self.simulated.num_free_blocks == self.emulated.num_free_blocks
        expected = {
            int.from_bytes(name, "big"): n for name, n in self.emulated.cached_digests().items()
        }
        assert self.simulated.cached_keys() == expected
        events = []
        for event in self.emulated.take_events():
            assert isinstance(event, BlockStored | BlockRemoved)
            events += [(isinstance(event, BlockStored), name) for name in event.block_hashes]
        changes = self.simulated.take_changes()
        assert [(change.is_stored, key) for change in changes for key in change.keys] == events


calls = st.one_of(
    st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(1, SIZE - 1)),
    st.integers(0, 20),
)


@settings(max_examples=examples(150))
@given(num_blocks=st.integers(2, 14), made=st.lists(calls, max_size=40))
def test_same_calls_same_cache(num_blocks: int, made: list[tuple[list[int], int] | int]) -> None:
    """Hits, copies, evictions and their order are the emulator's, whatever comes."""
    pair = Pair(num_blocks)

    for call in made:
        if isinstance(call, int):
            pair.end(call)
        else:
            pair.begin(*call)
        pair.compare()


def test_two_at_once_leave_two_copies() -> None:
    """Identical blocks computed at the same time are kept, and evicted, one by one."""
    blocks = Blocks(5, SIZE, lambda: BlockKey(99))
    both = [Held([BlockKey(1)], 5), Held([BlockKey(1)], 5)]
    assert blocks.allocate(both[0], 5)
    assert blocks.allocate(both[1], 5)  # matched before the first was there
    assert blocks.cached_keys() == {1: 2}
    for held in both:
        blocks.free(held)

    assert blocks.allocate(Held([], 3 * SIZE), 3 * SIZE)

    assert blocks.cached_keys() == {1: 1, 99: 3}
    assert blocks.num_evicted == 1


def test_replies_are_named_when_they_fill_a_block() -> None:
    """A block of the reply gets a name of its own, so no other prompt finds it."""
    names = iter(range(100, 200))
    blocks = Blocks(10, SIZE, lambda: BlockKey(next(names)))
    held = Held([BlockKey(1)], 2 * SIZE)

    assert blocks.allocate(held, 2 * SIZE)

    assert held.keys == [1, 100]


def test_too_small_a_cache_is_refused() -> None:
    """One block is the null block."""
    with pytest.raises(ValueError, match="at least 2 blocks"):
        Blocks(1, SIZE, lambda: BlockKey(0))
