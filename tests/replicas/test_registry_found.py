"""router.replicas.registry: replicas that sources find, beside those configured and ordered."""

from __future__ import annotations

import pytest

from router.config import ReplicaConfig
from router.errors import ReplicaConflict
from router.messages import ReplicaRecord
from router.replicas.registry import Found, Registry

X, Y, Z = "http://10.0.0.1:1", "http://10.0.0.2:1", "http://10.0.0.3:1"


def at(url: str, name: str | None = None, *, is_ready: bool = True) -> Found:
    return Found(replica=ReplicaConfig(url=url, name=name), is_ready=is_ready)


def offered(subject: Registry) -> dict[str, str]:
    return {entry.name: entry.replica.url for entry in subject.entries if entry.is_offered}


def leaving(subject: Registry) -> list[str]:
    return [entry.name for entry in subject.entries if entry.leaving]


def test_a_set_is_made_so() -> None:
    """What is new comes, under its name or one made of its address; what is gone is leaving."""
    subject = Registry()
    assert subject.follow("dns", [at(X), at(Y, "east")]) == ("10.0.0.1-1", "east")
    assert subject.follow("dns", [at(X), at(Y, "east")]) == ()

    assert subject.follow("dns", [at(Y, "east"), at(Z)]) == ("10.0.0.1-1", "10.0.0.3-1")
    assert offered(subject) == {"east": Y, "10.0.0.3-1": Z}
    assert leaving(subject) == ["10.0.0.1-1"]


def test_one_that_comes_back_before_it_is_gone_never_went() -> None:
    """Its entry is the old one."""
    subject = Registry()
    subject.follow("dns", [at(X)])
    before = subject.find("10.0.0.1-1")
    subject.follow("dns", [])
    subject.follow("dns", [at(X)])

    assert subject.find("10.0.0.1-1") == before


def test_what_sources_find_leaves_no_record() -> None:
    """Each router finds it itself: nothing is stored, so nothing can be fought over."""
    subject = Registry()
    subject.follow("dns", [at(X)])
    subject.follow("dns", [])
    subject.forget("10.0.0.1-1")

    assert (subject.records, subject.unsaved, subject.of_identity(X)) == ({}, {}, None)


def test_what_several_sources_find_stays_until_the_last_one_drops_it() -> None:
    """It is the first one's; then the other's."""
    subject = Registry()
    subject.follow("dns", [at(X)])
    subject.follow("file", [at(X)])
    subject.follow("dns", [])
    assert (offered(subject), subject.entries[0].source) == ({"10.0.0.1-1": X}, "file")

    subject.follow("file", [])
    assert leaving(subject) == ["10.0.0.1-1"]


def test_what_is_configured_or_added_is_left_alone() -> None:
    """A source neither changes nor removes it, under whatever name it finds it."""
    subject = Registry([ReplicaConfig(url=X)])
    subject.add(ReplicaConfig(url=Y))
    before = subject.entries
    subject.follow("dns", [at(X, "a"), at(Y, "b")])
    subject.follow("dns", [])

    assert subject.entries == before


def test_a_name_that_is_another_s_is_not_entered() -> None:
    """Of one that is configured or added, or of another address in the same answer."""
    subject = Registry([ReplicaConfig(url=X, name="east")])
    subject.follow("dns", [at(Y, "east"), at(Z, "a"), at("http://10.0.0.4:1", "a")])

    assert offered(subject) == {"east": X, "a": Z}
    assert subject.not_entered == {
        Y: "the name 'east' is another replica's",
        "http://10.0.0.4:1": "the name 'a' is another replica's",
    }


def test_a_name_at_another_address_has_moved() -> None:
    """As a pod of a stateful set that was restarted."""
    subject = Registry()
    subject.follow("k8s", [at(X, "vllm-0")])

    assert subject.follow("k8s", [at(Y, "vllm-0")]) == ("vllm-0",)
    assert offered(subject) == {"vllm-0": Y}
    assert len(subject.entries) == 1


def test_another_name_at_an_address_is_another_replica() -> None:
    """The address of a pod that is gone was given to a new one: nothing of the old one counts."""
    subject = Registry()
    subject.follow("k8s", [at(X, "vllm-a")])

    assert subject.follow("k8s", [at(X, "vllm-b")]) == ("vllm-a", "vllm-b")
    assert [entry.name for entry in subject.entries] == ["vllm-b"]


def test_one_that_is_not_ready_is_kept_but_not_offered() -> None:
    """If it is new, it is entered when it is ready."""
    subject = Registry()
    subject.follow("k8s", [at(X), at(Y, is_ready=False)])
    subject.follow("k8s", [at(X, is_ready=False), at(Y, is_ready=False)])
    assert (offered(subject), leaving(subject), len(subject.entries)) == ({}, [], 1)

    subject.follow("k8s", [at(X), at(Y)])
    assert list(offered(subject).values()) == [X, Y]


def test_an_order_to_drain_holds_and_is_shared() -> None:
    """Whichever way the other router found it, and whether it has yet."""
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


def test_a_drain_is_not_another_pods_at_the_same_address() -> None:
    """The record has the address of the one that was meant; a newer pod has it now."""
    here, there = Registry(), Registry()
    here.follow("k8s", [at(X, "vllm-a")])
    here.drain("vllm-a", draining=True)
    there.follow("k8s", [at(X, "vllm-b")])
    there.apply(here.records)

    assert offered(there) == {"vllm-b": X}


def test_a_record_about_a_found_one_needs_no_admin_hosts() -> None:
    """It adds nothing; where sources may find replicas is their own rule."""
    here, there = Registry(), Registry()
    for subject in (here, there):
        subject.follow("file", [Found(replica=ReplicaConfig(url="https://engine.example"))])
    (name,) = offered(here)
    here.drain(name, draining=True)
    there.apply(here.records)

    assert offered(there) == {}


def test_a_found_one_cannot_be_removed_by_an_order() -> None:
    """The source would bring it back; the error says what to do."""
    subject = Registry()
    subject.follow("dns vllm:8000", [at(X)])

    with pytest.raises(ReplicaConflict, match="found by dns vllm:8000: drain it"):
        subject.remove("10.0.0.1-1")


def test_an_order_elsewhere_that_it_goes_is_followed() -> None:
    """By a router that has it configured; it stays away until it is added again."""
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


def test_one_that_is_added_by_an_order_is_the_order_s() -> None:
    """The source that dropped it has no say any more."""
    subject = Registry()
    subject.follow("dns", [at(X)])
    subject.follow("dns", [])
    subject.add(ReplicaConfig(url=X))
    subject.follow("dns", [])

    assert offered(subject) == {"10.0.0.1-1": X}


def test_a_record_that_adds_it_makes_it_the_order_s() -> None:
    """It was added at another router: it stays when the source drops it."""
    subject = Registry()
    subject.follow("dns", [at(X)])
    subject.apply({X: ReplicaRecord(url=X)})
    subject.follow("dns", [])

    assert offered(subject) == {"10.0.0.1-1": X}
