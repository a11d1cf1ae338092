from __future__ import annotations

import pytest

from router.replicas.health import Figures, Signs


def figures(num_tokens: float, num_requests: int = 1) -> Figures:
    return Figures(num_requests=num_requests, progress=(num_tokens,))


def test_an_answer_is_waited_for_until_its_deadline() -> None:
    signs, doubts = Signs(), []
    signs.on_doubt = lambda: doubts.append(1)

    assert signs.wait_s(100.0, 10.0, 103.0) == 7.0
    assert not doubts


def test_a_replica_is_looked_at_before_it_is_left() -> None:
    signs, doubts = Signs(), []
    signs.on_doubt = lambda: doubts.append(1)
    first = signs.wait_s(100.0, 10.0, 110.0)

    assert first is not None
    assert 0.0 < first < 1.0
    assert doubts
    assert signs.wait_s(100.0, 10.0, 115.0) is None


@pytest.mark.parametrize(
    ("read", "num_sent", "is_at_work"),
    [
        (figures(8), 1, True),
        (figures(7), 1, False),  # it hangs, whatever it says is running
        (figures(8), 2, False),  # it has lost a request
        (figures(8, 2), 1, True),  # of others
        (figures(8, 0), 0, False),  # it is idle
        (None, 1, False),
    ],
)
def test_figures_that_move_excuse_silence(
    read: Figures | None, num_sent: int, is_at_work: bool
) -> None:
    signs = Signs()
    signs.read(figures(7, 0), 0, 101.0)
    signs.read(read, num_sent, 112.0)

    assert (signs.wait_s(100.0, 10.0, 112.5) is not None) == is_at_work
    if is_at_work:
        assert signs.wait_s(100.0, 10.0, 112.5) == 9.5


def test_the_first_reading_has_the_benefit_of_the_doubt() -> None:
    signs = Signs()
    signs.read(figures(7), 1, 112.0)
    assert signs.wait_s(100.0, 10.0, 112.0) == 10.0
    signs.read(figures(7), 1, 123.0)

    assert signs.wait_s(100.0, 10.0, 123.0) is None


def test_figures_that_fail_now_and_then_are_no_work() -> None:
    """Those that stand still do so across a reading that failed."""
    signs = Signs()
    for at_s in range(100, 111, 2):
        signs.read(figures(7), 1, float(at_s))
        signs.read(None, 1, at_s + 1.0)

    assert signs.wait_s(100.0, 10.0, 112.0) is None


def test_other_answers_count_where_there_are_no_figures() -> None:
    signs = Signs()
    signs.said_s = 112.0
    assert signs.wait_s(100.0, 10.0, 113.0) == 9.0
    signs.read(figures(7, 0), 1, 113.0)

    assert signs.wait_s(100.0, 10.0, 113.0) is None


# -- stalled -------------------------------------------------------------------------------------


def asked(at_s: float = 100.0) -> Signs:
    """Signs of a replica that was idle when requests began to wait there."""
    signs = Signs()
    signs.read(figures(7, 0), 0, at_s - 1.0)
    signs.asked_s = at_s
    return signs


def verdicts(signs: Signs, shown: Figures, *times_s: float) -> list[bool | None]:
    return [signs.read(shown, 1, now_s) for now_s in times_s]


def test_a_replica_that_shows_no_sign_has_stalled() -> None:
    """Not before 20 s, and not while nobody waits."""
    assert verdicts(asked(), figures(7, 0), 105.0, 119.9, 120.0) == [None, None, True]
    signs = asked()
    signs.asked_s = None
    assert verdicts(signs, figures(7, 0), 105.0, 200.0) == [None, None]


def test_one_that_shows_requests_and_stands_still_is_waited_for_longer() -> None:
    signs = asked()
    assert verdicts(signs, figures(7, 1), 105.0, 130.0, 164.9) == [False, None, None]
    assert signs.read(figures(7, 1), 1, 165.0) is True
    assert signs.quiet_s(165.0) == 60.0


@pytest.mark.parametrize("sign", ["token", "figures"])
def test_a_sign_of_life_ends_it(sign: str) -> None:
    signs = asked()
    assert verdicts(signs, figures(7, 0), 110.0, 125.0) == [None, True]
    if sign == "token":
        signs.said_s = 126.0
    assert signs.read(figures(7 + (sign == "figures"), 0), 1, 130.0) is False
    assert signs.quiet_s(130.0) == 0.0


def test_how_long_a_replica_may_show_nothing_is_learned() -> None:
    """Twice as long as it did before it went on, within bounds."""
    signs = asked()
    verdicts(signs, figures(7, 0), 110.0, 125.0)
    signs.said_s = 130.0
    assert signs.read(figures(7, 0), 1, 130.0) is False

    assert verdicts(signs, figures(7, 0), 160.0, 189.9, 190.0) == [None, None, True]
    signs.said_s = 10_000.0
    signs.read(figures(7, 0), 1, 10_000.0)
    assert verdicts(signs, figures(7, 0), 10_119.0, 10_120.0) == [None, True]


def test_silence_that_is_excused_does_not_count() -> None:
    """It slept: what waited there meanwhile says nothing."""
    signs = asked()
    assert signs.read(figures(7, 0), 1, 500.0, is_excused=True) is None

    assert verdicts(signs, figures(7, 0), 505.0, 520.0) == [None, True]


def test_without_figures_nothing_has_stalled() -> None:
    signs = Signs()
    signs.asked_s = 100.0
    assert signs.read(None, 1, 500.0) is None
    assert signs.read(figures(7, 0), 1, 505.0) is None


def test_requests_that_left_because_they_were_overdue_count() -> None:
    """Until there is a sign of life."""
    signs = asked()
    signs.asked_s, signs.overdue_s = None, 100.0
    assert verdicts(signs, figures(7, 0), 110.0, 120.0) == [None, True]
    signs.said_s = 121.0
    assert verdicts(signs, figures(7, 0), 125.0, 300.0) == [False, None]


def test_a_replica_is_seen_at_work_if_its_figures_moved() -> None:
    """The first reading shows nothing yet."""
    signs = Signs()
    assert signs.works_since(0.0) is None
    signs.read(figures(7), 1, 100.0)
    assert signs.works_since(0.0) is False
    signs.read(figures(8), 1, 105.0)
    assert signs.works_since(100.0) is True
    assert signs.works_since(105.0) is False
