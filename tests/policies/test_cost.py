from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from msgspec.structs import replace

from policies import CostModel, Snapshot, create
from policies.cost import candidate_costs, costs_of
from tests.policies.snapshots import PLAIN, quick, replica, snapshot, snapshots


@pytest.mark.parametrize(
    ("queue_ms", "alpha", "chosen"),
    [
        # 8,000 of 10,000 tokens are cached on "warm": own work 200 ms there, 1,000 on "cold".
        (790.0, 0.0, "warm"),
        (830.0, 0.0, "cold"),
        # On "cold" half a request comes while it is at work (1 in 2 s): 1,000 x 0.25 x alpha ms.
        (1000.0, 2.0, "warm"),
        (1400.0, 2.0, "cold"),
        (1190.0, 8.0, "warm"),  # at most half of a request waits, as only one conversation lives
        (1400.0, 8.0, "cold"),
    ],
)
def test_alpha_says_how_long_a_queue_the_cache_is_worth(
    queue_ms: float, alpha: float, chosen: str
) -> None:
    """The work that it saves, and the wait of those who would come meanwhile."""
    asked = snapshot(
        replica("cold"),
        replica("warm", gpu=8000, queue_ms=queue_ms),
        tokens=10_000,
        sessions=(1, 1),
        arrivals_per_s=1.0,
    )

    assert create("kv_aware", {"alpha": alpha}).decide(asked).candidate == chosen


def test_what_others_wait_is_their_number_times_the_work() -> None:
    """Arrivals during the queue and half of the work itself, more of them where all is busy.

    At most half of the conversations that live there: each sends one request meanwhile.
    """
    asked = snapshot(
        replica("few", queue_ms=500.0),
        replica("many", queue_ms=500.0),
        replica("busy", queue_ms=500.0, busy=0.8),
        replica("overrun", queue_ms=500.0, busy=1.0),
        tokens=10_000,
        sessions=(1, 5, 1, 1),
        arrivals_per_s=0.2,
    )

    costs = create("kv_aware", {"alpha": 3}).decide(asked).costs
    few = 3 * 1000.0 * 0.025e-3 * (500.0 + 500.0)
    most = 0.5 * 1000.0
    assert [cost.others_ms for cost in costs] == pytest.approx([few, 5 * few, 5 * few, most])


def test_where_no_conversation_is_known_requests_come_to_all_alike() -> None:
    """Without ids and first turns the queue alone tells candidates apart."""
    asked = snapshot(replica("a"), replica("b", queue_ms=100.0), tokens=1000, arrivals_per_s=10.0)

    costs = create("kv_aware", {"alpha": 1}).decide(asked).costs
    assert [cost.others_ms for cost in costs] == pytest.approx(
        [100 * 0.005 * 50, 100 * 0.005 * 150]
    )


def test_a_prompt_without_work_delays_nobody() -> None:
    """Its price is a number, also where no conversation is known."""
    asked = snapshot(replica("a", gpu=1000), tokens=1000, arrivals_per_s=10.0)

    assert [cost.others_ms for cost in create("kv_aware").decide(asked).costs] == [0.0]


def test_a_new_conversation_goes_where_fewer_live() -> None:
    """A shared system prompt does not draw every one of them to its first holder."""
    views = (replica("holder", gpu=500), replica("empty"))
    alike = snapshot(*views, tokens=2000, sessions=(3, 3), arrivals_per_s=10.0)
    crowded = snapshot(*views, tokens=2000, sessions=(6, 0), arrivals_per_s=10.0)

    assert create("kv_aware").decide(alike).candidate == "holder"
    assert create("kv_aware").decide(crowded).candidate == "empty"
    assert create("min_ttft").decide(crowded).candidate == "holder"


def test_prices_that_a_policy_leaves_out_are_computed() -> None:
    """All of them: those of some candidates cannot be compared with the others'."""
    asked = snapshot(replica("a"), replica("b", queue_ms=100.0), tokens=1000)
    decision = create("kv_aware", {"alpha": 0}).decide(asked)

    for costs in (decision.costs, decision.costs[:1], ()):
        assert costs_of(replace(decision, costs=costs), asked) == decision.costs


