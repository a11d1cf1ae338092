"""router.pool.directory: blocks through stores, removals and listings."""

from __future__ import annotations

from time import monotonic

from hypothesis import given
from hypothesis import strategies as st

from router.base.contracts import BlockKey
from router.pool.directory import PoolDirectory
from tests.samples import keys


def chain(num_blocks: int) -> list[BlockKey]:
    return keys(*range(1, num_blocks + 1))


def swept(directory: PoolDirectory) -> None:
    while directory.sweep(3):
        pass


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)), st.integers(0, 41))
def test_the_match_is_exact_for_any_holes(stored: set[int], removed: set[int], length: int) -> None:
    directory = PoolDirectory()
    directory.stored(keys(*stored, 1000, 1001))
    directory.removed(keys(*removed, 1001))
    blocks = keys(*range(length))

    expected = next((i for i in range(length) if i not in stored - removed), length)
    assert directory.match(blocks) == expected


def test_a_listing_drops_the_blocks_that_it_does_not_show() -> None:
    """Changes since it began count more than the listing."""
    directory = PoolDirectory()
    directory.stored(chain(8))
    directory.begin_listing()
    directory.stored(keys(50))
    directory.removed(keys(3, 4))
    directory.stored(keys(4))
    directory.listed(keys(1, 2, 3, 60))
    swept(directory)

    assert sorted(directory.keys()) == keys(1, 2, 4, 50, 60)


def test_an_incomplete_listing_drops_nothing() -> None:
    directory = PoolDirectory()
    directory.stored(chain(4))
    directory.begin_listing()
    directory.listed(keys(1, 9))
    directory.abandon_listing()
    assert sorted(directory.keys()) == keys(1, 2, 3, 4, 9)

    directory.begin_listing()
    directory.listed(keys(9))
    swept(directory)
    assert directory.keys() == keys(9)


def test_the_oldest_blocks_are_dropped_at_the_bound() -> None:
    """A master that cannot be listed must not fill the memory."""
    directory = PoolDirectory(max_blocks=128)
    directory.stored(chain(130))

    assert len(directory) <= 128
    assert 1 not in directory
    assert 130 in directory


def test_it_remembers_what_it_has_lost() -> None:
    """From the first block that it lost on; not what it never had, and not what it still has."""
    directory = PoolDirectory()
    directory.stored(chain(6))
    directory.removed(keys(3, 4, 9))

    assert directory.num_lost(chain(10)[2:], 0.0) == 4
    assert directory.num_lost(chain(10), 0.0) == 0
    assert directory.num_lost(chain(10)[6:], 0.0) == 0
    assert directory.num_lost([], 0.0) == 0


def test_what_was_lost_and_stored_again_counts_for_the_time_before() -> None:
    directory = PoolDirectory()
    directory.stored(chain(2))
    before_s = monotonic()
    directory.removed(chain(2))
    directory.stored(chain(2))

    assert directory.num_lost(chain(2), before_s) == 2
    assert directory.num_lost(chain(2), monotonic() + 1.0) == 0


def test_many_changes_are_taken_in_parts_of_a_message_s_size() -> None:
    here, there = PoolDirectory(), PoolDirectory()
    here.journal(True)
    here.stored(chain(120_000))
    num_parts = 0
    while (change := here.take_changes()) is not None:
        assert len(change.stored) <= 8 * 50_000
        there.apply(change)
        num_parts += 1

    assert num_parts == 3
    assert len(there) == 120_000


def test_blocks_on_disk_are_marked_until_they_are_in_memory_or_gone() -> None:
    """A listing does not show where a block is."""
    directory = PoolDirectory()
    directory.stored(chain(4))
    assert directory.stored_on_disk(keys(2, 3, 4)) == 3
    assert directory.stored_on_disk(keys(4)) == 0

    directory.begin_listing()
    directory.listed(chain(4))
    while directory.sweep(10):
        pass
    assert directory.match(chain(4)) == 4
    assert directory.on_disk(chain(4)) == [1, 2, 3]

    directory.stored(keys(2))
    assert directory.on_disk(chain(4)) == [2, 3]
    directory.removed(keys(3))
    assert directory.match(chain(4)) == 2
    directory.clear()
    directory.stored(chain(4))
    assert directory.on_disk(chain(4)) == []
