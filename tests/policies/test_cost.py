from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from policies import CostModel, Snapshot, create
from policies.cost import GREEDY, KvAware, candidate_costs
from tests.policies.snapshots import PLAIN, quick, replica, snapshot, snapshots


@pytest.mark.parametrize(
    ("queue_ms", "alpha", "chosen"),
    [
        # 8,000 of 10,000 tokens are cached on "warm": own work 210 ms there, 1,010 on "cold".
        (790.0, 0.0, "warm"),
        (830.0, 0.0, "cold"),
        (830.0, 2.0, "warm"),
        (2390.0, 2.0, "warm"),
        (2470.0, 2.0, "cold"),
    ],
)
def test_alpha_says_how_long_a_queue_the_cache_is_worth(
    queue_ms: float, alpha: float, chosen: str
) -> None:
    """Where all are busy a prefix is worth (1 + alpha) times the work it saves, and no more."""
    asked = snapshot(
        replica("cold", busy=1.0),
        replica("warm", busy=1.0, gpu=8000, queue_ms=queue_ms),
        tokens=10_000,
    )

    assert create("kv_aware", {"alpha": alpha}).decide(asked).candidate == chosen


@pytest.mark.parametrize(("queue_ms", "chosen"), [(900.0, "warm"), (1000.0, "cold")])
def test_where_no_replica_is_busy_alpha_has_its_floor(queue_ms: float, chosen: str) -> None:
    """On an idle fleet a prefix is worth alpha x 0.1 more than the 800 ms that it saves."""
    asked = snapshot(replica("cold"), replica("warm", gpu=8000, queue_ms=queue_ms), tokens=10_000)

    assert create("kv_aware", {"alpha": 2}).decide(asked).candidate == chosen


def test_busy_is_the_mean_of_the_candidates() -> None:
    """The price is the same for all, so an idle candidate is not charged for a busy one."""
    asked = snapshot(replica("a", busy=1.0), replica("b"), tokens=990)

    costs = create("kv_aware", {"alpha": 2}).decide(asked).costs
    assert [cost.others_ms for cost in costs] == pytest.approx([109.0, 109.0])


@quick
@given(asked=snapshots())
def test_min_ttft_is_kv_aware_without_the_others(asked: Snapshot) -> None:
    """Without prices for others the request's own first token is left."""
    greedy = create("min_ttft").decide(asked)

    assert greedy == GREEDY.decide(asked)
    best = min(cost.ttft_ms for cost in greedy.costs)
    chosen = next(cost for cost in greedy.costs if cost.id == greedy.candidate)
    assert chosen.ttft_ms <= best + max(1.0, 0.01 * best)


@quick
@given(asked=snapshots())
def test_prices_add_up(asked: Snapshot) -> None:
    """Tokens are computed or fetched or there; total = ttft + others; prefill as the model's."""
    costs = candidate_costs(asked, KvAware(beta=4.0))

    for cost, view in zip(costs, asked.replicas, strict=True):
        num_tokens = cost.num_uncached_tokens + cost.num_fetched_tokens + view.num_gpu_tokens
        assert num_tokens == asked.request.num_tokens
        assert cost.num_fetched_tokens >= 0
        num_held = asked.request.num_tokens - cost.num_uncached_tokens
        assert cost.prefill_ms == pytest.approx(
            view.cost.prefill_ms(cost.num_uncached_tokens, num_held)
        )
        assert cost.total_ms == pytest.approx(cost.ttft_ms + cost.others_ms)


def test_pressure_sends_new_conversations_to_the_emptier_cache() -> None:
    """A shared system prompt does not draw every new conversation to its first holder."""
    crowded = replica("crowded", gpu=500, pressure=1.0)
    asked = snapshot(crowded, replica("empty"), tokens=2000)

    even = snapshot(crowded, replica("full", pressure=1.0), tokens=2000)

    assert create("kv_aware").decide(asked).candidate == "empty"
    assert create("kv_aware").decide(even).candidate == "crowded"
    assert create("kv_aware", {"beta": 0}).decide(asked).candidate == "crowded"


def test_pressure_leaves_a_conversation_where_it_is() -> None:
    """What is cached outweighs a crowded cache; pressure counts up to one full turnover."""
    home = replica("home", gpu=9000, pressure=50.0)
    asked = snapshot(home, replica("empty"), tokens=10_000)

    assert create("kv_aware").decide(asked).candidate == "home"


