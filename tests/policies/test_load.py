from __future__ import annotations

from collections import Counter

from policies import CostModel, create
from tests.policies.snapshots import replica, snapshot


def test_random_spreads() -> None:
    """Over many decisions every candidate gets about its share."""
    fleet = [replica(name) for name in "abcd"]
    chosen = Counter(
        create("random").decide(snapshot(*fleet, number=n, seed=7)).candidate for n in range(4000)
    )

    assert all(900 < count < 1100 for count in chosen.values())
    assert len(chosen) == 4


def test_round_robin_takes_turns() -> None:
    """One after the other, by decision number."""
    fleet = [replica(name) for name in "abc"]
    chosen = [create("round_robin").decide(snapshot(*fleet, number=n)).candidate for n in range(5)]

    assert chosen == ["a", "b", "c", "a", "b"]


def test_least_loaded_orders_by_queue_then_requests() -> None:
    """The shorter queue wins; between equal queues, fewer requests."""
    policy = create("least_loaded")

    short = snapshot(replica("a", queue_ms=9.0), replica("b", queue_ms=5.0, requests=8))
    few = snapshot(replica("a", requests=3), replica("b", requests=2))
    assert policy.decide(short).candidate == "b"
    assert policy.decide(few).candidate == "b"


def test_least_loaded_counts_decoding_requests_in_time() -> None:
    """Running decodes delay a first token by what the cost model learned."""
    cost = CostModel(ms_per_running=2.0)
    decoding = replica("a", requests=10, waiting=0, cost=cost)
    queued = replica("b", requests=1, waiting=1, queue_ms=15.0, cost=cost)

    assert create("least_loaded").decide(snapshot(decoding, queued)).candidate == "b"


def test_least_loaded_spreads_an_idle_fleet() -> None:
    """Equals are drawn, so the first candidate is not everybody's."""
    fleet = [replica(name) for name in "abc"]
    chosen = {
        create("least_loaded").decide(snapshot(*fleet, number=n)).candidate for n in range(30)
    }

    assert chosen == {"a", "b", "c"}


def test_power_of_two_takes_the_less_loaded_of_its_two() -> None:
    """The most loaded of all is never chosen: any other that is drawn is better."""
    fleet = [replica("busy", queue_ms=100.0), replica("a"), replica("b"), replica("c")]
    chosen = Counter(
        create("power_of_two").decide(snapshot(*fleet, number=n)).candidate for n in range(300)
    )

    assert set(chosen) == {"a", "b", "c"}
