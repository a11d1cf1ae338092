"""The command lines of other routers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loadtest.dev.peers.contestants import CONTESTANTS, Contestant, Place

PLACE = Place(
    port=7,
    metrics_port=8,
    urls=("http://127.0.0.1:1", "http://127.0.0.1:2"),
    events=("tcp://127.0.0.1:3", "tcp://127.0.0.1:4"),
)


def named(text: str) -> Contestant:
    return next(one for one in CONTESTANTS if text in one.name)


@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda one: one.name)
def test_every_router_is_given_its_port_and_the_replicas(contestant: Contestant) -> None:
    """None of them is started before other replicas than the rest."""
    words = contestant.command(PLACE)

    assert words[words.index("--port") + 1] == "7"
    assert {"http://127.0.0.1:1", "http://127.0.0.1:2"} <= set(words)


def test_one_that_follows_events_is_given_each_replicas_socket() -> None:
    """Without them it would not know the caches, and the comparison would be unfair."""
    words = named("vllm-router `kv_aware`").command(PLACE)

    assert words.count("--kv-event-source") == 2
    assert "http://127.0.0.1:2=tcp://127.0.0.1:4" in words


def test_ours_runs_from_this_tree_and_others_from_their_own_environments(tmp_path: Path) -> None:
    """One folder for each package: their dependencies do not meet."""
    assert named("warmroute").python(tmp_path) == Path(sys.executable)
    assert named("smg").python(tmp_path) == tmp_path / "smg==1.13.0" / "bin" / "python"
