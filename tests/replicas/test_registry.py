"""router.replicas.registry: what is configured, what is ordered, and whose word counts."""

from __future__ import annotations

from typing import Any

import pytest

from router.base.errors import ConfigError, ReplicaConflict, UnknownReplica
from router.base.messages import Evacuation, ReplicaRecord, decode_record, encode
from router.config import ReplicaConfig
from router.replicas.registry import Registry

X, Y, Z = "http://x:1", "http://y:1", "http://z:1"


def registry(*replicas: ReplicaConfig | str) -> Registry:
    configured = [r if isinstance(r, ReplicaConfig) else ReplicaConfig(url=r) for r in replicas]
    return Registry(configured)


def named(name: str, url: str) -> ReplicaConfig:
    return ReplicaConfig(url=url, name=name)


def at(url: str) -> ReplicaConfig:
    return ReplicaConfig(url=url)


def names(subject: Registry) -> dict[str, str]:
    return {entry.name: entry.replica.url for entry in subject.entries}


def offered(subject: Registry) -> list[str]:
    return [entry.name for entry in subject.entries if entry.is_offered]


# -- orders given here ---------------------------------------------------------------------------


def test_configured_replicas_are_entered() -> None:
    subject = registry(X, named("east", f"{Y}/"))

    assert names(subject) == {"r1": X, "east": Y}
    assert [entry.identity for entry in subject.entries] == [X, "east"]
    assert (subject.unsaved, subject.records) == ({}, {})


def test_added_replicas_get_names_that_were_never_used() -> None:
    subject = registry(X)
    assert subject.add(at(Y))[0].name == "r2"
    subject.remove("r2")
    subject.forget("r2")

    assert subject.add(named("r3", "http://w:1"))[0].name == "r3"
    assert subject.add(at(Z))[0].name == "r4"
    assert subject.add(at(Y))[0].name == "r2"
    assert subject.find("r4") == subject.of_identity(Z)
    assert subject.of_identity("http://nowhere") is None


def test_adding_again_changes_nothing() -> None:
    subject = registry(X)
    first = subject.add(named("east", Y))
    subject.saved("east", subject.unsaved["east"])

    assert first == (subject.find("east"), True)
    assert subject.add(named("east", f"{Y}/")) == (subject.find("east"), False)
    assert subject.add(at(Y)) == (subject.find("east"), False)
    assert subject.add(at(X)) == (subject.find("r1"), False)
    assert not subject.unsaved


