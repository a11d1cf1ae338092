"""router.experiments.slots: every router is in the same slot, and notices a clock that is set."""

from __future__ import annotations

from collections import Counter

import pytest

from router.experiments.slots import WallClock, place_in_block, slot_of


def test_slots_are_half_open() -> None:
    """A slot begins with its first instant."""
    assert [slot_of(at_s, 60.0) for at_s in (0.0, 59.999, 60.0, 120.0)] == [0, 0, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_block_has_every_place(size: int) -> None:
    """Also before the epoch; and the orders of blocks are drawn, each as likely."""
    orders = Counter(
        tuple(place_in_block(block * size + i, size, seed=7) for i in range(size))
        for block in range(-1000, 1000)
    )

    assert all(sorted(order) == list(range(size)) for order in orders)
    for order in orders if size <= 3 else ():
        expected = 2000 / {1: 1, 2: 2, 3: 6}[size]
        assert abs(orders[order] - expected) <= 4 * expected**0.5
    assert len(orders) == {1: 1, 2: 2, 3: 6, 5: 120}[size]


def test_another_seed_is_another_order() -> None:
    """Pairs of two experiments agree in half of the cases."""
    same = sum(place_in_block(2 * b, 2, 1) == place_in_block(2 * b, 2, 2) for b in range(1000))

    assert 430 < same < 570


def test_a_clock_that_is_set_is_noticed_once() -> None:
    """Forwards and back; slewing is no step."""
    clock = WallClock()

    assert not clock.look(1000.0, 0.0)
    assert not clock.look(1010.3, 10.0)  # slewed
    assert clock.look(1110.0, 11.0)
    assert clock.stepped_at_s == 1110.0
    assert not clock.look(1111.0, 12.0)
    assert clock.look(1000.0, 13.0)
    assert (clock.stepped_at_s, clock.num_steps) == (1000.0, 2)