def test_who_waits_announces_others() -> None:
    """What a request brings of its own goes where fewer wait; what is cached outweighs that."""
    new = snapshot(replica("a", requests=1, waiting=1), replica("b"), tokens=2000)
    shared = snapshot(replica("a", gpu=1900, requests=1, waiting=1), replica("b"), tokens=2000)
    crowd = snapshot(replica("a", gpu=1900, requests=9, waiting=9), replica("b"), tokens=2000)

    assert create("kv_aware").decide(new).candidate == "b"
    assert create("kv_aware").decide(shared).candidate == "a"
    assert create("kv_aware").decide(crowd).candidate == "b"
    assert create("kv_aware", {"gamma": 0}).decide(crowd).candidate == "a"


def test_a_replica_that_decodes_is_slowed() -> None:
    """A prefill costs each request that decodes there delta of it, and not the constant part."""
    asked = snapshot(replica("a", requests=20), replica("b"), tokens=2000)
    policy = create("kv_aware", {"alpha": 0, "delta": 0.5})

    crowded, idle = policy.decide(asked).costs
    assert crowded.others_ms == pytest.approx(20 * 0.5 * (crowded.prefill_ms - 10.0))
    assert idle.others_ms == 0.0


def test_running_decodes_are_part_of_the_queue() -> None:
    """What decodes already slows the first token down, at the learned rate."""
    cost = CostModel(ms_per_running=5.0)
    asked = snapshot(replica("a", requests=20, cost=cost), replica("b", requests=1, cost=cost))

    decision = create("min_ttft").decide(asked)
    assert decision.candidate == "b"
    assert decision.costs[0].queue_ms == 100.0


def test_pool_credits_everybody_at_the_price_of_the_fetch() -> None:
    """Tokens in the pool are fetched beyond a candidate's own match, never computed."""
    asked = snapshot(replica("a", gpu=300), replica("b"), replica("c", gpu=900), pool=800)

    decision = create("min_ttft").decide(asked)
    assert [cost.num_fetched_tokens for cost in decision.costs] == [500, 800, 0]
    assert [cost.num_uncached_tokens for cost in decision.costs] == [200, 200, 100]
    assert decision.candidate == "c"
    pooled = snapshot(replica("b", cpu=100), tokens=1000, pool=800)
    assert create("min_ttft").decide(pooled).reason == (
        "100 of 1,000 tokens cached, 700 more in the pool, queue 0 ms"
    )


def test_cold_prompts_spread_over_an_idle_fleet() -> None:
    """Equal totals go to fewer requests in flight, then to a draw."""
    policy = create("kv_aware")
    idle = [replica(name) for name in "abc"]
    chosen = Counter(policy.decide(snapshot(*idle, number=n)).candidate for n in range(300))
    busy = snapshot(replica("a", requests=1), replica("b"), replica("c", requests=2))

    assert len(chosen) == 3
    assert min(chosen.values()) > 60
    assert policy.decide(busy).candidate == "b"


def test_a_hair_of_queue_moves_no_conversation() -> None:
    """Totals within a millisecond or a percent are alike: the longer match stays."""
    asked = snapshot(replica("a", gpu=16), replica("b", gpu=32, queue_ms=2.0), tokens=48)

    assert create("kv_aware").decide(asked).candidate == "b"


def test_small_prompts_go_where_the_queue_is_short() -> None:
    """Below a block there is nothing to match, so load alone decides."""
    asked = snapshot(replica("a", queue_ms=40.0), replica("b", queue_ms=8.0), tokens=9)

    assert create("kv_aware").decide(asked).candidate == "b"


def test_slow_replicas_get_work_when_it_pays() -> None:
    """Candidates of different speed are compared in time, not in tokens."""
    slow = replica("slow", cost=CostModel(base_ms=10.0, ms_per_token=1.0))
    fast = replica("fast", queue_ms=300.0, cost=PLAIN)

    assert create("min_ttft").decide(snapshot(slow, fast, tokens=1000)).candidate == "fast"
    assert create("min_ttft").decide(snapshot(slow, fast, tokens=100)).candidate == "slow"


def test_reason_carries_the_figures() -> None:
    """The reason names what was cached and what was waited for."""
    asked = snapshot(replica("a", gpu=12_032, queue_ms=35.2), tokens=14_000)

    assert create("kv_aware").decide(asked).reason == (
        "12,032 of 14,000 tokens cached, queue 35 ms"
    )
