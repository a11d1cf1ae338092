"""Why tokens were computed, in words: one line a cause, and the sums of a session."""

from __future__ import annotations

import pytest

from router.observers.sessions.bookkeeper import SessionFinding
from router.records.record import (
    CAUSES,
    Cause,
    Change,
    Computed,
    Loss,
    Move,
    Part,
    advice_in_words,
    causes_in_words,
    reasons,
)


def changed(part: Part, *, num_in_row: int = 1, index: int | None = None) -> Computed:
    change = Change(part=part, offset=16, index=index, num_in_row=num_in_row)
    return Computed(tokens={"new": 10, "changed": 1000}, change=change)


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause != "new"])
def test_every_cause_has_words(cause: Cause) -> None:
    """Even if nothing more is known than the cause."""
    (line,) = causes_in_words(Computed(tokens={cause: 12_345}))

    assert line.startswith("12,345 tokens: ")
    assert len(line) > 30
    assert cause in ("last_block", "changed") or advice_in_words(Computed(tokens={cause: 1}))


def test_a_change_says_where_and_how_often() -> None:
    (line,) = causes_in_words(changed("message", num_in_row=3, index=4))

    assert line == (
        "1,000 tokens: an earlier message changed at token 16, messages[4], in 3 turns in a row"
    )


def test_a_move_says_what_was_expected() -> None:
    """And one that had to be says why."""
    move = Move(origin="r1", ttft_here_ms=120.4, ttft_there_ms=950.0)
    (chosen,) = causes_in_words(Computed(tokens={"moved": 64}, move=move))
    forced = Computed(tokens={"moved": 64}, move=Move(origin="r1", has_left=True))

    assert "after 120 ms here, after 950 ms there" in chosen
    assert "could not be used" in causes_in_words(forced)[0]
    assert "warmroute replicas list" in advice_in_words(forced)[0]


def test_an_eviction_says_by_how_much() -> None:
    loss = Loss(replica="r2", since_s=30.0, num_between_tokens=9000, ago_s=12.0)
    (line,) = causes_in_words(Computed(tokens={"evicted": 64}, loss=loss))

    assert "replica r2 evicted them 12.0 s before" in line
    assert "9,000 other tokens in the 30.0 s since the last turn" in line


def test_a_sessions_causes_are_added_up() -> None:
    """The largest first; what is as it should be is left out."""
    turns = [
        Computed(tokens={"new": 100}),
        None,
        Computed(tokens={"last_block": 3, "evicted": 500}),
        changed("tools"),
        changed("system"),
        changed("system"),
    ]
    said = reasons(turns, {})

    assert [(each.cause, each.part, each.num_tokens, each.num_turns) for each in said] == [
        ("changed", "system", 2000, 2),
        ("changed", "tools", 1000, 1),
        ("evicted", None, 500, 1),
    ]
    assert said[0].text == "2,000 tokens in 2 turns: the system prompt changed"
    assert "last message" in said[0].advice


@pytest.mark.parametrize("part", ["text", "message", "template"])
def test_nothing_is_to_do_if_only_the_end_changed(part: Part) -> None:
    """300 of 18,500 tokens; not if it is all from near the beginning on."""
    change = Change(part=part, offset=18_200)
    end = Computed(tokens={"changed": 300}, change=change)
    all_of_it = Computed(tokens={"changed": 18_300}, change=Change(part=part, offset=200))

    assert advice_in_words(end) == ["Nothing to do: only the end of the prompt changed."]
    assert advice_in_words(all_of_it) != advice_in_words(end)


def test_a_finding_says_what_changes_in_every_turn() -> None:
    """Only of sessions that change there in every turn."""
    clock = SessionFinding(tenant=None, part="system", hint="time", offset=16, session="0" * 16)
    often = reasons(
        [changed("system", num_in_row=n) for n in range(1, 4)], {clock.part: clock.what}
    )
    once = reasons([changed("system")], {clock.part: clock.what})

    assert "contains a time of day" in often[0].text
    assert "contains a time of day" not in once[0].text


def test_a_finding_says_what_each_turn_costs() -> None:
    finding = SessionFinding(tenant=None, part="system", hint="time", offset=16, session="0" * 16)
    finding.num_turns, finding.num_again = 4, 56_800

    assert finding.text == (
        "the system prompt contains a time of day and changes in every turn: 14,200 tokens are "
        "computed again each time, 56,800 so far. Move what changes (a time, an id) into the last "
        "message."
    )
