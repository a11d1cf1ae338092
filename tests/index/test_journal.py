"""The journal: what changed, coalesced and absolute, and what its owner has to know."""

from __future__ import annotations

from policies.view import CandidateId
from router.base.contracts import BlockKey
from router.base.messages import TierChange, pack_keys, unpack_keys
from router.index.block_index import BlockIndex
from router.index.copies import StagedBlocks, Tier
from router.index.journal import Changes
from tests.samples import keys

A = CandidateId("a")


def noting(*held: int, **options: int) -> BlockIndex:
    """An index that held something before its journal began."""
    index = BlockIndex(**options)
    index.store(A, keys(*held))
    index.journal(A, on=True)
    return index


def change(
    stored: list[int],
    removed: list[int],
    *copies: tuple[int, int],
    tier: Tier = "gpu",
) -> TierChange:
    return TierChange(
        tier,
        stored=pack_keys(keys(*stored)),
        removed=pack_keys(keys(*removed)),
        copies=tuple((BlockKey(key), n) for key, n in copies),
    )


def test_nothing_is_noted_unless_a_router_wants_it() -> None:
    index = noting(1, 2)

    assert index.take_changes(A) is None
    index.journal(A, on=False)
    index.store(A, keys(3))
    assert index.take_changes(A) is None
    assert index.num_pending(A) == 0


def test_a_candidate_may_be_noted_before_it_holds_anything() -> None:
    index = BlockIndex()
    index.journal(A, on=True)
    index.store(A, keys(1))

    assert index.take_changes(A) == Changes((change([1], []),))


def test_changes_are_coalesced_and_absolute() -> None:
    index = noting(1)
    index.store(A, keys(2, 3))
    index.remove(A, keys(2))
    index.store(A, keys(2))
    index.remove(A, keys(3, 1))
    index.store(A, keys(7), "cpu")

    assert index.num_pending(A) == 7
    assert index.take_changes(A) == Changes(
        (change([2], [3, 1]), change([7], [], tier="cpu")),
    )
    assert index.take_changes(A) is None


def test_copies_are_published_while_there_are_several_and_once_more() -> None:
    index = noting(1, 1)
    index.store(A, keys(2, 2, 2))
    index.remove(A, keys(1))

    assert index.take_changes(A) == Changes((change([2, 1], [], (2, 3), (1, 1)),))
    index.store(A, keys(1))
    index.remove(A, keys(2, 2, 2))
    assert index.take_changes(A) == Changes((change([1], [2], (1, 2)),))
    index.remove(A, keys(1))
    index.remove(A, keys(1))
    index.store(A, keys(1))
    assert index.take_changes(A) == Changes((change([1], [], (1, 1)),))
    index.remove(A, keys(1))
    index.store(A, keys(1))
    assert index.take_changes(A) == Changes((change([1], []),))


def test_a_part_of_the_changes_is_not_whole() -> None:
    index = noting()
    index.store(A, keys(1, 2, 3))
    index.store(A, keys(1, 4))
    index.store(A, keys(5), "cpu")

    taken = [index.take_changes(A, 2) for _ in range(4)]

    assert taken == [
        Changes((change([1, 2], [], (1, 2)),), is_whole=False),
        Changes((change([3, 1], [], (1, 2)),), is_whole=False),
        Changes((change([4], []), change([5], [], tier="cpu"))),
        None,
    ]


def test_a_clear_makes_what_was_pending_uninteresting() -> None:
    index = noting(1)
    index.store(A, keys(2))
    index.clear(A)

    assert index.take_changes(A) == Changes(cleared=True)
    index.clear(A)
    index.store(A, keys(3))
    assert index.take_changes(A) == Changes((change([3], []),), cleared=True)


def test_changes_not_taken_in_time_are_reported_as_lost() -> None:
    index = noting(max_pending=4)
    index.store(A, keys(1, 1, 2))
    index.store(A, keys(3, 4))
    index.remove(A, keys(1))

    assert index.num_pending(A) == 0
    assert index.take_changes(A) == Changes(is_whole=False, is_lost=True)
    index.store(A, keys(9))
    assert index.take_changes(A) == Changes((change([9], []),))


def test_a_clear_makes_up_for_what_was_lost() -> None:
    index = noting(max_pending=2)
    index.store(A, keys(1, 2, 3))
    index.clear(A)
    index.store(A, keys(4))

    assert index.take_changes(A) == Changes((change([4], []),), cleared=True)


def test_blocks_that_fall_out_of_a_bounded_tier_are_noted() -> None:
    index = noting(max_cpu_blocks=64)
    index.store(A, keys(*range(64)), "cpu")
    index.take_changes(A)
    index.store(A, keys(100), "cpu")

    taken = index.take_changes(A)

    assert taken is not None
    assert unpack_keys(taken.changes[0].removed) == [0, 1]


def test_the_contents_are_true_slice_by_slice() -> None:
    index = noting(1, 2, 2, 3, 4, 5)
    index.store(A, keys(8), "cpu")
    index.take_changes(A)

    slices = index.contents(A, 2)
    first = next(slices)
    index.remove(A, keys(3, 1))
    index.store(A, keys(6, 5))

    assert first == change([1, 2], [], (2, 2))
    assert list(slices) == [
        change([4], []),
        change([5], [], (5, 2)),
        change([8], [], tier="cpu"),
    ]
    assert index.take_changes(A) == Changes((change([6, 5], [3, 1], (5, 2)),))


def test_the_contents_of_an_ended_epoch_are_none() -> None:
    index = noting(1, 2, 3)

    slices = index.contents(A, 1)
    next(slices)
    index.clear(A)
    index.store(A, keys(3))

    assert list(slices) == [change([], []), change([3], [])]
    assert list(index.contents(CandidateId("unknown"))) == []


def test_a_guess_is_no_contents() -> None:
    index = BlockIndex()
    index.remember(A, keys(1, 2), 10)

    assert list(index.contents(A)) == []


def test_a_swap_is_too_much_for_a_journal() -> None:
    """Everything has to be written then."""
    index = noting(1)
    index.replace(A, StagedBlocks())

    assert index.take_changes(A) == Changes(is_whole=False, is_lost=True)
