"""router.cluster.candidate_source: names that routers have in common."""

from __future__ import annotations

import pytest

from policies import CandidateId
from router.base.messages import StreamId
from router.cluster.candidate_source import CandidateNames
from router.config import ReplicaConfig
from router.replicas import Fleet
from router.replicas.registry import Registry
from tests.replicas.work import replica


def names() -> CandidateNames:
    """One replica with a given name and two ranks, one that is known by its address."""
    registry = Registry(
        [ReplicaConfig(url="http://x", name="east"), ReplicaConfig(url="http://[::1]:8/")]
    )
    fleet = Fleet()
    fleet.members.add(replica("east", num_ranks=2))
    fleet.members.add(replica("r2"))
    return CandidateNames(registry, fleet)


@pytest.mark.parametrize(
    ("candidate", "stream_id"),
    [("east#0", "east#0"), ("east#1", "east#1"), ("r2", "http://[::1]:8#0")],
)
def test_there_and_back(candidate: str, stream_id: str) -> None:
    """The given name, else the address; the rank is always said."""
    made = names()

    assert made.stream_id_of(CandidateId(candidate)) == stream_id
    assert made.candidate_of(StreamId(stream_id)) == candidate


@pytest.mark.parametrize(
    "stream_id",
    ["east", "east#2", "east#x", "east#²", "r2#0", "http://[::1]:8#1", "#0", "", "pool/m"],
)
def test_what_is_not_here_is_none(stream_id: str) -> None:
    """Ranks that are not there, local names, no stream at all."""
    assert names().candidate_of(StreamId(stream_id)) is None


def test_a_removed_replica_has_no_stream() -> None:
    """Its requests may still run."""
    assert names().stream_id_of(CandidateId("r9")) is None