def test_a_conversation_stays_where_it_is() -> None:
    """However many live there: what it brings of its own is little."""
    asked = snapshot(
        replica("home", gpu=9800), replica("empty"), tokens=10_000, sessions=(20, 0),
        arrivals_per_s=20.0,
    )  # fmt: skip

    assert create("kv_aware").decide(asked).candidate == "home"


@quick
@given(asked=snapshots())
def test_min_ttft_is_kv_aware_without_the_others(asked: Snapshot) -> None:
    """Without prices for others the request's own first token is left."""
    greedy = create("min_ttft").decide(asked)

    assert greedy == create("kv_aware", {"alpha": 0}).decide(asked)
    best = min(cost.ttft_ms for cost in greedy.costs)
    chosen = next(cost for cost in greedy.costs if cost.id == greedy.candidate)
    assert chosen.ttft_ms <= best + max(1.0, 0.01 * best)


@quick
@given(asked=snapshots())
def test_prices_add_up(asked: Snapshot) -> None:
    """Tokens are computed or fetched or there; total = ttft + others; prefill as the model's."""
    costs = candidate_costs(asked, 4.0)

    for cost, view in zip(costs, asked.replicas, strict=True):
        num_tokens = cost.num_uncached_tokens + cost.num_fetched_tokens + view.num_gpu_tokens
        assert num_tokens == asked.request.num_tokens
        assert cost.num_fetched_tokens >= 0
        num_held = asked.request.num_tokens - cost.num_uncached_tokens
        assert cost.prefill_ms == pytest.approx(
            view.cost.prefill_ms(cost.num_uncached_tokens, num_held)
        )
        assert cost.total_ms == pytest.approx(cost.ttft_ms + cost.others_ms)


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


def test_each_candidate_is_credited_what_its_own_pool_has() -> None:
    """Another pool's tokens are no help; nor is a pool that it is not counted on to read."""
    asked = snapshot(
        replace(replica("a", gpu=100), num_pool_tokens=800),
        replace(replica("b", gpu=300), num_pool_tokens=0),
        replace(replica("c"), num_pool_tokens=None),
        replace(replica("d"), num_pool_tokens=900, reads_pool=False),
    )

    for name in ("min_ttft", "kv_aware", "mooncake"):
        decision = create(name).decide(asked)
        assert decision.candidate == "a"
        assert [cost.num_uncached_tokens for cost in decision.costs] == [200, 700, 1000, 1000]


@pytest.mark.parametrize("name", ["min_ttft", "kv_aware", "mooncake"])
def test_what_is_on_disk_is_read_at_the_price_of_the_disk(name: str) -> None:
    """And what it may be off by is the disk's, too: it is no better than a cache with a queue."""
    cost = CostModel(ms_per_fetched_token=0.01, ms_per_disk_token=0.05, disk_token_error_ms=0.02)
    reader = replace(replica("a", cost=cost), num_pool_tokens=800)
    cold = replace(reader, num_disk_tokens=600)
    home = replica("b", gpu=800, queue_ms=30.0, cost=cost)

    warm_ms, cold_ms = (
        create(name).decide(snapshot(each, home)).costs[0].fetch_ms for each in (reader, cold)
    )
    assert cold_ms - warm_ms == pytest.approx(600 * 0.04)
    assert create(name).decide(snapshot(reader, home)).candidate == "a"
    assert create(name).decide(snapshot(cold, home)).candidate == "b"


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


def test_a_prompt_stays_where_a_slower_tier_has_its_context() -> None:
    """A move pays for what it computes again: the reading at home is cheaper, and a queue there."""
    home, idle = replica("home", gpu=100, cpu=900, queue_ms=60.0), replica("idle", gpu=100)

    for name in ("min_ttft", "kv_aware"):
        decision = create(name).decide(snapshot(home, idle, tokens=1000))
        assert decision.candidate == "home"
        stay, move = decision.costs
        assert (stay.num_uncached_tokens, move.num_uncached_tokens) == (100, 900)
        assert stay.fetch_ms > 0.0
        assert stay.total_ms < move.total_ms
