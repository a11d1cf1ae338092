from __future__ import annotations

from router.base.backoff import Suspects, Suspension

ONE, OTHER = "one", "other"


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


def test_each_suspicion_lasts_longer_until_an_attempt_succeeds() -> None:
    """Attempts that failed together count once."""
    suspects = Suspects(10.0, 300.0)
    assert suspects.suspect(ONE, 97.0, 100.0)
    assert not suspects.suspect(ONE, 98.0, 100.5)

    assert suspects.is_suspect(ONE, 109.9)
    assert not suspects.is_suspect(OTHER, 101.0)
    assert not suspects.is_suspect(ONE, 110.0)
    assert suspects.suspect(ONE, 110.5, 111.0)
    assert suspects.is_suspect(ONE, 130.9)
    assert not suspects.is_suspect(ONE, 131.0)
    suspects.succeeded(ONE, 132.0)
    suspects.suspect(ONE, 199.0, 200.0)
    assert not suspects.is_suspect(ONE, 210.0)


def test_one_attempt_at_a_time_is_made_after_a_pause() -> None:
    """If it fails, the next pause begins."""
    suspects = Suspects(10.0, 300.0)
    suspects.suspect(ONE, 99.0, 100.0)
    suspects.began(ONE, 111.0)
    assert suspects.is_suspect(ONE, 111.5)

    assert suspects.suspect(ONE, 111.0, 114.0)
    assert suspects.is_suspect(ONE, 133.9)
    suspects.began(ONE, 135.0)
    suspects.succeeded(ONE, 135.0)
    assert not suspects.is_suspect(ONE, 135.5)


def test_a_try_without_an_outcome_is_followed_by_another() -> None:
    """Its client may have left."""
    suspects = Suspects(10.0, 300.0)
    suspects.suspect(ONE, 99.0, 100.0)
    suspects.began(ONE, 111.0)

    assert not suspects.is_suspect(ONE, 121.0)


def test_an_attempt_from_before_the_suspicion_clears_nothing() -> None:
    """Later attempts may still fail."""
    suspects = Suspects(10.0, 300.0)
    suspects.suspect(ONE, 97.0, 100.0)
    suspects.succeeded(ONE, 97.0)

    assert suspects.is_suspect(ONE, 109.0)
    suspects.succeeded(OTHER, 97.0)
