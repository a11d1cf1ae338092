from __future__ import annotations

import pytest

from policies import CandidateId
from router.replicas.conversations import PATIENCE, Conversations, WorkingSet

A, B = CandidateId("a"), CandidateId("b")


def turn(
    sets: Conversations,
    session: int,
    candidate: CandidateId,
    num_tokens: int,
    num_cached: int,
    at_s: float,
) -> None:
    """A turn that takes no time."""
    sets.begin(session, candidate, num_tokens, num_cached, at_s)
    sets.end(session, at_s)


def test_own_tokens_exclude_what_was_cached_at_the_start() -> None:
    sets = Conversations()
    turn(sets, 1, A, 1000, 0, 0.0)
    turn(sets, 2, A, 1200, 900, 0.0)
    turn(sets, 2, A, 2000, 1200, 1.0)

    assert sets.at(A) == WorkingSet(num_sessions=2, num_tokens=1000 + 1100, num_once_tokens=1000)
    assert sets.at(B) == WorkingSet()
    assert sets.num_own_tokens(2, 3000, 2000) == 2100
    assert sets.num_own_tokens(3, 3000, 900) == 2100


def test_a_session_lives_where_its_last_turn_went() -> None:
    sets = Conversations()
    turn(sets, 1, A, 1000, 0, 0.0)
    turn(sets, 1, B, 1500, 0, 1.0)

    assert (sets.home(1), sets.home(2)) == (B, None)
    assert sets.at(A) == WorkingSet()
    assert sets.at(B) == WorkingSet(num_sessions=1, num_tokens=1500)


def test_a_silent_session_is_over_until_it_goes_on() -> None:
    sets = Conversations()
    for number in range(200):
        turn(sets, 1, A, 1000, 400, float(2 * number))

    assert sets.patience_s == pytest.approx(PATIENCE * 2.0, rel=0.01)
    sets.expire(398.0 + 5.9)
    assert sets.home(1) == A
    sets.expire(398.0 + 6.1)
    assert sets.home(1) is None
    assert sets.num_own_tokens(1, 2000, 1000) == 1600


def test_a_pause_ends_when_the_next_turn_arrives() -> None:
    sets = Conversations()
    for number in range(200):
        start_s = 100.0 * number
        sets.begin(number, A, 100, 0, start_s)
        sets.end(number, start_s)
        sets.asked(number, start_s + 2.0)
        sets.asked(number, start_s + 3.0)
        sets.begin(number, A, 100, 0, start_s + 4.0)
        sets.end(number, start_s + 4.0)

    assert sets.patience_s == pytest.approx(PATIENCE * 2.0, rel=0.01)


def test_fast_tools_do_not_hide_slow_ones() -> None:
    """Most pauses are short; a conversation that waits for a shell is still live."""
    sets, now_s = Conversations(), 0.0
    for number in range(500):
        now_s += 0.1 if number % 5 else 5.0
        sets.expire(now_s)
        turn(sets, 1, A, 1000, 400, now_s)

    assert sets.patience_s > 2.0


def test_persons_who_are_away_do_not_keep_conversations_live() -> None:
    """However long their pauses are, each counts as half a minute."""
    sets, now_s = Conversations(), 0.0
    for _ in range(100):
        now_s += 3000.0
        sets.expire(now_s)
        turn(sets, 1, A, 1000, 400, now_s)

    assert sets.patience_s == pytest.approx(PATIENCE * 30.0, rel=0.01)