@pytest.mark.parametrize(
    ("replica", "param"),
    [(named("r1", Y), "name"), (named("east", X), "url"), (named("west", Y), "name")],
)
def test_a_name_or_address_of_another_replica_is_refused(
    replica: ReplicaConfig, param: str
) -> None:
    subject = registry(X, named("west", Z))
    subject.remove("west")
    subject.forget("west")

    with pytest.raises(ReplicaConflict) as caught:
        subject.add(replica)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("replica", "param"),
    [
        (at("ftp://x"), "url"),
        (at("http://u:pw@x"), "url"),
        (named("a b", Y), "name"),
        (named("pool", Y), "name"),
        (ReplicaConfig(url=Y, events=("x:1",)), "events"),
        (ReplicaConfig(url=Y, replay=("tcp://x:1",)), "replay"),
    ],
)
def test_an_impossible_replica_is_refused(replica: ReplicaConfig, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry().add(replica)
    assert caught.value.param == param
    assert caught.value.message.startswith(param)


def test_a_replica_s_pool_is_one_of_those_there_are() -> None:
    here, there = Registry(pools=("east", "west")), Registry(pools=("north",))
    entry, _ = here.add(ReplicaConfig(url=X, pool="west"))

    with pytest.raises(ConfigError, match="pool: unknown pool 'south'; write east, west, or"):
        here.add(ReplicaConfig(url=Y, pool="south"))
    elsewhere = Registry(pools=("west",))
    elsewhere.apply(here.records)
    assert elsewhere.entries[0].replica.pool == entry.replica.pool == "west"
    assert there.apply(here.records) == ()


def test_orders_about_unknown_replicas_are_refused() -> None:
    subject = registry(X)
    for order in (lambda: subject.drain("r9", draining=True), lambda: subject.remove("r9")):
        with pytest.raises(UnknownReplica, match="no replica 'r9'; known: r1"):
            order()
    with pytest.raises(UnknownReplica, match="none yet"):
        registry().remove("r1")


def test_draining_and_leaving_replicas_are_not_offered() -> None:
    subject = registry(X, Y)
    subject.drain("r1", draining=True)
    subject.remove("r2")
    assert offered(subject) == []

    subject.drain("r1", draining=False)
    assert subject.add(at(Y))[1]
    assert offered(subject) == ["r1", "r2"]


def test_a_configured_replica_is_added_again_as_configured() -> None:
    east = ReplicaConfig(url=X, name="east", events=("tcp://x:5557",))
    subject = registry(east)
    subject.remove("east")
    subject.forget("east")
    assert subject.entries == ()

    entry, _ = subject.add(named("east", X))
    assert entry.replica == east


def test_orders_wait_until_they_are_stored() -> None:
    subject = registry(X)
    subject.drain("r1", draining=True)
    old = subject.unsaved[X]
    subject.drain("r1", draining=False)
    subject.saved(X, old)
    assert subject.unsaved == {X: ReplicaRecord(url=X)}

    subject.saved(X, ReplicaRecord(url=X))
    subject.saved(X, ReplicaRecord(url=X))
    assert subject.unsaved == {}
    assert subject.records == {X: ReplicaRecord(url=X)}


# -- orders given elsewhere ----------------------------------------------------------------------


def test_all_routers_follow_an_order_of_one() -> None:
    a, b = registry(X, Y), registry(Y, X)
    a.add(at(Z))
    a.add(named("east", "http://e:1"))
    a.drain("r1", draining=True)
    a.remove("r2")
    b.apply(a.records)

    assert names(b) == {"r1": Y, "r2": X, "r3": Z, "east": "http://e:1"}
    assert offered(b) == ["r3", "east"]
    assert [entry.leaving for entry in b.entries] == [True, False, False, False]
    assert b.apply(a.records) == ()
    assert b.unsaved == {}


def test_all_routers_evacuate_a_replica_until_it_is_used_again() -> None:
    """Also after a way through Redis."""
    a, b = registry(X), registry(X)
    when = Evacuation(begun=1.0, until=2.0)
    a.drain("r1", draining=True, evacuation=when)
    b.apply({key: decode_record(encode(record)) for key, record in a.records.items()})
    evacuated = [entry.evacuation for entry in b.entries]
    a.drain("r1", draining=False)
    b.apply(a.records)

    assert evacuated == [when]
    assert [entry.evacuation for entry in b.entries] == [None]


def test_a_missing_record_removes_no_replica() -> None:
    a, b = registry(), registry()
    a.add(at(Z))
    b.apply(a.records)
    b.apply({})

    assert names(b) == {"r1": Z}
    assert b.records == a.records


def test_a_removal_overrules_the_configuration() -> None:
    a = registry(X)
    a.remove("r1")
    late = registry(X, Y)
    late.apply(a.records)

    assert offered(late) == ["r2"]
    assert registry(Y).apply(a.records) == ()


def test_an_order_of_this_router_is_newer_than_a_stored_record() -> None:
    subject = registry(X)
    subject.drain("r1", draining=True)
    subject.apply({X: ReplicaRecord(url=X, draining=False)})
    assert offered(subject) == []

    subject.saved(X, subject.unsaved[X])
    subject.apply({X: ReplicaRecord(url=X, draining=False)})
    assert offered(subject) == ["r1"]


def test_a_name_may_move_to_another_address() -> None:
    moved = {"east": ReplicaRecord(url=Y, draining=True)}
    dynamic, configured = registry(), registry(named("east", X))
    dynamic.add(named("east", X))
    dynamic.saved("east", dynamic.unsaved["east"])
    dynamic.apply(moved)
    configured.apply(moved)

    assert (names(dynamic), offered(dynamic)) == ({"east": Y}, [])
    assert (names(configured), offered(configured)) == ({"east": X}, ["east"])


def test_a_number_of_this_router_is_not_a_name_of_another() -> None:
    subject = registry(X)
    subject.apply({"r1": ReplicaRecord(url=Y)})

    assert names(subject) == {"r1": X, "r2": Y}
    assert subject.of_identity("r1") == subject.find("r2")


def test_there_is_one_replica_at_an_address() -> None:
    subject = registry(X)
    subject.apply({"east": ReplicaRecord(url=X, draining=True)})
    assert (names(subject), offered(subject)) == ({"r1": X}, [])

    again = registry()
    again.apply({Y: ReplicaRecord(url=Y, removed=True), "east": ReplicaRecord(url=Y)})
    again.apply({"east": ReplicaRecord(url=Y), Y: ReplicaRecord(url=Y, removed=True)})
    assert (names(again), offered(again)) == ({"east": Y}, ["east"])


@pytest.mark.parametrize(
    ("identity", "record"),
    [
        ("a b", ReplicaRecord(url=X)),
        ("pool", ReplicaRecord(url=X)),
        ("east", ReplicaRecord(url="file:///etc/passwd")),
        (Y, ReplicaRecord(url=X)),
        ("east", ReplicaRecord(url=X, events=("nowhere",))),
    ],
)
def test_records_of_no_possible_replica_are_left_out(identity: str, record: ReplicaRecord) -> None:
    subject = registry()

    assert subject.refused(identity, record) is not None
    assert subject.apply({identity: record, Z: ReplicaRecord(url=Z)}) == ("r1",)
    assert names(subject) == {"r1": Z}
    assert identity not in subject.records


def test_a_record_of_a_replica_where_none_may_be_is_not_followed() -> None:
    inside, outside = "http://gpu.example:1", "http://169.254.169.254"
    subject = Registry([ReplicaConfig(url=inside)])
    subject.apply(
        {inside: ReplicaRecord(url=inside, draining=True), outside: ReplicaRecord(url=outside)}
    )

    assert names(subject) == {"r1": inside}
    assert subject.entries[0].draining


def test_roles_travel_with_orders() -> None:
    one, two = registry(), registry()
    added, _ = one.add(
        ReplicaConfig(
            url=X, name="p", role="prefill", transfer="mooncake", bootstrap="http://x:8998"
        )
    )

    two.apply({added.identity: decode_record(encode(one.records[added.identity]))})
    assert [entry.replica for entry in two.entries] == [added.replica]


def test_a_bootstrap_server_must_be_where_replicas_may_be() -> None:
    with pytest.raises(ConfigError, match="bootstrap: '169"):
        registry().add(ReplicaConfig(url=X, bootstrap="http://169.254.169.254:80"))


@pytest.mark.parametrize(
    "url",
    ["http://localhost:8001", "http://127.0.0.1:8001/v1", "HTTP://LOCALHOST:8001/"],
)
def test_another_spelling_of_an_address_is_the_replica_that_is_there(url: str) -> None:
    registry = Registry([ReplicaConfig(url="http://127.0.0.1:8001", name="a")])

    entry, is_new = registry.add(ReplicaConfig(url=url))

    assert (entry.name, is_new) == ("a", False)


@pytest.mark.parametrize(
    ("added", "field"),
    [
        ({"events": ("tcp://localhost:5557",)}, r"events\[0\]"),
        ({"events": ("tcp://[::1]:5559",), "replay": ("tcp://[::1]:5558",)}, r"replay\[0\]"),
        ({"events": ("tcp://127.0.0.1:5558",)}, r"events\[0\]"),
    ],
)
def test_a_replica_with_anothers_event_endpoint_is_not_added(added: Any, field: str) -> None:
    first = ReplicaConfig(
        url="http://127.0.0.1:8001",
        name="a",
        events=("tcp://127.0.0.1:5557",),
        replay=("tcp://127.0.0.1:5558",),
    )
    registry = Registry([first])

    with pytest.raises(ReplicaConflict, match=rf"{field}: localhost:555. is an address of 'a'"):
        registry.add(ReplicaConfig(url="http://127.0.0.1:8002", **added))
