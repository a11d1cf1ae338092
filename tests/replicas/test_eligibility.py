from __future__ import annotations

import pytest

from router.errors import NoReplicaAvailable
from router.records.outcome import Outcome
from router.replicas import Fleet, HealthRules, ProbeFailure
from tests.replicas.work import fleet_of, send

RULES = HealthRules(failures_to_open=1, backoff_s=60.0, slow_start_s=10.0)


def offered(fleet: Fleet, now_s: float = 0.0) -> list[str]:
    return [candidate.id for candidate in fleet.candidates("m", now_s)]


def fail(fleet: Fleet, *names: str) -> None:
    for name in names:
        fleet.end(send(fleet, name, 0.0), 0.0, Outcome.REPLICA_FAILED)


def test_a_broken_replica_is_left_out() -> None:
    fleet = fleet_of("a", "b", "c", rules=RULES)
    fail(fleet, "b")

    assert offered(fleet) == ["a", "c"]


def test_half_of_the_fleet_may_be_out_without_a_panic() -> None:
    fleet = fleet_of("a", "b", rules=RULES)
    fail(fleet, "b")

    assert offered(fleet) == ["a"]


def test_a_panic_offers_all_that_listen() -> None:
    fleet = fleet_of("a", "b", "c", "d", rules=RULES)
    fail(fleet, "b", "c")
    fleet.probe_failed("d", ProbeFailure.REFUSED, 0.0)

    assert offered(fleet) == ["a", "b", "c"]


def test_a_panic_does_not_raise_the_dead() -> None:
    fleet = fleet_of("a", "b", rules=RULES)
    for name in "ab":
        fleet.probe_failed(name, ProbeFailure.REFUSED, 0.0)

    with pytest.raises(NoReplicaAvailable):
        fleet.candidates("m", 0.0)


def test_a_recovering_replica_gets_its_share_only() -> None:
    fleet = fleet_of("a", "b", "c", rules=RULES)
    fleet.probe_failed("c", ProbeFailure.REFUSED, 0.0)
    fleet.probe_ok("c", 100.0)
    for _ in range(10):
        send(fleet, "a", 100.0)
        send(fleet, "b", 100.0)

    assert offered(fleet, 100.0) == ["a", "b", "c"]
    send(fleet, "c", 100.0)
    assert offered(fleet, 100.0) == ["a", "b"]
    assert offered(fleet, 105.0) == ["a", "b", "c"]
    for _ in range(20):
        send(fleet, "c", 106.0)
    assert offered(fleet, 106.0) == ["a", "b"]
    assert offered(fleet, 110.0) == ["a", "b", "c"]


def test_a_recovering_fleet_is_offered_whole_when_all_are_at_their_share() -> None:
    fleet = fleet_of("a", rules=RULES)
    fleet.probe_failed("a", ProbeFailure.REFUSED, 0.0)
    fleet.probe_ok("a", 100.0)
    send(fleet, "a", 100.0)

    assert offered(fleet, 100.0) == ["a"]
