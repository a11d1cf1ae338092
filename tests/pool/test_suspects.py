"""router.pool.suspects: candidates whose pool reads hang or fail."""

from __future__ import annotations

from policies.view import CandidateId
from router.pool.suspects import PoolSuspects

R1, R2 = CandidateId("r1"), CandidateId("r2")


def test_each_suspicion_lasts_longer_until_a_read_succeeds() -> None:
    """Reads that hung together count once."""
    suspects = PoolSuspects()
    assert suspects.suspect(R1, 97.0, 100.0)
    assert not suspects.suspect(R1, 98.0, 100.5)

    assert suspects.is_suspect(R1, 109.9)
    assert not suspects.is_suspect(R2, 101.0)
    assert not suspects.is_suspect(R1, 110.0)
    assert suspects.suspect(R1, 110.5, 111.0)
    assert suspects.is_suspect(R1, 130.9)
    assert not suspects.is_suspect(R1, 131.0)
    suspects.succeeded(R1, 132.0)
    suspects.suspect(R1, 199.0, 200.0)
    assert not suspects.is_suspect(R1, 210.0)


def test_one_read_at_a_time_tries_after_a_pause() -> None:
    """If it hangs, the next pause begins."""
    suspects = PoolSuspects()
    suspects.suspect(R1, 99.0, 100.0)
    suspects.began(R1, 111.0)
    assert suspects.is_suspect(R1, 111.5)

    assert suspects.suspect(R1, 111.0, 114.0)
    assert suspects.is_suspect(R1, 133.9)
    suspects.began(R1, 135.0)
    suspects.succeeded(R1, 135.0)
    assert not suspects.is_suspect(R1, 135.5)


def test_a_try_without_an_outcome_is_followed_by_another() -> None:
    """Its client may have left."""
    suspects = PoolSuspects()
    suspects.suspect(R1, 99.0, 100.0)
    suspects.began(R1, 111.0)

    assert not suspects.is_suspect(R1, 121.0)


def test_a_read_from_before_the_suspicion_clears_nothing() -> None:
    """Later reads may still hang."""
    suspects = PoolSuspects()
    suspects.suspect(R1, 97.0, 100.0)
    suspects.succeeded(R1, 97.0)

    assert suspects.is_suspect(R1, 109.0)
    suspects.succeeded(R2, 97.0)
