"""router.replicas.registry: replicas that sources find, beside those configured and ordered."""

from __future__ import annotations

import pytest

from router.base.errors import ReplicaConflict
from router.base.messages import ReplicaRecord
from router.config import ReplicaConfig
from router.replicas.registry import Registry
from router.replicas.replica import Found

X, Y, Z = "http://10.0.0.1:1", "http://10.0.0.2:1", "http://10.0.0.3:1"


def at(url: str, name: str | None = None, *, is_ready: bool = True) -> Found:
    return Found(replica=ReplicaConfig(url=url, name=name), is_ready=is_ready)


def offered(subject: Registry) -> dict[str, str]:
    return {entry.name: entry.replica.url for entry in subject.entries if entry.is_offered}


def leaving(subject: Registry) -> list[str]:
    return [entry.name for entry in subject.entries if entry.leaving]


def test_new_replicas_of_a_source_enter_and_missing_ones_leave() -> None:
    subject = Registry()
    assert subject.follow("dns", [at(X), at(Y, "east")]) == ("10.0.0.1-1", "east")
    assert subject.follow("dns", [at(X), at(Y, "east")]) == ()

    assert subject.follow("dns", [at(Y, "east"), at(Z)]) == ("10.0.0.1-1", "10.0.0.3-1")
    assert offered(subject) == {"east": Y, "10.0.0.3-1": Z}
    assert leaving(subject) == ["10.0.0.1-1"]


def test_a_replica_that_comes_back_in_time_keeps_its_entry() -> None:
    subject = Registry()
    subject.follow("dns", [at(X)])
    before = subject.find("10.0.0.1-1")
    subject.follow("dns", [])
    subject.follow("dns", [at(X)])

    assert subject.find("10.0.0.1-1") == before


def test_found_replicas_leave_no_record() -> None:
    subject = Registry()
    subject.follow("dns", [at(X)])
    subject.follow("dns", [])
    subject.forget("10.0.0.1-1")

    assert (subject.records, subject.unsaved, subject.of_identity(X)) == ({}, {}, None)


def test_a_replica_of_several_sources_stays_until_the_last_drops_it() -> None:
    subject = Registry()
    subject.follow("dns", [at(X)])
    subject.follow("file", [at(X)])
    subject.follow("dns", [])
    assert (offered(subject), subject.entries[0].source) == ({"10.0.0.1-1": X}, "file")

    subject.follow("file", [])
    assert leaving(subject) == ["10.0.0.1-1"]


def test_sources_do_not_change_configured_or_added_replicas() -> None:
    subject = Registry([ReplicaConfig(url=X)])
    subject.add(ReplicaConfig(url=Y))
    before = subject.entries
    subject.follow("dns", [at(X, "a"), at(Y, "b")])
    subject.follow("dns", [])

    assert subject.entries == before


def test_a_found_replica_with_a_taken_name_is_not_entered() -> None:
    subject = Registry([ReplicaConfig(url=X, name="east")])
    subject.follow("dns", [at(Y, "east"), at(Z, "a"), at("http://10.0.0.4:1", "a")])

    assert offered(subject) == {"east": X, "a": Z}
    assert subject.not_entered == {
        Y: "the name 'east' is another replica's",
        "http://10.0.0.4:1": "the name 'a' is another replica's",
    }


def test_a_name_at_another_address_has_moved() -> None:
    subject = Registry()
    subject.follow("k8s", [at(X, "vllm-0")])

    assert subject.follow("k8s", [at(Y, "vllm-0")]) == ("vllm-0",)
    assert offered(subject) == {"vllm-0": Y}
    assert len(subject.entries) == 1


def test_another_name_at_an_address_is_another_replica() -> None:
    subject = Registry()
    subject.follow("k8s", [at(X, "vllm-a")])

    assert subject.follow("k8s", [at(X, "vllm-b")]) == ("vllm-a", "vllm-b")
    assert [entry.name for entry in subject.entries] == ["vllm-b"]


def test_a_replica_that_is_not_ready_is_kept_but_not_offered() -> None:
    subject = Registry()
    subject.follow("k8s", [at(X), at(Y, is_ready=False)])
    subject.follow("k8s", [at(X, is_ready=False), at(Y, is_ready=False)])
    assert (offered(subject), leaving(subject), len(subject.entries)) == ({}, [], 1)

    subject.follow("k8s", [at(X), at(Y)])
    assert list(offered(subject).values()) == [X, Y]


def test_an_order_to_drain_holds_and_is_shared() -> None:
    here, there, late = Registry(), Registry(), Registry()
    for subject in (here, there):
        subject.follow("k8s", [at(X, "vllm-0")])
    here.drain("vllm-0", draining=True)
    for subject in (there, late):
        subject.apply(here.records)
    assert late.entries == ()  # it is the source's to say that it is there
    late.follow("k8s", [at(Y, "vllm-0")])
    for subject in (here, there):
        subject.follow("k8s", [at(Y, "vllm-0")])  # it has moved; the order was about the name
    assert [offered(subject) for subject in (here, there, late)] == [{}, {}, {}]

    here.drain("vllm-0", draining=False)
    for subject in (there, late):
        subject.apply(here.records)
    assert [offered(s) for s in (here, there, late)] == [{"vllm-0": Y}] * 3


def test_an_order_to_drain_a_pod_does_not_reach_its_successor() -> None:
    here, there = Registry(), Registry()
    here.follow("k8s", [at(X, "vllm-a")])
    here.drain("vllm-a", draining=True)
    there.follow("k8s", [at(X, "vllm-b")])
    there.apply(here.records)

    assert offered(there) == {"vllm-b": X}


def test_a_record_about_a_found_one_needs_no_admin_hosts() -> None:
    here, there = Registry(), Registry()
    for subject in (here, there):
        subject.follow("file", [Found(replica=ReplicaConfig(url="https://engine.example"))])
    (name,) = offered(here)
    here.drain(name, draining=True)
    there.apply(here.records)

    assert offered(there) == {}


def test_a_found_one_cannot_be_removed_by_an_order() -> None:
    subject = Registry()
    subject.follow("dns vllm:8000", [at(X)])

    with pytest.raises(ReplicaConflict, match="found by dns vllm:8000: drain it"):
        subject.remove("10.0.0.1-1")


def test_a_removal_ordered_elsewhere_is_followed() -> None:
    subject, other = Registry(), Registry([ReplicaConfig(url=X)])
    subject.follow("dns", [at(X)])
    other.remove("r1")
    subject.apply(other.records)
    assert leaving(subject) == ["10.0.0.1-1"]
    subject.forget("10.0.0.1-1")
    subject.follow("dns", [at(X)])
    assert offered(subject) == {}
    assert "removed by an order" in subject.not_entered[X]

    subject.add(ReplicaConfig(url=X))
    assert list(offered(subject).values()) == [X]


def test_adding_a_found_replica_takes_it_from_its_source() -> None:
    subject = Registry()
    subject.follow("dns", [at(X)])
    subject.follow("dns", [])
    subject.add(ReplicaConfig(url=X))
    subject.follow("dns", [])

    assert offered(subject) == {"10.0.0.1-1": X}


def test_a_record_of_a_found_replica_takes_it_from_its_source() -> None:
    subject = Registry()
    subject.follow("dns", [at(X)])
    subject.apply({X: ReplicaRecord(url=X)})
    subject.follow("dns", [])

    assert offered(subject) == {"10.0.0.1-1": X}
