from __future__ import annotations

import pytest

from policies import create
from tests.policies.snapshots import replica, snapshot


@pytest.mark.parametrize(
    ("num_cached", "num_requests", "chosen"),
    [
        (600, 1, "cached"),  # 400 x 2 < 1000 x 1
        (400, 1, "idle"),  # 600 x 2 > 1000 x 1
        (900, 8, "cached"),  # 100 x 9 < 1000 x 1
        (900, 10, "idle"),  # 100 x 11 > 1000 x 1
    ],
)
def test_the_least_product_wins(num_cached: int, num_requests: int, chosen: str) -> None:
    """New tokens count as often as there are requests, this one included."""
    asked = snapshot(
        replica("cached", gpu=num_cached, requests=num_requests), replica("idle"), tokens=1000
    )

    decision = create("lmetric").decide(asked)

    assert decision.candidate == chosen
    assert "new tokens x" in decision.reason


def test_what_a_tier_or_pool_has_is_not_new() -> None:
    """Tokens count as cached wherever they can be read from."""
    in_tier = snapshot(replica("a", gpu=100), replica("b", cpu=200, requests=0), tokens=1000)
    in_pool = snapshot(replica("a", gpu=100, requests=1), replica("b"), tokens=1000, pool=900)

    assert create("lmetric").decide(in_tier).candidate == "b"
    assert create("lmetric").decide(in_pool).candidate == "b"


def test_equal_products_go_to_the_least_loaded() -> None:
    """The shorter queue wins among equals."""
    asked = snapshot(replica("a", queue_ms=9.0), replica("b", queue_ms=5.0), tokens=1000)

    assert create("lmetric").decide(asked).candidate == "b"
