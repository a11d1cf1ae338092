"""Which replica issued a response: bounded, and shared with other routers once."""

from __future__ import annotations

from router.replicas.response_owners import ResponseKey, ResponseOwners, response_key

ONE, TWO, THREE = (ResponseKey(name) for name in ("one", "two", "three"))


def test_the_one_not_asked_for_longest_goes() -> None:
    owners = ResponseOwners(max_responses=2)
    owners.note(ONE, "east")
    owners.note(TWO, "west")
    owners.get(ONE)
    owners.learn(THREE, "east")

    assert (owners.get(ONE), owners.get(TWO), owners.get(THREE)) == ("east", None, "east")
    assert len(owners) == 2


def test_what_was_issued_here_is_shared_once() -> None:
    owners = ResponseOwners()
    owners.note(ONE, "east")
    owners.learn(TWO, "west")
    unsaved = owners.unsaved()
    owners.saved(unsaved)

    assert unsaved == {ONE: "east"}
    assert owners.unsaved() == {}


def test_what_redis_lost_is_unsaved_again() -> None:
    """In the order in which it was issued, without what other routers noted."""
    owners = ResponseOwners()
    for key in (ONE, TWO):
        owners.note(key, "east")
        owners.learn(THREE, "west")
        owners.saved({ONE: "east"})
    owners.lost()

    assert owners.unsaved() == {ONE: "east", TWO: "east"}
    owners.saved({ONE: "east", TWO: "east"})
    owners.lost()
    assert list(owners.unsaved()) == [ONE, TWO]


def test_a_key_is_of_an_id_and_its_owner() -> None:
    assert response_key("resp_1", "a") != response_key("resp_1", "b")
    assert response_key("resp_1", "a") == response_key("resp_1", "a")
    assert "resp_1" not in response_key("resp_1", "a")
