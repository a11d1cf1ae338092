"""What holds for every policy there is."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given

from policies import POLICIES, Policy, Snapshot, create
from tests.policies.snapshots import quick, replica, snapshot, snapshots

every = pytest.mark.parametrize("name", POLICIES)


@every
@quick
@given(asked=snapshots())
def test_chosen_is_offered_and_costs_match_candidates(name: str, asked: Snapshot) -> None:
    """A policy chooses one of the candidates, and prices all of them or none."""
    decision = create(name).decide(asked)

    ids = [view.id for view in asked.replicas]
    assert decision.candidate in ids
    assert decision.reason
    assert [cost.id for cost in decision.costs] in ([], ids)


@every
@quick
@given(asked=snapshots())
def test_same_snapshot_same_decision_also_through_json(name: str, asked: Snapshot) -> None:
    """A recorded snapshot reproduces its decision, costs and reason included."""
    policy = create(name)
    replayed = msgspec.json.decode(msgspec.json.encode(asked), type=Snapshot)

    assert policy.decide(asked) == policy.decide(asked) == create(name).decide(replayed)


@every
def test_documents_itself(name: str) -> None:
    """Docstring and parameter descriptions are what the documentation is made of."""
    policy = POLICIES[name]

    assert policy.name == name
    assert policy.__doc__
    schema = msgspec.json.schema(policy)["$defs"][policy.__name__]
    assert all("description" in field for field in schema["properties"].values())


@pytest.mark.parametrize("name", ["session_hash", "prefix_hash"])
def test_a_lost_candidate_moves_only_its_own_keys(name: str) -> None:
    """Hash policies keep every session in place but those of the candidate that went."""
    policy = create(name)
    fleet = [replica(f"r{index}") for index in range(8)]
    moved = 0

    for key in range(400):
        asked = {"session": key * 7919, "first_blocks": key * 104729}
        before = policy.decide(snapshot(*fleet, **asked)).candidate
        after = policy.decide(snapshot(*fleet[:3], *fleet[4:], **asked)).candidate
        if before == "r3":
            moved += 1
            assert after != "r3"
        else:
            assert after == before
    assert 20 <= moved <= 90


def test_the_base_decides_nothing() -> None:
    """The base class is a contract, not a policy."""
    with pytest.raises(NotImplementedError):
        Policy().decide(snapshot(replica("a")))
