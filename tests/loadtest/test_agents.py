"""Sessions: the statistics they are drawn from, determinism, growth, sub-agents."""

from __future__ import annotations

import json
import math
import random

import pytest

from loadtest.agents import Profile, Session, Turn, draw_plans, make_sessions

SMALL = Profile(num_sessions=3, num_turns=5, turns_sigma=0.0, scale_tokens=0.05, seed=7)


def play(session: Session, reply: str | None = None) -> list[Turn]:
    """Run a session to its end, sub-agents first, all in one list."""
    turns: list[Turn] = []
    while (turn := session.next_turn()) is not None:
        turns.append(turn)
        for child in session.advance(reply):
            turns.extend(play(child, reply))
    return turns


def test_same_seed_same_requests() -> None:
    """The whole exchange is a function of the profile, as long as the replies are the same."""
    first = [turn for session in make_sessions(SMALL) for turn in play(session)]
    second = [turn for session in make_sessions(SMALL) for turn in play(session)]

    assert first == second
    assert json.loads(json.dumps(first[-1].body)) == first[-1].body


def test_reply_changes_nothing_but_itself() -> None:
    """Tool results and waits do not depend on what the model said."""
    [ours, *_] = make_sessions(SMALL)
    [theirs, *_] = make_sessions(SMALL)

    said, scripted = play(ours, "I will look."), play(theirs)

    assert [turn.wait_s for turn in said] == [turn.wait_s for turn in scripted]
    for a, b in zip(said, scripted, strict=True):
        assert _without_replies(a) == _without_replies(b)


def test_every_turn_extends_the_last() -> None:
    """An agent appends: the previous request's messages are a prefix of the next one's."""
    session = make_sessions(Profile(num_sessions=1, num_turns=6, scale_tokens=0.05))[0]
    before: list[object] = []
    while (turn := session.next_turn()) is not None:
        messages = turn.body["messages"]
        assert messages[: len(before)] == before
        assert len(messages) > len(before)
        before = messages
        session.advance("ok")

    assert session.num_turns_done == session.num_turns
    assert session.next_turn() is None


def test_a_turn_is_a_snapshot() -> None:
    """A body handed out does not grow when the conversation goes on."""
    session = make_sessions(SMALL)[0]
    first = session.next_turn()
    assert first is not None
    num_messages = len(first.body["messages"])

    session.advance("ok")
    session.next_turn()

    assert len(first.body["messages"]) == num_messages


def test_tool_results_answer_the_calls() -> None:
    """Every call of the last reply is answered, in order, by its id."""
    turns = play(make_sessions(SMALL)[0], "")
    messages = turns[-1].body["messages"]

    for at, message in enumerate(messages):
        if message["role"] != "assistant" or "tool_calls" not in message:
            continue
        ids = [call["id"] for call in message["tool_calls"]]
        answers = messages[at + 1 : at + 1 + len(ids)]
        assert [answer["tool_call_id"] for answer in answers] == ids
        assert message["content"] is None  # an empty reply, as agents send it
        for call in message["tool_calls"]:
            json.loads(call["function"]["arguments"])


def test_sub_agents_start_from_one_context() -> None:
    """Children share the parent's messages, go at once, and their reports are tool results."""
    profile = Profile(num_sessions=1, num_turns=4, turns_sigma=0.0, scale_tokens=0.05,
                      sub_agent_share=1.0, num_sub_agents=3, seed=1)  # fmt: skip
    parent = make_sessions(profile)[0]
    children: list[Session] = []
    shared: list[object] = []
    while not children:
        turn = parent.next_turn()
        assert turn is not None
        shared = turn.body["messages"]
        children = parent.advance("thinking")
    firsts = [child.next_turn() for child in children]

    assert len(children) == 3
    for child in children:
        child.advance(f"report of {child.id}")
    following = parent.next_turn()
    for first in firsts:
        assert first is not None
        assert first.wait_s == 0.0
        assert first.body["messages"][: len(shared)] == shared
        assert first.body["messages"][-1]["role"] == "user"
    assert len({first.body["messages"][-1]["content"] for first in firsts if first}) > 1
    assert following is not None
    assert following.wait_s == 0.0
    assert [message["content"] for message in following.body["messages"][-3:]] == [
        f"report of {child.id}" for child in children
    ]


def test_sessions_share_the_preamble_and_seeds_do_not() -> None:
    """System prompt and tools are equal within a seed and differ from the first line on."""
    ours = make_sessions(SMALL)
    theirs = make_sessions(Profile(num_sessions=1, scale_tokens=0.05, seed=8))
    first, second = (session.next_turn() for session in ours[:2])
    other = theirs[0].next_turn()
    assert first
    assert second
    assert other

    system = [turn.body["messages"][0]["content"] for turn in (first, second, other)]

    assert system[0] == system[1]
    assert first.body["tools"] == second.body["tools"] == other.body["tools"]
    assert system[0].splitlines()[0] != system[2].splitlines()[0]
    assert first.body["messages"][1] != second.body["messages"][1]


def test_salts_are_dealt_out() -> None:
    """Sessions take the salts in turn; None sends no field at all."""
    profile = Profile(num_sessions=3, num_turns=2, scale_tokens=0.05, salts=(None, "t1"),
                      extra_body={"ignore_eos": True})  # fmt: skip
    bodies = [turn.body for s in make_sessions(profile) if (turn := s.next_turn())]

    assert [body.get("cache_salt", "absent") for body in bodies] == ["absent", "t1", "absent"]
    assert all(body["ignore_eos"] is True for body in bodies)


def test_scales_apply_to_tokens_and_waits() -> None:
    """Half the tokens and a tenth of the time give the same conversation, smaller and faster."""

    def draw(profile: Profile) -> list[tuple[int, float]]:
        rng = random.Random(3)
        return [(plan.num_input_tokens, plan.wait_s) for plan in draw_plans(profile, rng, 20, 0)]

    whole, scaled = draw(Profile()), draw(Profile(scale_tokens=0.5, scale_time=0.1))

    for (tokens, wait_s), (half_tokens, tenth_s) in zip(whole, scaled, strict=True):
        assert half_tokens == pytest.approx(tokens / 2, abs=1)
        assert math.isclose(tenth_s, wait_s / 10)


def test_context_limit_ends_a_session() -> None:
    """Turns that would pass the limit are not planned; the first always is."""
    profile = Profile(max_context_tokens=20_000)
    plans = draw_plans(profile, random.Random(1), 50, 11_500)

    assert 1 <= len(plans) < 10
    assert len(draw_plans(profile, random.Random(1), 50, 19_999)) == 1


def _without_replies(turn: Turn) -> list[object]:
    return [
        {**message, "content": None} if message["role"] == "assistant" else message
        for message in turn.body["messages"]
    ]