def test_single_turns_count_by_the_share_that_goes_on() -> None:
    sets = Conversations()
    turn(sets, 1, A, 1000, 0, 0.0)
    assert 0 < sets.num_tokens_at(A) < 1000
    sets.asked(1, 0.0)
    sets.asked(1, 0.0)
    assert sets.num_tokens_at(A) == 1000

    for number in range(2, 200):
        turn(sets, number, A, 100, 0, 100.0 * number)
    turn(sets, 200, A, 1000, 0, 19_900.0)
    assert sets.at(A) == WorkingSet(num_sessions=2, num_tokens=1100, num_once_tokens=1100)
    assert sets.num_tokens_at(A) < 0.01 * 1100

    for number in range(300, 500):
        for _ in range(2):
            turn(sets, number, B, 100, 0, 20_000.0)
    turn(sets, 600, B, 1000, 0, 20_000.0)
    assert sets.num_tokens_at(B) == pytest.approx(200 * 100 + 1000, rel=0.01)


def test_a_conversation_that_resumes_late_has_gone_on() -> None:
    sets = Conversations()
    turn(sets, 1, A, 1000, 0, 0.0)
    turn(sets, 1, A, 1000, 0, 1000.0)
    assert sets.num_tokens_at(A) == 1000


def test_a_session_is_alive_while_its_turn_runs() -> None:
    sets = Conversations()
    sets.begin(1, A, 1000, 0, 0.0)
    for at_s in (100.0, 3000.0):
        sets.expire(at_s)
        assert sets.home(1) == A

    sets.expire(5000.0)
    assert sets.home(1) is None


def test_older_conversations_of_the_same_replica_come_first() -> None:
    sets = Conversations()
    for session, candidate, num_tokens in ((1, A, 10), (2, B, 20), (3, A, 40), (4, A, 80)):
        turn(sets, session, candidate, num_tokens, 0, float(session))
        sets.asked(session, float(session))
    turn(sets, 1, A, 11, 10, 5.0)

    assert sets.num_tokens_before(4) == 11 + 40
    assert sets.num_tokens_before(1) == 0


def test_batch_conversations_take_no_room_from_interactive_ones() -> None:
    sets = Conversations()
    for session, num_tokens, is_batch in ((1, 10, True), (2, 20, False), (3, 40, True)):
        for _ in range(2):
            sets.begin(session, A, num_tokens, 0, float(session), is_batch=is_batch)
            sets.end(session, float(session))

    assert (sets.num_tokens_at(A), sets.num_tokens_at(A, for_batch=False)) == (70, 20)
    assert sets.num_tokens_before(2) == 0
    assert sets.num_tokens_before(1, for_batch=True) == 20
    assert sets.num_tokens_before(3, for_batch=True) == 10 + 20
    sets.begin(3, B, 40, 0, 4.0)
    assert sets.num_tokens_at(A, for_batch=False) == 20
    assert sets.num_tokens_at(B, for_batch=False) == 40
    sets.remove(A)
    assert sets.num_tokens_at(A, for_batch=False) == 0


def test_single_batch_turns_count_by_the_share_that_goes_on() -> None:
    sets = Conversations()
    sets.begin(1, A, 1000, 0, 0.0, is_batch=True)
    sets.begin(2, A, 1000, 0, 0.0)

    assert sets.num_tokens_at(A, for_batch=False) == 200
    assert sets.num_tokens_at(A) == 400
    sets.asked(1, 1.0)
    assert sets.num_tokens_at(A, for_batch=False) == pytest.approx(240)
    assert sets.num_tokens_at(A) == pytest.approx(1240)


def test_a_candidate_that_is_gone_has_nothing() -> None:
    sets = Conversations()
    sets.begin(1, A, 1000, 0, 0.0)
    sets.remove(A)
    sets.end(1, 1.0)

    assert sets.home(1) is None
    assert sets.at(A) == WorkingSet()


def test_conversations_come_back_after_a_turn_and_a_pause() -> None:
    sets = Conversations()
    assert sets.cycle_s == pytest.approx(10.0)
    for number in range(200):
        sets.begin(1, A, 1000, 0, 5.0 * number)
        sets.end(1, 5.0 * number + 2.0)
    assert sets.cycle_s == pytest.approx(5.0, rel=0.01)

    for _ in range(20_000):
        turn(sets, 1, A, 1000, 0, 2000.0)
    assert sets.cycle_s > 0.0


