"""router.pool.readers: which candidates read the pool, by configuration or by their answers."""

from __future__ import annotations

from policies.view import CandidateId
from router.pool.readers import PoolReaders

R1, RANK = CandidateId("r1"), CandidateId("r2#1")


def miss(readers: PoolReaders, candidate: CandidateId) -> bool | None:
    return readers.observe(candidate, num_own_tokens=32, num_pool_tokens=320, num_reported=32)


def hit(readers: PoolReaders, candidate: CandidateId) -> bool | None:
    return readers.observe(candidate, num_own_tokens=32, num_pool_tokens=320, num_reported=320)


def test_several_missed_fetches_in_a_row_detach_a_candidate() -> None:
    """One fetch that is seen attaches it again."""
    readers = PoolReaders()
    for _ in range(4):
        assert miss(readers, R1) is None
    assert hit(readers, R1) is None
    for _ in range(4):
        assert miss(readers, R1) is None
    assert readers.reads(R1)

    assert miss(readers, R1) is False
    assert not readers.reads(R1)
    assert readers.detached() == [R1]
    assert miss(readers, R1) is None
    assert hit(readers, R1) is True
    assert readers.reads(R1)


def test_nothing_is_learned_if_no_fetch_was_predicted() -> None:
    readers = PoolReaders()
    for _ in range(20):
        readers.observe(R1, num_own_tokens=320, num_pool_tokens=320, num_reported=0)

    assert readers.reads(R1)


def test_the_configuration_counts_more_than_answers() -> None:
    """For all ranks of a replica."""
    readers = PoolReaders({"r1": True, "r2": False})
    for _ in range(20):
        miss(readers, R1)
        hit(readers, RANK)

    assert readers.reads(R1)
    assert not readers.reads(RANK)
    assert readers.is_configured(CandidateId("r3")) is None
    assert readers.detached() == []


def test_a_new_process_counts_as_a_reader_again() -> None:
    """A replica that restarted may have a connector now."""
    readers = PoolReaders()
    for _ in range(5):
        miss(readers, R1)
    readers.forget(R1)

    assert readers.reads(R1)
    assert miss(readers, R1) is None
