from __future__ import annotations

from policies.view import CandidateId
from router.pool.suspects import PoolSuspects

R1, R2 = CandidateId("r1"), CandidateId("r2")


def test_a_suspect_is_not_counted_on_for_a_while_longer_each_time() -> None:
    """Reads that hung together count once; a fetch that succeeds ends it all."""
    suspects = PoolSuspects()
    assert suspects.suspect(R1, 100.0)
    assert not suspects.suspect(R1, 100.5)

    assert suspects.is_suspect(R1, 109.9)
    assert not suspects.is_suspect(R2, 101.0)
    assert not suspects.is_suspect(R1, 110.0)
    assert suspects.suspect(R1, 111.0)
    assert suspects.is_suspect(R1, 130.9)
    assert not suspects.is_suspect(R1, 131.0)
    suspects.clear(R1)
    suspects.suspect(R1, 200.0)
    assert not suspects.is_suspect(R1, 210.0)
