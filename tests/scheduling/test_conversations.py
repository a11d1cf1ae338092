from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import CandidateId
from router.scheduling.conversations import PATIENCE, Conversations
from tests.scheduling.twin import Twin

A, B = CandidateId("a"), CandidateId("b")
COST_S = 100.0  # to compute a prompt: any pause is worth its room


def turn(
    found: Conversations,
    session: int,
    candidate: CandidateId,
    num_tokens: int,
    num_cached: int = 0,
    at_s: float = 0.0,
    *,
    cost_s: float = COST_S,
    **fields: Any,
) -> None:
    """Run a turn that takes no time."""
    found.begin(session, candidate, num_tokens, num_cached, at_s, cost_s=cost_s, **fields)
    found.end(session, num_tokens, at_s)


def two_turns(found: Conversations, session: int, candidate: CandidateId, num_tokens: int) -> None:
    for _ in range(2):
        turn(found, session, candidate, num_tokens)


# -- room --------------------------------------------------------------------------------------


def test_own_tokens_exclude_what_was_cached_at_the_start() -> None:
    found = Conversations()
    turn(found, 1, A, 1000)
    turn(found, 2, A, 1200, 900)
    turn(found, 2, A, 2000, 1200)

    assert (found.at(A).num_sessions, found.at(A).num_tokens) == (2, 1000 + 1100)
    assert found.num_own_tokens(2, 3000, 2000) == 2100
    assert found.num_own_tokens(3, 3000, 900) == 2100


def test_a_conversation_has_room_where_its_last_turn_went() -> None:
    found = Conversations()
    turn(found, 1, A, 1000)
    turn(found, 1, B, 1500)

    assert (found.home(1), found.home(2)) == (B, None)
    assert (found.at(A).num_tokens, found.at(B).num_tokens) == (0, 1500)


@pytest.mark.parametrize(("cost_s", "hold_s"), [(1.0, 0.0), (5.0, 10.0), (100.0, PATIENCE * 2.0)])
def test_a_pause_keeps_room_for_as_long_as_recomputing_delays_others(
    cost_s: float, hold_s: float
) -> None:
    """Two conversations, usual pauses of 2 s: a cost of 1 s is not worth the usual pause."""
    found = Conversations()
    for number in range(200):
        for session in (1, 2):
            turn(found, session, A, 1000, at_s=2.0 * number, cost_s=100.0)
    found.begin(2, A, 1000, 0, 400.0, cost_s=cost_s)
    turn(found, 1, A, 1000, at_s=400.0, cost_s=cost_s)

    found.expire(400.0 + hold_s - 0.1)
    assert found.home(1) == (A if hold_s else None)
    assert found.at(A).num_tokens == (2000 if hold_s else 0)  # nothing is kept that is not worth it
    found.expire(400.0 + hold_s + 0.1)
    assert found.home(1) is None
    assert found.home(2) == A


def test_a_question_that_is_asked_once_keeps_no_room() -> None:
    """Its chance to go on is that of recent conversations."""
    found = Conversations()
    for session in range(200):
        turn(found, session, A, 1000, at_s=100.0 * session, cost_s=10.0)
    assert found.home(199) is None

    for session in range(300, 400):
        for at_s in (20_000.0, 20_001.0):
            turn(found, session, A, 1000, at_s=at_s, cost_s=10.0)
    turn(found, 500, A, 1000, at_s=20_001.0, cost_s=10.0)
    assert found.home(500) == A


def test_a_visit_leaves_no_room() -> None:
    found = Conversations()
    turn(found, 1, A, 1000)
    found.begin(1, A, 1000, 0, 1.0, cost_s=COST_S, is_visit=True)
    assert found.home(1) == A
    found.end(1, 1000, 2.0)
    assert found.home(1) is None


def test_a_turn_that_waits_for_its_engine_keeps_its_room() -> None:
    """As long as clients wait, however short the usual pause is."""
    found = Conversations()
    two_turns(found, 1, A, 1000)
    found.asked(1, 1.0)

    found.expire(590.0)
    assert found.home(1) == A
    found.expire(610.0)
    assert found.home(1) is None


def test_who_gives_up_its_room_keeps_its_ticket() -> None:
    found = Conversations()
    turn(found, 1, A, 1000, at_s=5.0)
    found.leave(1)

    assert found.home(1) is None
    assert found.asked(1, 10.0) == 5.0
    found.begin(1, A, 1000, 0, 11.0)
    found.leave(1)
    assert found.home(1) == A  # a turn runs


