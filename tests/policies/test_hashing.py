from __future__ import annotations

from collections import Counter

from policies import CandidateId
from policies.hashing import clockwise, draw, mix, rendezvous, text_hash

IDS = tuple(CandidateId(f"r{index}") for index in range(5))


def test_mix_is_splitmix64() -> None:
    """The reference's first outputs for seed 0 and for seed 1234567."""
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(1234567) == 6457827717110365317


def test_draws_differ_by_seed_number_and_round() -> None:
    """Each of the three makes another draw."""
    assert len({draw(0, 0), draw(1, 0), draw(0, 1), draw(0, 0, 1)}) == 4


def test_text_hash_is_the_same_in_every_process() -> None:
    """A written-down value: routers must agree with each other and with yesterday."""
    assert text_hash("r1") == 0x83DD8A0C5B69BD30


def test_rendezvous_spreads_evenly() -> None:
    """Every candidate gets about its share of the keys."""
    shares = Counter(rendezvous(IDS, mix(key)) for key in range(5000))

    assert all(850 < count < 1150 for count in shares.values())


def test_clockwise_visits_every_candidate_once_round() -> None:
    """One walk passes each virtual node exactly once, from any key."""
    for key in (0, 1, 2**63, 2**64 - 1):
        assert Counter(clockwise(IDS, 10, key)) == dict.fromkeys(range(5), 10)
