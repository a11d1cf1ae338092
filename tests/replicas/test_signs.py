from __future__ import annotations

import pytest

from router.replicas.signs import Figures, Signs


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


def test_other_answers_count_where_there_are_no_figures() -> None:
    signs = Signs()
    signs.said_s = 112.0
    assert signs.wait_s(100.0, 10.0, 113.0) == 9.0
    signs.read(figures(7, 0), 1, 113.0)

    assert signs.wait_s(100.0, 10.0, 113.0) is None