def test_a_ticket_is_the_time_of_the_first_turn_or_that_of_the_parent() -> None:
    found = Conversations()
    assert found.asked(1, 3.0) == 3.0
    assert found.asked(1, 4.0) == 3.0
    turn(found, 1, A, 100, at_s=9.0)
    assert found.asked(2, 10.0, parent=1) == 3.0
    assert found.asked(3, 10.0, parent=99) == 10.0


def test_a_candidate_that_is_gone_has_nothing() -> None:
    found = Conversations()
    found.begin(1, A, 1000, 0, 0.0)
    two_turns(found, 2, A, 500)
    found.leave(2)
    found.remove(A)
    found.end(1, 1000, 1.0)

    assert found.home(1) is None
    assert found.working_set(A).num_tokens == 0


def test_batch_conversations_are_counted_apart() -> None:
    found = Conversations()
    for session, is_batch in ((1, True), (2, False)):
        for _ in range(2):
            turn(found, session, A, 10 * session, is_batch=is_batch)

    assert (found.at(A).num_tokens, found.at(A).num_batch_tokens) == (30, 10)


def test_what_a_replicas_conversations_need_includes_those_without_room() -> None:
    """Until they have been silent for long; those whose turn waits, however long that takes."""
    found = Conversations()
    for session in (1, 2, 3):
        two_turns(found, session, A, 1000)
    for session in (2, 3):
        found.leave(session)
    found.asked(3, 1.0)

    assert (found.at(A).num_tokens, found.working_set(A).num_tokens) == (1000, 3000)
    assert [found.lives_at(session) for session in (1, 2, 3, 4)] == [A, A, A, None]
    found.expire(1_000.0)
    assert found.working_set(A).num_tokens == 1000
    assert [found.lives_at(session) for session in (1, 2, 3)] == [None, None, A]


# -- one turn is one turn ------------------------------------------------------------------------


def learned(found: Conversations) -> tuple[float, float, float]:
    return found.pause_s, found.turn_s, found.arrivals_per_s(100.0)


def test_a_request_is_one_turn_however_often_it_is_booked() -> None:
    """A retry, a prefill elsewhere, and a wait in the queue: no pause, no return, no turn time."""
    plain, booked = Conversations(), Conversations()
    for number in range(50):
        for found in (plain, booked):
            at_s = 2.0 * number
            if found is booked:
                found.asked(number, at_s)
                found.asked(number, at_s)
                for candidate in (A, B):
                    found.begin(number, candidate, 100, 0, at_s)
                    found.end(number, 100, at_s, is_answered=False)
            found.begin(number, A, 100, 0, at_s)
            found.end(number, 100, at_s + 1.0)

    assert learned(booked) == pytest.approx(learned(plain))
    entry = booked.last(1)
    assert entry is not None
    assert not entry.goes_on


def test_a_pause_ends_when_the_next_turn_comes() -> None:
    found = Conversations()
    for number in range(200):
        at_s = 100.0 * number
        turn(found, number, A, 100, at_s=at_s)
        found.asked(number, at_s + 2.0)
        found.asked(number, at_s + 3.0)
        turn(found, number, A, 100, at_s=at_s + 4.0)

    assert found.pause_s == pytest.approx(2.0, rel=0.01)


def test_turns_that_overlap_are_summed() -> None:
    """Sub-agents under one id, each with the context of their parent."""
    found = Conversations()
    two_turns(found, 1, A, 1000)
    for num_tokens in (1100, 1200):
        found.begin(1, A, num_tokens, 1000, 1.0, cost_s=COST_S)
    assert found.at(A).num_tokens == 2300
    found.end(1, 1100, 2.0)
    assert found.at(A).num_tokens == 1200
    found.end(1, 1200, 3.0)
    assert found.home(1) == A


def test_persons_who_are_away_count_as_half_a_minute() -> None:
    found = Conversations()
    for number in range(200):
        turn(found, 1, A, 1000, at_s=3000.0 * number)
    assert found.pause_s == pytest.approx(30.0, rel=0.01)


# -- the end of a conversation ---------------------------------------------------------------------


def test_an_ended_conversation_gives_its_room_back_at_once() -> None:
    """Its place is remembered, in case it goes on after all."""
    found = Conversations()
    for session in (1, 2):
        two_turns(found, session, A, 1000)

    assert found.finish(1)
    assert (found.at(A).num_tokens, found.working_set(A).num_tokens) == (1000, 1000)
    last = found.last(1)
    assert last is not None
    assert last.candidate == A
    turn(found, 1, A, 1200)
    assert found.at(A).num_sessions == 2


