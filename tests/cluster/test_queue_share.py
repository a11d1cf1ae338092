"""QueueShare: a conversation has room or waits at a replica, whichever router has its turns."""

from __future__ import annotations

import pytest

from policies import CandidateId
from router.base.messages import Left, Notes
from router.cluster.peers import LEASE_S
from router.cluster.shares import WaitingNow
from router.scheduling.conversations import Conversations
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
        node.conversations.end(7, 100, 2.0)
    a.conversations.asked(7, 2.5)
    a.queues.asked(7, has_room=True)
    b.receive(a, now_s=2.5)
    for node, there in ((a, R1), (b, R2)):
        node.conversations.begin(7, there, 200, 100, 22.5)

    assert b.conversations.pause_s == a.conversations.pause_s < Conversations().pause_s


def test_a_conversation_that_gives_up_its_room_gives_it_up_everywhere() -> None:
    a, b = two()
    for _ in range(2):
        b.conversations.begin(7, R2, 100, 0, 1.0, cost_s=100.0)
        b.conversations.end(7, 100, 1.0)
    assert b.conversations.home(7) == R2

    a.queues.asked(7, has_room=False)
    b.receive(a, now_s=2.0)
    assert b.conversations.home(7) is None


def test_a_new_conversation_has_one_ticket_at_all_routers() -> None:
    a, b = two()
    a.queues.asked(7, has_room=False)
    b.receive(a, now_s=3.0)
    assert b.conversations.asked(7, 50.0) == 3.0


def test_what_waits_for_room_elsewhere_counts_until_it_does_not() -> None:
    a, b = two()
    a.queues.waits(3, -4.0, 1.0)
    b.receive(a, now_s=2.0)
    assert (b.queues.num_waiting(2.0), b.queues.first_s(2.0)) == (3, pytest.approx(-3.0))
    assert (a.queues.num_waiting(2.0), a.queues.first_s(2.0)) == (0, None)

    a.queues.waits(0, None, 2.01)
    b.receive(a, now_s=2.01)
    assert (b.queues.num_waiting(2.01), b.queues.first_s(2.01)) == (0, None)


def test_waits_are_published_ten_times_a_second_and_again_for_routers_that_join() -> None:
    """An empty queue is published at once: no later release would do it."""
    a = Node("a", ("x",))
    for now_s, num in ((1.0, 1), (1.05, 2), (1.11, 3), (1.3, 3), (6.2, 3), (6.25, 0), (9.0, 0)):
        a.queues.waits(num, 0.5 if num else None, now_s)

    notes = a.outbox.take_later()
    assert [note.num_waiting for note in notes if isinstance(note, WaitingNow)] == [1, 3, 3, 0]


def test_what_waited_at_a_router_that_is_gone_does_not_count() -> None:
    """One that has said so, and one that is silent."""
    a, b = two()
    for end in ("left", "silent"):
        a.queues.waits(3 if end == "left" else 4, 0.0, 1.0 if end == "left" else 2.0)
        b.receive(a, now_s=2.0)
        assert b.queues.num_waiting(2.0) > 0
        if end == "left":
            b.peers.apply(Notes("a", (Left(),)), 2.0)
        else:
            b.peers.expire(2.1 + LEASE_S)
        assert b.queues.num_waiting(2.0) == 0


def test_a_lost_note_on_an_empty_queue_holds_nobody_back_for_long() -> None:
    """It is sent once. A queue that is not empty repeats its note every 5 s."""
    a, b = two()
    a.queues.waits(3, 0.5, 1.0)
    b.receive(a, now_s=1.0)
    a.queues.waits(0, None, 2.0)
    a.take_notes()  # they get lost

    assert (b.queues.num_waiting(11.0), b.queues.first_s(11.0)) == (3, 0.5)
    assert (b.queues.num_waiting(16.0), b.queues.first_s(16.0)) == (0, None)
