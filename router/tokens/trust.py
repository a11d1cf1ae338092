"""Decide whether a model is tokenized here, by evidence that engines have the same tokens."""

from __future__ import annotations

from typing import Final

from router.base.backoff import Suspension
from router.tokens.id_probe import Difference

_MIN_AGAINST: Final = 2  # replicas, if several serve the model
_PAUSE_S: Final = (30.0, 3600.0)
_NUM_PROVEN: Final = 100  # agreeing answers in a row, after which the pause is short again


class _Evidence:
    """The evidence of one replica.

    agrees: Whether its last answer agreed; None: it has not answered.
    is_compared: Whether the ids of its process were compared with ours.
    difference: The result of the comparison; None: the ids are the same.
    """

    __slots__ = ("agrees", "difference", "is_compared")

    def __init__(self) -> None:
        self.agrees: bool | None = None
        self.is_compared = False
        self.difference: Difference | None = None


class TokenTrust:
    """Counts agreement with the replicas of one model.

    A prompt's tokens must be the engine's, else they match no blocks. Answers are votes of
    replicas, not failures in a row: a replica that disagrees alone is wrong itself. If several
    disagree, and more than agree, our tokens are wrong: the engine tokenizes for a pause, which
    doubles each time. Then our tokens are tried again.

    Compared ids count more than counts of tokens. A process goes on making the ids that it makes,
    so nothing is tried again while more than half of the processes make other ids.

    proven: Requests that engines accepted and counted as we do, since the model was last suspect:
        pairs of an API's name and whether the request had a tool choice.
    reason: Why the engine tokenizes; None: it need not.
    """

    __slots__ = (
        "_num_in_a_row",
        "_num_serving",
        "_reason",
        "_replicas",
        "_suspension",
        "num_matches",
        "num_proofs",
        "proven",
        "reason",
    )

    def __init__(self) -> None:
        self.num_matches = 0
        self.num_proofs = 0
        self.proven: set[tuple[str, bool]] = set()
        self.reason: str | None = None
        self._reason: str | None = None
        self._replicas: dict[str, _Evidence] = {}
        self._num_serving = 0
        self._num_in_a_row = 0
        self._suspension = Suspension(*_PAUSE_S)

    def disagrees(self, replica: str) -> bool:
        """Return whether the replica's last answer had other tokens, or it makes other ids."""
        known = self._replicas.get(replica)
        return known is not None and (known.agrees is False or known.difference is not None)

    def differences(self) -> list[tuple[str, str]]:
        """List the replicas that make other ids, and what is different."""
        found = ((name, known.difference) for name, known in self._replicas.items())
        return [(name, difference.what) for name, difference in found if difference is not None]

    def has_compared(self, replica: str) -> bool:
        """Return whether the ids of the replica's process were compared with ours."""
        return replica in self._replicas and self._replicas[replica].is_compared

    def observe_ids(
        self, replica: str, difference: Difference | None, *, num_serving: int = 1
    ) -> None:
        """Record the result of a comparison of ids.

        Args:
            difference: None: they are the same.
            num_serving: Replicas that serve the model now.
        """
        known = self._evidence(replica)
        known.is_compared, known.difference = True, difference
        self._num_serving = max(num_serving, self._num_compared())
        self._decide()
        if difference is not None:
            self.proven.clear()

    def observe_usage(
        self, replica: str, num_tokens: int, prompt_tokens: int, *, has_others: bool, now_s: float
    ) -> bool:
        """Compare our count of a prompt with a replica's `usage.prompt_tokens`.

        Only for prompts that were tokenized here. Returns whether the counts agree.

        Args:
            has_others: Other replicas serve the model, too.
        """
        is_match = num_tokens == prompt_tokens
        reason = f"counted {num_tokens} prompt tokens, the engine {prompt_tokens}"
        self._judge(replica, is_match, reason, has_others=has_others, now_s=now_s)
        self._count(is_match)
        return is_match

    def forget(self, replica: str) -> None:
        """Drop the evidence of a replica that is gone, or is another process now."""
        known = self._replicas.pop(replica, None)
        if known is not None and known.is_compared:
            self._num_serving = self._num_compared()
            self._decide()

    def observe_proof(self, is_proven: bool, *, now_s: float) -> bool:
        """Record the result of a full encode of a prompt that was encoded in pieces."""
        self.num_proofs += 1
        self._count(is_proven)
        if not is_proven:
            self._end("a full encode gave other tokens than the pieces", now_s)
        return is_proven

    def try_again(self, now_s: float) -> bool:
        """Use our tokens again if the pause is over; return whether they are used from now on."""
        if self._reason is None or self._suspension.is_on(now_s):
            return False
        self._reason = None
        for known in self._replicas.values():
            known.agrees = None
        self._decide()
        return self.reason is None

    def start_again(self) -> None:
        """Drop all evidence: tokens are made in another way from now on."""
        self._reason = None
        self._replicas.clear()
        self._decide()

    def _decide(self) -> None:
        """Set `reason` by all evidence: after each change of it, as each prompt reads it."""
        found = [each.difference for each in self._replicas.values() if each.difference is not None]
        self.reason = found[-1].what if 2 * len(found) > self._num_serving else self._reason

    def _evidence(self, replica: str) -> _Evidence:
        known = self._replicas.get(replica)
        if known is None:
            known = self._replicas[replica] = _Evidence()
        return known

    def _num_compared(self) -> int:
        return sum(each.is_compared for each in self._replicas.values())

    def _judge(
        self, replica: str, is_match: bool, reason: str, *, has_others: bool, now_s: float
    ) -> None:
        """Record a replica's evidence; end local tokens if enough replicas are against them."""
        self._evidence(replica).agrees = is_match
        if is_match:
            return
        votes = [each.agrees for each in self._replicas.values() if each.agrees is not None]
        num_against = votes.count(False)
        if num_against >= (_MIN_AGAINST if has_others else 1) and 2 * num_against > len(votes):
            self._end(reason, now_s)

    def _count(self, is_match: bool) -> None:
        if not is_match:
            self._num_in_a_row = 0
            return
        self.num_matches += 1
        self._num_in_a_row += 1
        if self._num_in_a_row >= _NUM_PROVEN:
            self._suspension.reset()

    def _end(self, reason: str, now_s: float) -> None:
        if self._reason is None:  # earlier requests may still come to the same end
            self._reason = reason
            self._decide()
            self.proven.clear()
            self._suspension.begin(now_s)