def test_a_silent_conversation_is_forgotten_after_its_time() -> None:
    conversations = Conversations(ttl_s=60.0)
    turn(conversations, 1, A, 100, 0, 0.0)
    turn(conversations, 2, A, 100, 0, 30.0)

    assert conversations.get(1, 60.0) is not None
    assert conversations.get(1, 60.1) is None
    conversations.expire(80.0)
    assert len(conversations) == 1


def test_the_oldest_of_too_many_conversations_is_forgotten() -> None:
    conversations = Conversations(max_sessions=2)
    for session in (1, 2, 3):
        turn(conversations, session, A, 100, 0, float(session))
    conversations.expire(100.0)

    assert conversations.last(1) is None
    assert conversations.last(2) is not None
    assert len(conversations) == 2


@pytest.mark.parametrize(("room", "ttl_s"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_conversations_need_memory_and_time(room: int, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="room and time"):
        Conversations(max_sessions=room, ttl_s=ttl_s)


def test_a_computed_prompt_belongs_to_the_candidate_of_the_last_turn() -> None:
    def computed() -> int:
        found = conversations.last(1)
        assert found is not None
        return found.num_tokens

    conversations = Conversations()
    conversations.computed(1, A, 5)
    assert conversations.last(1) is None

    turn(conversations, 1, A, 100, 0, 0.0)
    assert computed() == 0
    conversations.computed(1, A, 100)
    turn(conversations, 1, A, 150, 0, 1.0)
    assert computed() == 100
    turn(conversations, 1, B, 200, 0, 2.0)
    conversations.computed(1, A, 200)
    assert computed() == 0


def test_what_is_seen_here_is_newer_than_what_other_routers_know() -> None:
    conversations = Conversations()
    turn(conversations, 1, A, 100, 0, 5.0)
    conversations.learn(1, B, 50, 6.0)
    conversations.learn(2, B, 50, 6.0)

    seen, learnt = conversations.get(1, 6.0), conversations.get(2, 6.0)
    assert seen is not None
    assert seen.candidate == A
    assert learnt is not None
    assert (learnt.candidate, learnt.num_tokens) == (B, 50)


def test_an_ended_conversation_gives_its_place_back_at_once() -> None:
    """Its home is remembered, in case it goes on after all."""
    sets = Conversations()
    turn(sets, 1, A, 1000, 0, 0.0)
    turn(sets, 2, A, 500, 0, 0.0)

    assert sets.finish(1)
    assert sets.at(A) == WorkingSet(num_sessions=1, num_tokens=500, num_once_tokens=500)
    assert sets.home(1) is None
    found = sets.last(1)
    assert found is not None
    assert found.candidate == A

    turn(sets, 1, A, 1200, 0, 1.0)
    assert sets.at(A).num_sessions == 2


def test_a_turn_that_runs_keeps_its_place_until_it_ends() -> None:
    sets = Conversations()
    sets.begin(1, A, 1000, 0, 0.0)
    sets.begin(1, A, 1000, 0, 0.0)

    assert sets.finish(1)
    assert sets.at(A).num_tokens == 1000
    sets.end(1, 1.0)
    assert sets.at(A).num_tokens == 1000
    sets.end(1, 1.0)
    assert sets.at(A) == WorkingSet()


def test_a_turn_after_the_end_makes_a_conversation_live_again() -> None:
    sets = Conversations()
    sets.begin(1, A, 1000, 0, 0.0)
    sets.finish(1)
    sets.begin(1, A, 1100, 0, 0.5)
    sets.end(1, 1.0)
    sets.end(1, 1.0)

    assert sets.home(1) == A


def test_what_is_not_known_cannot_end() -> None:
    sets = Conversations()

    assert not sets.finish(1)
    assert sets.at(A) == WorkingSet()