def test_a_turn_that_runs_keeps_its_room_until_it_ends() -> None:
    found = Conversations()
    found.begin(1, A, 1000, 0, 0.0, cost_s=COST_S)
    found.begin(1, A, 1000, 0, 0.0, cost_s=COST_S)

    assert found.finish(1)
    found.end(1, 1000, 1.0)
    assert found.home(1) == A
    found.end(1, 1000, 1.0)
    assert found.home(1) is None


def test_what_is_not_known_cannot_end() -> None:
    found = Conversations()
    found.end(1, 10, 0.0)
    found.leave(1)
    found.left(1, 0.0)

    assert not found.finish(1)


# -- memory ----------------------------------------------------------------------------------------


def test_a_silent_conversation_is_forgotten_after_its_time() -> None:
    found = Conversations(ttl_s=60.0)
    turn(found, 1, A, 100, cost_s=0.0)
    turn(found, 2, A, 100, at_s=30.0, cost_s=0.0)

    assert found.get(1, 60.0) is not None
    assert found.get(1, 60.1) is None
    found.expire(80.0)
    assert len(found) == 1


def test_the_oldest_of_too_many_conversations_is_forgotten() -> None:
    found = Conversations(max_sessions=2)
    for session in (1, 2, 3):
        turn(found, session, A, 100, at_s=float(session), cost_s=0.0)

    assert found.last(1) is None
    assert found.last(2) is not None
    assert len(found) == 2


@pytest.mark.parametrize(("room", "ttl_s"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_conversations_need_memory_and_time(room: int, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="room and time"):
        Conversations(max_sessions=room, ttl_s=ttl_s)


def test_a_computed_prompt_belongs_to_the_candidate_of_the_last_turn() -> None:
    def computed() -> int:
        last = found.last(1)
        assert last is not None
        return last.num_tokens

    found = Conversations()
    found.computed(1, A, 5)
    assert found.last(1) is None

    turn(found, 1, A, 100)
    found.computed(1, A, 100)
    turn(found, 1, A, 150)
    assert computed() == 100
    turn(found, 1, B, 200)
    found.computed(1, A, 200)
    assert computed() == 0


def test_what_is_seen_here_is_newer_than_what_other_routers_know() -> None:
    found = Conversations()
    turn(found, 1, A, 100, at_s=5.0)
    found.learn(1, B, 50, 6.0)
    found.learn(2, B, 50, 6.0)

    seen, learnt = found.get(1, 6.0), found.get(2, 6.0)
    assert seen is not None
    assert seen.candidate == A
    assert learnt is not None
    assert (learnt.candidate, learnt.num_tokens) == (B, 50)


# -- a literal twin --------------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "begin", "end", "fail", "left", "leave", "finish", "wait"]),
        st.integers(1, 4),  # session
        st.sampled_from([A, B]),
        st.integers(1, 500),  # tokens
        st.booleans(),  # a visit, or batch
    ),
    max_size=60,
)


@given(EVENTS)
def test_rooms_equal_those_of_a_literal_twin(events: list[tuple[str, int, str, int, bool]]) -> None:
    """Sums, homes and leases after any sequence of events."""
    fast, slow, now_s = Conversations(), Twin(), 0.0
    for kind, session, name, num_tokens, flag in events:
        candidate = CandidateId(name)
        now_s += 1.0
        fast.expire(now_s)
        slow.expire(now_s)
        for each in (fast, slow):
            if kind == "ask":
                each.asked(session, now_s)
            elif kind == "begin":
                each.begin(session, candidate, num_tokens, 100, now_s, cost_s=num_tokens / 20,
                           is_batch=flag, is_visit=num_tokens % 7 == 0)  # fmt: skip
            elif kind in ("end", "fail"):
                running = slow.running(session) if each is fast else slow.end_next(session)
                if running is not None:
                    each.end(session, running, now_s, is_answered=kind == "end")
            elif kind == "left":
                each.left(session, now_s)
            elif kind == "leave":
                each.leave(session)
            elif kind == "finish":
                each.finish(session)
        if kind == "wait":
            now_s += num_tokens / 10.0

        for each in (A, B):
            room = fast.at(each)
            assert (room.num_tokens, room.num_batch_tokens, set(room.sessions)) == slow.at(each)
        for each in range(1, 5):
            last = fast.last(each)
            assert (last.ticket_s if last else None) == slow.ticket_s(each)
        assert fast.pause_s == pytest.approx(slow.pause_s)
        assert fast.turn_s == pytest.approx(slow.turn_s)
