"""Offers and weights: fleets with unequal replicas."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from policies import CandidateId
from router.base.errors import NoReplicaAvailable
from router.replicas import Booking, Fleet, ProbeFailure, Replica, ServedModel
from tests.replicas.work import fleet_of, replica, send


def of_length(name: str, length: int | None) -> Replica:
    adapter = ServedModel(id="sql", parent="m", root="/l/1")
    return replace(replica(name), models=(ServedModel(id="m", max_model_len=length), adapter))


def offered(fleet: Fleet, num_tokens: int, model: str = "m") -> list[str]:
    return [each.id for each in fleet.offers.candidates(model, 0.0, num_tokens=num_tokens)]


@pytest.mark.parametrize("model", ["m", "sql"])
def test_a_request_goes_where_it_fits(model: str) -> None:
    fleet = Fleet()
    for name, length in (("a", 100), ("b", 200), ("c", 400)):
        fleet.members.add(of_length(name, length))

    assert offered(fleet, 100, model) == ["a", "b", "c"]
    assert offered(fleet, 101, model) == ["b", "c"]
    assert offered(fleet, 201, model) == ["c"]
    assert offered(fleet, 401, model) == ["c"]
    assert offered(fleet, 0, model) == ["a", "b", "c"]
    assert fleet.offers.longest(model) == 400

    fleet.members.probe_failed("c", ProbeFailure.REFUSED, 0.0)
    with pytest.raises(NoReplicaAvailable):
        fleet.offers.candidates(model, 0.0, num_tokens=201)
    fleet.members.remove("c")
    assert offered(fleet, 201, model) == ["b"]
    assert fleet.offers.longest(model) == 200


def test_a_length_that_is_not_said_has_no_limit() -> None:
    fleet = Fleet()
    fleet.members.add(of_length("a", 100))
    fleet.members.add(of_length("b", None))

    assert offered(fleet, 101) == ["b"]
    assert fleet.offers.longest("m") is None
    assert fleet.offers.longest("none") is None


def test_a_weight_is_a_part_of_an_equal_share() -> None:
    fleet = fleet_of("a", "b")
    fleet.members.add(replace(replica("spot"), weight=0.5))
    booking = Booking(num_uncached_tokens=1, num_cached_tokens=0)
    for _ in range(600):
        (least,) = sorted(
            fleet.load.views(fleet.offers.candidates("m", 0.0), {}, 0.0),
            key=lambda view: view.num_requests,
        )[:1]
        fleet.load.admit(CandidateId(least.id), booking, 0.0)

    counts = {status.id: status.num_requests for status in fleet.load.status(0.0)}
    assert counts["spot"] == pytest.approx(100, abs=2)
    assert counts["a"] == pytest.approx(250, abs=2)


def test_a_weighted_replica_alone_takes_everything() -> None:
    fleet = Fleet()
    fleet.members.add(replace(replica("spot"), weight=0.1))
    for _ in range(20):
        send(fleet, "spot", 0.0)

    assert offered(fleet, 0) == ["spot"]
