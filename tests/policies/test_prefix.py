from __future__ import annotations

from collections import Counter

from policies import create
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
