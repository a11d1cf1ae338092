"""Who is the culprit: requests at replicas that went down, on a clock of the test's own."""

from __future__ import annotations

import pytest

from router.replicas.deaths import MEMORY_S, REFUSED_S, Body, Deaths

X, Y, Z = Body(b"x"), Body(b"y"), Body(b"z")


def die(deaths: Deaths, replica: str, at_s: float, *bodies: Body, answered: str = "") -> None:
    """Have a replica go down with requests that were sent there half a second before."""
    deaths.went_down(replica, at_s)
    for body in bodies:
        deaths.broke(
            replica,
            body,
            is_answered=body.decode() in answered,
            begun_s=at_s - 0.5,
            now_s=at_s + 0.01,
        )


def refused(deaths: Deaths, now_s: float) -> set[Body]:
    return {body for body in (X, Y, Z) if deaths.refusal(body, now_s) is not None}


def test_a_request_is_refused_after_two_deaths() -> None:
    deaths = Deaths()
    assert not deaths.num_suspects
    die(deaths, "r1", 100.0, X)
    assert deaths.num_suspects
    assert not refused(deaths, 101.0)
    die(deaths, "r2", 102.0, X)

    refusal = deaths.refusal(X, 103.0)
    assert refusal is not None
    assert refusal.replicas == ("r1", "r2")
    assert refusal.until_s == 102.0 + REFUSED_S


@pytest.mark.parametrize(
    ("replica", "others", "other", "answered"),
    [
        pytest.param("r1", [], [], "", id="a replica that dies twice counts twice"),
        pytest.param("r2", [Y], [Y], "y", id="the only unanswered one at the first death"),
        pytest.param("r2", [Y], [Z], "x", id="alone at both deaths, though answered"),
    ],
)
def test_the_culprit_of_two_deaths_is_refused(
    replica: str, others: list[Body], other: list[Body], answered: str
) -> None:
    deaths = Deaths()
    die(deaths, "r1", 100.0, X, *others, answered=answered)
    die(deaths, replica, 101.0, X, *other, answered=answered)

    assert refused(deaths, 102.0) == {X}


def test_a_failure_counts_once_however_often_it_is_noted() -> None:
    deaths = Deaths()
    die(deaths, "r1", 100.0, X, X)
    deaths.broke("r1", X, is_answered=True, begun_s=99.5, now_s=101.0)

    assert deaths.num_deaths(X) == 1
    assert not refused(deaths, 102.0)


@pytest.mark.parametrize("wait_s", [0.0, 9.0, 11.0])
def test_a_failure_counts_for_a_death_within_ten_seconds(wait_s: float) -> None:
    deaths = Deaths()
    for replica, at_s in (("r1", 100.0), ("r2", 200.0)):
        deaths.broke(replica, X, is_answered=False, begun_s=at_s - 1, now_s=at_s)
        deaths.went_down(replica, at_s + wait_s)

    assert refused(deaths, 220.0) == ({X} if wait_s < 10 else set())


def test_a_request_that_was_sent_after_the_death_was_not_there() -> None:
    deaths = Deaths()
    for replica, at_s in (("r1", 100.0), ("r2", 200.0)):
        deaths.went_down(replica, at_s)
        deaths.broke(replica, X, is_answered=False, begun_s=at_s + 1, now_s=at_s + 2)

    assert deaths.num_deaths(X) == 0


def test_an_answered_request_is_no_suspect() -> None:
    deaths = Deaths()
    die(deaths, "r1", 100.0, X, Y)
    deaths.clear(Y)
    deaths.clear(Z)
    assert deaths.num_suspects == 1
    die(deaths, "r2", 101.0, X, Y)

    assert refused(deaths, 102.0) == {X}
    assert deaths.num_deaths(Y) == 0  # both deaths are the other one's doing


def test_two_requests_at_all_deaths_are_not_refused() -> None:
    deaths = Deaths()
    die(deaths, "r1", 100.0, X, Y, Z)
    die(deaths, "r2", 101.0, X, Y)
    assert not refused(deaths, 102.0)
    die(deaths, "r3", 103.0, X, Z)

    assert refused(deaths, 104.0) == {X}


def test_a_refusal_ends_after_ten_minutes_and_one_more_death_renews_it() -> None:
    deaths = Deaths()
    die(deaths, "r1", 100.0, X)
    die(deaths, "r2", 101.0, X)
    assert refused(deaths, 101.0 + REFUSED_S - 1) == {X}
    assert not refused(deaths, 101.0 + REFUSED_S)
    die(deaths, "r3", 800.0, X)
    assert refused(deaths, 801.0) == {X}


def test_a_death_is_forgotten_after_an_hour() -> None:
    deaths = Deaths()
    die(deaths, "r1", 100.0, X)
    die(deaths, "r2", 101.0, X)
    assert not refused(deaths, 102.0 + MEMORY_S)
    assert not deaths.num_suspects
    die(deaths, "r3", 5000.0, X)
    assert not refused(deaths, 5001.0)


def test_a_restart_that_no_probe_saw_counts_if_requests_failed() -> None:
    deaths = Deaths()
    deaths.restarted("r1", 50.0)
    for at_s in (100.0, 200.0):
        deaths.broke("r1", X, is_answered=False, begun_s=at_s - 1, now_s=at_s)
        deaths.restarted("r1", at_s + 1)

    assert refused(deaths, 202.0) == {X}


def test_memory_is_bounded() -> None:
    deaths = Deaths()
    for number in range(500):
        bodies = [Body(b"%d %d" % (number, i)) for i in range(100)]
        die(deaths, f"r{number}", 100.0 + number / 1000, *bodies)
        deaths.refusal(X, 101.0)
        deaths.broke("r", Body(b"b%d" % number), is_answered=False, begun_s=101.0, now_s=101.0)

    assert deaths.num_suspects <= 20_100
