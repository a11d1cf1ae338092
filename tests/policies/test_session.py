from __future__ import annotations

from policies import create
from tests.policies.snapshots import replica, snapshot

FLEET = [replica(f"r{index}") for index in range(6)]


def test_hash_keeps_a_session_together() -> None:
    """All turns of a session go to one candidate, whatever their content and number."""
    policy = create("session_hash")
    chosen = {
        policy.decide(snapshot(*FLEET, session=42, first_blocks=n, number=n)).candidate
        for n in range(20)
    }

    assert len(chosen) == 1


def test_hash_falls_back_on_first_blocks_then_on_a_draw() -> None:
    """Without a session the content decides; without tokens, chance."""
    policy = create("session_hash")
    by_content = {
        policy.decide(snapshot(*FLEET, first_blocks=42, number=n)).candidate for n in range(20)
    }
    by_chance = {policy.decide(snapshot(*FLEET, number=n)).candidate for n in range(60)}

    assert by_content == {policy.decide(snapshot(*FLEET, session=42)).candidate}
    assert len(by_chance) == 6


def test_sticky_stays_where_the_last_turn_ran() -> None:
    """The session's candidate is kept even if it is the busiest."""
    busy = replica("busy", requests=9, queue_ms=900.0)
    decision = create("session_sticky").decide(
        snapshot(replica("idle"), busy, session=1, home="busy")
    )

    assert decision.candidate == "busy"


def test_sticky_sends_new_and_homeless_sessions_to_the_least_loaded() -> None:
    """A new session, and one whose candidate is out, go where there is least to do."""
    fleet = [replica("busy", queue_ms=900.0), replica("idle")]
    policy = create("session_sticky")
    new = policy.decide(snapshot(*fleet, session=1))
    homeless = policy.decide(snapshot(*fleet, session=1, home="gone"))

    assert new.candidate == homeless.candidate == "idle"
    assert new.reason.startswith("new session")
    assert homeless.reason.startswith("session's gone is out")
