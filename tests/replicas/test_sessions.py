from __future__ import annotations

import pytest

from policies import CandidateId
from router.replicas.sessions import Sessions, SessionView

A, B = CandidateId("a"), CandidateId("b")


def test_remembers_the_last_turn() -> None:
    """Where it ran and when."""
    sessions = Sessions()
    sessions.note(1, A, 10.0)
    sessions.note(1, B, 14.0)
    sessions.note(1, B, 24.0)

    assert sessions.get(1, 24.0) == SessionView(candidate=B, last_seen_s=24.0)
    assert sessions.get(2, 24.0) is None


def test_forgets_after_its_time() -> None:
    """An expired session is as new, and does not take room for ever."""
    sessions = Sessions(ttl_s=60.0)
    sessions.note(1, A, 0.0)
    sessions.note(2, A, 30.0)

    assert sessions.get(1, 60.0) is not None
    assert sessions.get(1, 60.1) is None
    assert sessions.note(2, B, 80.0).candidate == B
    assert len(sessions) == 1


def test_keeps_the_most_recent_ones() -> None:
    """At most so many; the one not seen for longest goes."""
    sessions = Sessions(max_sessions=2)
    for session in (1, 2, 1, 3):
        sessions.note(session, A, 0.0)

    assert len(sessions) == 2
    assert sessions.get(2, 0.0) is None
    assert sessions.get(1, 0.0) is not None


@pytest.mark.parametrize(("room", "ttl_s"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_needs_room_and_time(room: int, ttl_s: float) -> None:
    """A table that can hold nothing is a mistake."""
    with pytest.raises(ValueError, match="room and time"):
        Sessions(max_sessions=room, ttl_s=ttl_s)


def test_what_was_computed_belongs_to_its_candidate() -> None:
    """A turn that begins does not change it, a turn elsewhere ends it, for good."""
    sessions = Sessions()
    sessions.computed(1, A, 5)
    assert sessions.get(1, 0.0) is None

    assert sessions.note(1, A, 0.0).num_tokens == 0
    sessions.computed(1, A, 100)
    assert sessions.note(1, A, 1.0).num_tokens == 100
    assert sessions.note(1, B, 2.0).num_tokens == 0
    sessions.computed(1, A, 200)
    assert sessions.note(1, B, 3.0).num_tokens == 0


def test_learns_of_sessions_that_are_new_here() -> None:
    """What others know; what was seen here is newer, and room is kept."""
    sessions = Sessions(max_sessions=2)
    seen = sessions.note(1, A, 5.0)
    learnt = SessionView(candidate=B, last_seen_s=6.0)
    sessions.learn(1, learnt)
    sessions.learn(2, learnt)

    assert sessions.last(1) == seen
    assert sessions.get(2, 6.0) == learnt
    sessions.learn(3, learnt)
    assert (len(sessions), sessions.last(1)) == (2, None)
