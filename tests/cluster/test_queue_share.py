"""QueueShare: queues of several routers spend one idle time, and count all that wait."""

from __future__ import annotations

from policies import CandidateId
from router.base.messages import Left, Notes
from router.cluster.peers import LEASE_S
from router.cluster.queue_share import IdleSpent, WaitingNow
from router.replicas.conversations import Conversations
from tests.nodes import Node

R1, R2 = CandidateId("r1"), CandidateId("r2")


def two() -> tuple[Node, Node]:
    """Make two routers that name their replicas differently."""
    return Node("a", ("x", "y")), Node("b", ("y", "x"))


def test_a_wait_at_another_router_is_no_pause() -> None:
    """Both learn the same usual pause, so silent conversations keep their room for as long."""
    a, b = two()
    for node, there in ((a, R1), (b, R2)):
        node.conversations.begin(7, there, 100, 0, 1.0)
        node.conversations.end(7, 2.0)
    a.conversations.asked(7, 2.5)
    a.queues.asked(7)
    b.receive(a, now_s=2.5)
    for node, there in ((a, R1), (b, R2)):
        node.conversations.begin(7, there, 200, 100, 22.5)

    assert b.conversations.patience_s == a.conversations.patience_s
    assert b.conversations.patience_s < Conversations().patience_s


def test_idle_time_is_spent_once() -> None:
    """A prompt that one router sends for it leaves the other none."""
    a, b = two()
    a.fleet.load.spend_idle_time(R1, 250.0, 1.0)
    a.queues.spent(R1, 250.0)
    b.receive(a, now_s=1.0)

    for node, there, elsewhere in ((a, R1, R2), (b, R2, R1)):
        assert node.fleet.load.has_idle_time(there, 49.0, 1.0)
        assert not node.fleet.load.has_idle_time(there, 51.0, 1.0)
        assert node.fleet.load.has_idle_time(elsewhere, 299.0, 1.0)


def test_prompts_that_wait_elsewhere_count_until_they_do_not() -> None:
    a, b = two()
    a.queues.waits({R1: 3, R2: 1}.copy, 1.0)
    b.receive(a, now_s=1.0)
    assert (b.queues.num_waiting(R2), b.queues.num_waiting(R1)) == (3, 1)
    assert (a.queues.num_waiting(R1), a.queues.num_waiting(R2)) == (0, 0)

    a.queues.waits({R1: 2}.copy, 2.0)
    b.receive(a, now_s=2.0)
    assert (b.queues.num_waiting(R2), b.queues.num_waiting(R1)) == (2, 0)

    a.queues.waits({}.copy, 2.01)
    b.receive(a, now_s=2.01)
    assert (b.queues.num_waiting(R2), b.queues.num_waiting(R1)) == (0, 0)


def test_numbers_are_published_ten_times_a_second_and_only_if_they_change() -> None:
    """An empty queue is published at once: no later release would do it."""
    a = Node("a", ("x",))
    for now_s, num in ((1.0, 1), (1.05, 2), (1.11, 3), (1.3, 3), (1.31, 0), (1.32, 0)):
        a.queues.waits(({R1: num} if num else {}).copy, now_s)

    notes = a.outbox.take_later()
    assert [dict(note.num_waiting) for note in notes if isinstance(note, WaitingNow)] == [
        {"http://x#0": 1},
        {"http://x#0": 3},
        {},
    ]


def test_what_waited_at_a_router_that_is_gone_does_not_count() -> None:
    """One that has said so, and one that is silent."""
    a, b = two()
    for end in ("left", "silent"):
        a.queues.waits({R1: 3 if end == "left" else 4}.copy, 1.0 if end == "left" else 2.0)
        b.receive(a, now_s=2.0)
        assert b.queues.num_waiting(R2) > 0
        if end == "left":
            b.peers.apply(Notes("a", (Left(),)), 2.0)
        else:
            b.peers.expire(2.1 + LEASE_S)
        assert b.queues.num_waiting(R2) == 0


def test_replicas_that_are_not_known_here_are_left_out() -> None:
    """Another router has found one first."""
    b = Node("b", ("y",))
    notes = IdleSpent("http://z#0", 100.0), WaitingNow((("http://z#0", 2), ("http://y#0", 1)))
    b.peers.apply(Notes("a", notes), 1.0)

    assert b.queues.num_waiting(R1) == 1
    assert b.fleet.load.has_idle_time(R1, 299.0, 1.0)
