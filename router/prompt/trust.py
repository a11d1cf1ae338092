"""Does the engine count the tokens that we count? Evidence per model, and the verdict."""

from __future__ import annotations


class TokenTrust:
    """Counts agreement with the engine; one disagreement ends local tokenization.

    A prompt's tokens are either the engine's or worthless for finding its blocks, and whatever made
    them differ (another template, flag or release) will do so again. So there is no threshold.
    """

    __slots__ = ("num_matches", "num_mismatches", "num_proofs", "reason")

    def __init__(self) -> None:
        self.num_matches = 0
        self.num_mismatches = 0
        self.num_proofs = 0
        self.reason: str | None = None

    def observe_usage(self, num_tokens: int, prompt_tokens: int) -> bool:
        """Compare our count of a prompt with the engine's `usage.prompt_tokens`.

        Only for prompts that were tokenized here. Returns whether they agree.
        """
        return self._observe(
            num_tokens == prompt_tokens,
            f"counted {num_tokens} prompt tokens, the engine {prompt_tokens}",
        )

    def observe_proof(self, is_proven: bool) -> bool:
        """Note the outcome of a full encode of a prompt that was encoded in pieces."""
        self.num_proofs += 1
        return self._observe(is_proven, "a full encode gave other tokens than the pieces")

    def _observe(self, is_match: bool, reason: str) -> bool:
        if is_match:
            self.num_matches += 1
        else:
            self.num_mismatches += 1
            if self.reason is None:
                self.reason = reason
        return is_match
