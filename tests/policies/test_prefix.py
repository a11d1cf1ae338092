""""""

from __future__ import annotations

from collections import Counter

from policies import CandidateId, create
from policies.hashing import clockwise, draw, mix, rendezvous, text_hash
from tests.policies.snapshots import replica, snapshot


def test_hash_follows_the_first_blocks() -> None:
    """Prompts that start alike go to one candidate, others spread."""
    fleet = [replica(f"r{index}") for index in range(8)]
    policy = create("prefix_hash")
    same = {
        policy.decide(snapshot(*fleet, first_blocks=5, session=n, number=n)).candidate
        for n in range(10)
    }
    spread = Counter(policy.decide(snapshot(*fleet, first_blocks=n)).candidate for n in range(4000))

    assert len(same) == 1
    assert len(spread) == 8
    assert max(spread.values()) < 2 * min(spread.values())


def test_hash_passes_full_candidates() -> None:
    """A candidate at the bound is passed; the next on the ring takes its prompts."""
    policy = create("prefix_hash", {"load_factor": 1.0})
    idle = [replica("a"), replica("b")]
    home = policy.decide(snapshot(*idle, first_blocks=5)).candidate
    full = [replica(name, requests=4 if name == home else 0) for name in "ab"]
    decision = policy.decide(snapshot(*full, first_blocks=5))

    assert decision.candidate != home
    assert decision.reason == "hash of the first blocks, 1 full passed, bound 3"


def test_hash_without_tokens() -> None:
    """Without tokens the session is hashed; without a session the least loaded is taken."""
    fleet = [replica("a", queue_ms=9.0), replica("b")]
    policy = create("prefix_hash")
    by_session = policy.decide(snapshot(*fleet, session=5)).candidate

    assert by_session == policy.decide(snapshot(*fleet, first_blocks=5)).candidate
    assert policy.decide(snapshot(*fleet)).candidate == "b"


def test_longest_prefix_wins_within_the_guard() -> None:
    """The longest match is taken while its queue is within the guard, and left beyond it."""
    policy = create("longest_prefix", {"guard_ms": 100})
    within = snapshot(replica("a"), replica("b", gpu=512, queue_ms=100.0))
    beyond = snapshot(replica("a", gpu=16), replica("b", gpu=512, queue_ms=101.0))

    assert policy.decide(within).candidate == "b"
    assert policy.decide(within).reason == (
        "512 of 1,000 tokens cached, queue 100 ms, 0 over the guard"
    )
    assert policy.decide(beyond).candidate == "a"


def test_longest_prefix_counts_all_tiers_then_the_nearest() -> None:
    """More tokens in any tier first; as many, then more on the GPU; as many, then least load."""
    policy = create("longest_prefix")
    tiers = snapshot(replica("a", gpu=500), replica("b", gpu=0, cpu=600))
    nearest = snapshot(replica("a", gpu=100, cpu=600), replica("b", gpu=600))
    load = snapshot(replica("a", gpu=600, queue_ms=5.0), replica("b", gpu=600))

    assert [policy.decide(s).candidate for s in (tiers, nearest, load)] == ["b", "b", "b"]


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
