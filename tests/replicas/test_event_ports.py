"""router.replicas.replica: whose endpoints a replica's are, by what engines report."""

from __future__ import annotations

import pytest

from router.replicas.replica import EventOwners, EventPorts

Ports = tuple[int, int]


def ports(name: str, used: Ports, reported: Ports | None, *, host: str = "h") -> EventPorts:
    """A replica with one rank: its event and replay port."""
    own = {} if reported is None else {0: _endpoints("*", reported)}
    return EventPorts.of(name, f"http://{host}:8000", {0: _endpoints(host, used)}, own)


def _endpoints(host: str, numbers: Ports) -> tuple[str, str]:
    return f"tcp://{host}:{numbers[0]}", f"tcp://{host}:{numbers[1]}"


def foreign(*replicas: EventPorts) -> dict[str, str]:
    owners = EventOwners(replicas)
    found = {each.replica: owners.why_foreign(each.replica, 0) for each in replicas}
    return {name: reason for name, reason in found.items() if reason is not None}


@pytest.mark.parametrize(
    "replicas",
    [
        [ports("a", (1, 2), (1, 2)), ports("b", (3, 4), (3, 4))],
        [ports("a", (1, 2), None), ports("b", (3, 4), None)],
        # on two machines, with the ports that both have by default
        [ports("a", (1, 2), (1, 2), host="x"), ports("b", (1, 2), (1, 2), host="y")],
        # containers whose ports are mapped; one is as inside
        [ports("a", (11, 12), (1, 2)), ports("b", (21, 22), (1, 2))],
        [ports("a", (1, 2), (1, 2)), ports("b", (21, 22), (1, 2))],
        # mapped to what another one, which is mapped, too, has inside
        [ports("a", (11, 12), (1, 2)), ports("b", (2, 3), (5, 6))],
    ],
)
def test_endpoints_of_their_own_are_followed(replicas: list[EventPorts]) -> None:
    assert foreign(*replicas) == {}


@pytest.mark.parametrize(("used", "reported"), [((1, 2), (3, 4)), ((2, 3), (5, 6))])
def test_events_where_another_one_publishes_or_replays_are_foreign(
    used: Ports, reported: Ports
) -> None:
    found = foreign(ports("a", (1, 2), (1, 2)), ports("b", used, reported))

    assert found == {"b": f"events[0]: h:{used[0]} is an event endpoint of a, too"}


@pytest.mark.parametrize("reported", [None, (1, 2)])
def test_an_endpoint_without_a_known_owner_is_not_followed(reported: Ports | None) -> None:
    assert set(foreign(ports("a", (1, 2), reported), ports("b", (1, 2), reported))) == {"a", "b"}


def test_exchanged_endpoints_are_foreign() -> None:
    found = foreign(ports("a", (3, 4), (1, 2)), ports("b", (1, 2), (3, 4)))

    assert found == {
        "a": "events[0]: h:3 is an event endpoint of b",
        "b": "events[0]: h:1 is an event endpoint of a",
    }


def test_a_replica_that_is_gone_has_no_endpoint() -> None:
    owners = EventOwners([ports("old", (1, 2), (1, 2)), ports("new", (1, 2), (1, 2))])

    assert owners.why_foreign("new", 0, lambda name: name != "old") is None
    assert owners.why_foreign("new", 0) is not None
    assert owners.why_foreign("stranger", 0) is None


def test_only_the_rank_that_is_wrong_is_foreign() -> None:
    two = EventPorts.of(
        "two",
        "http://h:1",
        {0: ("tcp://h:5557", None), 1: ("tcp://h:1", None)},
        {0: ("tcp://*:5557", None), 1: ("tcp://*:5558", None)},
    )
    owners = EventOwners([two, ports("a", (1, 2), (1, 2))])

    assert owners.why_foreign("two", 0) is None
    assert owners.why_foreign("two", 1) == "events[1]: h:1 is an event endpoint of a, too"


@pytest.mark.parametrize(
    ("used", "reported", "said"),
    [
        ((1, 2), (1, 2), None),
        ((1, 2), None, None),
        ((1, 2), (3, 2), "events[0] is h:1, and its engine reports port 3"),
        ((1, 2), (1, 4), "replay[0] is h:2, and its engine reports port 4"),
    ],
)
def test_another_port_than_the_engine_reports_is_doubtful(
    used: Ports, reported: Ports | None, said: str | None
) -> None:
    assert ports("a", used, reported).why_doubtful() == said


def test_ranks_in_another_order_are_doubtful_and_paths_are_not() -> None:
    order = EventPorts.of(
        "a",
        "http://h:1",
        {0: ("tcp://h:2", None), 1: ("tcp://h:1", None)},
        {0: ("tcp://*:1", None), 1: ("tcp://*:2", None)},
    )
    path = EventPorts.of("a", "http://h:1", {0: ("ipc:///x", None)}, {0: ("ipc:///y", None)})

    assert order.why_doubtful() == "events[0] is h:2, and its engine reports port 1"
    assert path.why_doubtful() is None
