from __future__ import annotations

from router.replicas.deaths import NUM_ALWAYS, WINDOW_S, RetryBudget


def spend(budget: RetryBudget, now_s: float) -> int:
    """Send again as often as is allowed, each time what was sent just now."""
    for number in range(1000):
        now_s += 1e-6
        if not budget.can_take("r1", now_s, now_s):
            return number
        budget.take("r1", now_s, now_s)
    return 1000


def test_a_few_may_always_be_sent_again() -> None:
    assert spend(RetryBudget(0.0), 100.0) == NUM_ALWAYS


def test_a_share_of_recent_requests_may_be_sent_again() -> None:
    budget = RetryBudget(0.2)
    for _ in range(1000):
        budget.requests.add(1.0, 100.0)

    assert abs(spend(budget, 100.0) - (200 + NUM_ALWAYS)) <= 1
    assert spend(budget, 100.01) <= 1  # what fades in that time
    assert spend(budget, 100.0 + 20 * WINDOW_S) == NUM_ALWAYS


def test_failures_of_one_loss_count_once() -> None:
    budget = RetryBudget(0.0)
    for _ in range(100):
        assert budget.can_take("r1", 99.0, 100.0)
        budget.take("r1", 99.0, 100.0)

    assert spend(budget, 101.0) == NUM_ALWAYS - 1


def test_a_loss_does_not_stay_open() -> None:
    budget = RetryBudget(0.0)
    budget.take("r2", 99.0, 100.0)

    spend(budget, 104.8)
    assert budget.can_take("r2", 99.0, 104.9)
    assert not budget.can_take("r2", 100.1, 104.9)
    spend(budget, 105.0)
    assert not budget.can_take("r2", 99.0, 105.1)
