"""The generator of conversations: seeded, plain JSON, and growing as an agent's requests do."""

from __future__ import annotations

import json
from itertools import pairwise

from tests.conversations import conversations, grown


def test_the_same_seed_gives_the_same_bodies() -> None:
    """A failure can be found again by its seed and number, however many are asked for."""
    some = list(conversations(seed=3, count=20))
    more = list(conversations(seed=3, count=60))

    assert some == more[:20]
    for found in some:
        for body in (found.chat(), found.messages(), found.responses()):
            assert json.loads(json.dumps(body)) == body


def test_what_proofs_need_occurs() -> None:
    """Tools, parallel calls, thinking, null and empty content, images, reminders, odd roles."""
    turns = [turn for each in conversations(seed=1, count=2_000) for turn in each.turns]

    assert {"system", "developer", "user", "assistant", "tool", "critic"} <= {
        turn.role for turn in turns
    }
    assert any(len(turn.calls) > 1 for turn in turns)
    assert any(turn.thinking for turn in turns)
    assert any(turn.num_images for turn in turns)
    assert {None, (), ("",)} <= {turn.texts for turn in turns}


def test_a_grown_conversation_begins_as_the_one_before() -> None:
    """Each of an agent's requests holds the one before, in the shape of every API."""
    for conversation in conversations(seed=2, count=50):
        steps = list(grown(conversation))

        assert steps[-1] == conversation
        for earlier, later in pairwise(steps):
            before, after = earlier.chat()["messages"], later.chat()["messages"]
            assert after[: len(before)] == before
            assert len(after) > len(before)
