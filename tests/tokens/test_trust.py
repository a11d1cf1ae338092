"""Evidence for and against our token counts."""

from __future__ import annotations

import pytest

from router.tokens.trust import TokenTrust


def observe(trust: TokenTrust, replica: str, engine: int, *, of: int, now_s: float = 0.0) -> bool:
    """Let a replica, one of so many, count a prompt of 10 tokens."""
    return trust.observe_usage(replica, 10, engine, has_others=of > 1, now_s=now_s)


def test_the_only_replica_is_right() -> None:
    """With one replica its first disagreement is the reason, whatever comes after it."""
    trust = TokenTrust()

    assert not observe(trust, "r1", 11, of=1)
    assert not trust.observe_proof(False, now_s=0.0)

    assert trust.reason == "counted 10 prompt tokens, the engine 11"


def test_one_dissenting_replica_is_ignored() -> None:
    """One replica that counts other tokens never ends local tokens, whenever and however often."""
    trust = TokenTrust()

    for _ in range(50):
        assert not observe(trust, "liar", 999, of=3)
    observe(trust, "r1", 10, of=3)
    observe(trust, "liar", 0, of=3)

    assert trust.reason is None
    assert trust.disagrees("liar")
    assert not trust.disagrees("r1")


@pytest.mark.parametrize(
    ("agreeing", "against", "ends"), [(0, 2, True), (1, 2, True), (2, 2, False), (3, 2, False)]
)
def test_most_replicas_are_right(agreeing: int, against: int, ends: bool) -> None:
    """Several that disagree end local tokens if they are more than those who agree."""
    trust = TokenTrust()

    for number in range(agreeing):
        observe(trust, f"good{number}", 10, of=5)
    for number in range(against):
        observe(trust, f"bad{number}", 11, of=5)

    assert (trust.reason is not None) == ends


def test_replicas_that_are_gone_have_no_vote() -> None:
    """Pods come for ever: those of last week would outvote all that are there."""
    trust = TokenTrust()
    for number in range(10):
        observe(trust, f"gone-{number}", 10, of=2)
        trust.forget(f"gone-{number}")

    observe(trust, "r1", 11, of=2)
    observe(trust, "r2", 11, of=2)

    assert trust.reason is not None


def test_local_tokens_are_tried_again() -> None:
    """After a pause, which doubles each time they are wrong again, up to an hour."""
    trust = TokenTrust()
    now_s, pauses = 0.0, []
    for _ in range(10):
        observe(trust, "r1", 11, of=1, now_s=now_s)
        assert not trust.try_again(now_s)
        started_s = now_s
        while not trust.try_again(now_s):
            now_s += 30.0
        pauses.append(now_s - started_s)

    assert pauses == [30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0, 3600.0]


def test_agreement_shortens_the_pause_again() -> None:
    """A hundred right counts in a row, and one mishap costs half a minute as in the beginning."""
    trust = TokenTrust()
    observe(trust, "r1", 11, of=1)
    trust.try_again(30.0)
    for _ in range(100):
        observe(trust, "r1", 10, of=1, now_s=30.0)
    observe(trust, "r1", 11, of=1, now_s=30.0)

    assert not trust.try_again(59.0)
    assert trust.try_again(60.0)
