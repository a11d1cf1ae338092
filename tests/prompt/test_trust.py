"""Evidence for and against our token counts."""

from __future__ import annotations

from router.prompt.trust import TokenTrust


def test_agreement_is_counted() -> None:
    """Agreeing counts and proofs leave everything as it is."""
    trust = TokenTrust()

    assert trust.observe_usage(10, 10)
    assert trust.observe_proof(True)

    assert trust.reason is None
    assert (trust.num_matches, trust.num_mismatches, trust.num_proofs) == (2, 0, 1)


def test_one_mismatch_is_enough() -> None:
    """The first disagreement is the reason, whatever comes after it."""
    trust = TokenTrust()

    assert not trust.observe_usage(10, 11)
    assert not trust.observe_proof(False)

    assert trust.reason == "counted 10 prompt tokens, the engine 11"
    assert trust.num_mismatches == 2


def test_failed_proof_says_so() -> None:
    """A failed proof is a reason of its own."""
    trust = TokenTrust()

    trust.observe_proof(False)

    assert trust.reason is not None
    assert "full encode" in trust.reason
