from __future__ import annotations

from router.base.backoff import Suspension


def test_suspension_doubles_until_it_is_reset() -> None:
    """Each pause is twice as long, up to the longest; a reset leaves the one that is on."""
    suspension = Suspension(10.0, 30.0)
    assert not suspension.is_on(0.0)
    assert [suspension.begin(100.0) for _ in range(4)] == [10.0, 20.0, 30.0, 30.0]
    assert suspension.is_on(129.9)

    suspension.reset()
    assert suspension.is_on(129.9)
    assert not suspension.is_on(130.0)
    assert suspension.begin(200.0) == 10.0


def test_jitter_shortens_a_pause_by_up_to_a_half() -> None:
    suspension = Suspension(10.0, 30.0)

    assert suspension.begin(100.0, jitter=0.0) == 5.0
    assert suspension.until_s == 105.0
    assert suspension.begin(200.0, jitter=0.5) == 15.0
