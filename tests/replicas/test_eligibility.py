from __future__ import annotations

import pytest

from router.base.errors import NoReplicaAvailable
from router.records.record import Outcome
from router.replicas import Fleet, HealthRules, ProbeFailure
from tests.replicas.work import fleet_of, send

RULES = HealthRules(failures_to_open=1, backoff_s=60.0, slow_start_s=10.0)


def offered(fleet: Fleet, now_s: float = 0.0) -> list[str]:
    return [candidate.id for candidate in fleet.offers.candidates("m", now_s)]


def fail(fleet: Fleet, *names: str) -> None:
    for name in names:
        fleet.load.end(send(fleet, name, 0.0), 0.0, Outcome.REPLICA_FAILED)


@pytest.mark.parametrize(
    ("names", "failed", "refused", "expected"),
    [
        ("abc", "b", "", ["a", "c"]),
        ("ab", "b", "", ["a"]),  # half of the fleet may be out without a panic
        ("abcd", "bc", "d", ["a", "b", "c"]),  # a panic offers all that listen
    ],
)
def test_broken_replicas_are_offered_in_a_panic_only(
    names: str, failed: str, refused: str, expected: list[str]
) -> None:
    fleet = fleet_of(*names, rules=RULES)
    fail(fleet, *failed)
    for name in refused:
        fleet.members.probe_failed(name, ProbeFailure.REFUSED, 0.0)

    assert offered(fleet) == expected


def test_a_panic_does_not_offer_dead_replicas() -> None:
    fleet = fleet_of("a", "b", rules=RULES)
    for name in "ab":
        fleet.members.probe_failed(name, ProbeFailure.REFUSED, 0.0)

    with pytest.raises(NoReplicaAvailable):
        fleet.offers.candidates("m", 0.0)


def test_a_recovering_replica_gets_its_share_only() -> None:
    fleet = fleet_of("a", "b", "c", rules=RULES)
    fleet.members.probe_failed("c", ProbeFailure.REFUSED, 0.0)
    fleet.members.probe_ok("c", 100.0)
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
    fleet.members.probe_failed("a", ProbeFailure.REFUSED, 0.0)
    fleet.members.probe_ok("a", 100.0)
    send(fleet, "a", 100.0)

    assert offered(fleet, 100.0) == ["a"]


@pytest.mark.parametrize(
    ("names", "stalled", "failed", "expected"),
    [
        ("ab", "a", "", ["b"]),
        ("abc", "ab", "", ["c"]),  # in a panic, too
        ("abc", "ab", "c", ["c"]),  # one that answers badly is better than one that does not
        ("ab", "ab", "", ["a", "b"]),
    ],
)
def test_stalled_replicas_are_offered_when_nothing_else_is_left(
    names: str, stalled: str, failed: str, expected: list[str]
) -> None:
    fleet = fleet_of(*names, rules=RULES)
    fail(fleet, *failed)
    for name in stalled:
        assert fleet.members.note_signs(name, True, 0.0)

    assert offered(fleet) == expected
