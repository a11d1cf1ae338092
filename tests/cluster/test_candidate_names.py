"""router.cluster.candidate_names: names that routers have in common."""

from __future__ import annotations

import pytest

from policies import CandidateId
from router.cluster.candidate_names import Feeds
from router.config import ReplicaConfig
from router.messages import FeedId
from router.replicas import Fleet
from router.replicas.registry import Registry
from tests.replicas.work import replica


def feeds() -> Feeds:
    """One replica with a given name and two ranks, one that is known by its address."""
    registry = Registry(
        [ReplicaConfig(url="http://x", name="east"), ReplicaConfig(url="http://[::1]:8/")]
    )
    fleet = Fleet()
    fleet.add(replica("east", num_ranks=2))
    fleet.add(replica("r2"))
    return Feeds(registry, fleet)


@pytest.mark.parametrize(
    ("candidate", "feed"),
    [("east#0", "east#0"), ("east#1", "east#1"), ("r2", "http://[::1]:8#0")],
)
def test_there_and_back(candidate: str, feed: str) -> None:
    """The given name, else the address; the rank is always said."""
    made = feeds()

    assert made.feed_of(CandidateId(candidate)) == feed
    assert made.candidate_of(FeedId(feed)) == candidate


@pytest.mark.parametrize(
    "feed", ["east", "east#2", "east#x", "east#²", "r2#0", "http://[::1]:8#1", "#0", "", "pool/m"]
)
def test_what_is_not_here_is_none(feed: str) -> None:
    """Ranks that are not there, local names, no feed at all."""
    assert feeds().candidate_of(FeedId(feed)) is None


def test_a_removed_replica_has_no_feed() -> None:
    """Its requests may still run."""
    assert feeds().feed_of(CandidateId("r9")) is None
