from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from msgspec.structs import replace

from policies import Snapshot, create
from tests.policies.snapshots import quick, replica, snapshot, snapshots


@pytest.mark.parametrize(
    ("own", "threshold", "num_fetched"),
    [
        (400, 2.0, 0),  # equality computes locally, as in FAST'25
        (399, 2.0, 401),
        (399, 3.0, 0),
        (0, 1000.0, 800),  # nothing of its own: the ratio is infinite
        (800, 1.0, 0),
        (900, 1.0, 0),  # its own is the best
    ],
)
def test_a_ratio_decides_between_computing_and_transfer(
    own: int, threshold: float, num_fetched: int
) -> None:
    """Above `threshold` times its own prefix the best one is transferred, else never."""
    asked = snapshot(replica("a", gpu=own), tokens=1000, pool=800)

    policy = create("mooncake", {"kvcache_balancing_threshold": threshold})
    (cost,) = policy.decide(asked).costs
    assert cost.num_fetched_tokens == num_fetched
    assert cost.num_uncached_tokens == 1000 - own - num_fetched
    assert cost.ttft_ms == pytest.approx(10 + 0.1 * (1000 - own - num_fetched) + 0.01 * num_fetched)


def test_the_best_prefix_counts_wherever_it_is() -> None:
    """What another candidate holds makes the ratio; what is transferred the pool must have."""
    asked = snapshot(replica("a", gpu=300), replica("b", gpu=900), tokens=1000, pool=500)

    costs = create("mooncake").decide(asked).costs
    assert [cost.num_fetched_tokens for cost in costs] == [200, 0]


def test_without_a_pool_a_transfer_is_recomputing() -> None:
    """What cannot be read is computed, so the soonest first token wins as by `min_ttft`."""
    views = replica("a", queue_ms=5.0), replica("b", gpu=900, queue_ms=60.0), replica("c")
    asked = snapshot(*views, tokens=1000)

    decision = create("mooncake").decide(asked)
    assert [cost.num_fetched_tokens for cost in decision.costs] == [0, 0, 0]
    assert [cost.total_ms for cost in decision.costs] == pytest.approx([115, 80, 110])
    assert decision.candidate == "b"


def test_who_does_not_read_the_pool_computes() -> None:
    """A candidate without a connector is priced by its own prefix alone."""
    asked = snapshot(replace(replica("a"), reads_pool=False), replica("b"), tokens=1000, pool=800)

    decision = create("mooncake").decide(asked)
    assert [cost.num_fetched_tokens for cost in decision.costs] == [0, 800]
    assert decision.candidate == "b"


def test_a_low_threshold_leaves_the_holders_queue() -> None:
    """Priced transfers move load off the holder; a high threshold stays at the prefix."""
    holder, other = replica("holder", gpu=800, queue_ms=45.0), replica("other", gpu=300)
    asked = snapshot(holder, other, tokens=1000, pool=800)

    def chosen(threshold: float) -> str:
        policy = create("mooncake", {"kvcache_balancing_threshold": threshold})
        return policy.decide(asked).candidate

    assert chosen(1.0) == "other"  # 35 ms of 200 tokens and a read, against 75 ms
    assert chosen(10.0) == "holder"  # 75 ms against 80 for the 700 tokens it is to compute


def test_own_cpu_tier_is_own_prefix_at_the_price_of_reading() -> None:
    """The cpu tier counts as the candidate's own, and its tokens are fetched."""
    asked = snapshot(replica("a", gpu=100, cpu=600), tokens=1000, pool=700)

    decision = create("mooncake").decide(asked)
    assert decision.costs[0].num_fetched_tokens == 500
    assert decision.reason == "600 of 1,000 tokens cached, 700 at best, 500 to read, queue 0 ms"


def test_equal_estimates_are_drawn() -> None:
    """Cold prompts spread over an idle fleet."""
    idle = [replica(name) for name in "abc"]
    policy = create("mooncake")

    chosen = Counter(policy.decide(snapshot(*idle, number=n)).candidate for n in range(300))
    assert min(chosen[view.id] for view in idle) > 60


@quick
@given(asked=snapshots())
def test_the_lowest_estimate_wins(asked: Snapshot) -> None:
    """Prices add up, tokens too, and no other candidate's is lower."""
    decision = create("mooncake").decide(asked)

    for cost, view in zip(decision.costs, asked.replicas, strict=True):
        num_held = asked.request.num_tokens - cost.num_uncached_tokens
        assert num_held == view.num_gpu_tokens + cost.num_fetched_tokens
        assert num_held >= view.num_cpu_tokens
        assert cost.total_ms == pytest.approx(cost.ttft_ms + cost.others_ms)
    chosen = next(cost for cost in decision.costs if cost.id == decision.candidate)
    assert chosen.total_ms == min(cost.total_ms for cost in decision.costs)
