"""Whether engines have the tokens that we have: evidence by replica, a verdict by model."""

from __future__ import annotations

from collections import deque
from typing import Final

from router.backoff import Suspension
from router.tokens.id_probe import Difference

_MIN_AGAINST: Final = 2  # replicas, where several serve the model
_NUM_RECENT: Final = 32  # prompts of a replica whose blocks were waited for
_MAX_MISSED: Final = 3  # of them did not come
_PAUSE_S: Final = (30.0, 3600.0)
_NUM_PROVEN: Final = 100  # agreeing answers in a row, after which the pause is short again
_NONE: Final[deque[bool]] = deque()


class TokenTrust:
    """Counts agreement with the replicas, and decides whether a model is tokenized here.

    A prompt's tokens are either the engine's or worthless for finding its blocks. The other
    replicas show whose fault a disagreement is: one that disagrees alone is wrong itself. Where
    several disagree, and more than agree, our tokens are wrong: the engine tokenizes, for a pause
    that doubles each time; then ours are tried again.

    Ids that were compared weigh more than counts: a process that makes other ids goes on making
    them, so nothing is tried again while it runs. More such processes than others end it.

    proven: What engines accepted and counted as we do since the model was last suspect: pairs of
        an API's name and whether the request had a tool choice.
    """

    __slots__ = (
        "_agrees",
        "_blocks",
        "_ids",
        "_num_in_a_row",
        "_num_serving",
        "_reason",
        "_suspension",
        "num_matches",
        "num_mismatches",
        "num_proofs",
        "proven",
    )

    def __init__(self) -> None:
        self.num_matches = 0
        self.num_mismatches = 0
        self.num_proofs = 0
        self._reason: str | None = None
        self.proven: set[tuple[str, bool]] = set()
        self._agrees: dict[str, bool] = {}  # by replica: its last answer
        self._ids: dict[str, Difference | None] = {}  # by replica, once compared; None: the same
        self._num_serving = 0
        self._blocks: dict[str, deque[bool]] = {}  # by replica: whether those of prompts came
        self._num_in_a_row = 0
        self._suspension = Suspension(*_PAUSE_S)

    @property
    def reason(self) -> str | None:
        """Why the engine tokenizes; None: it need not."""
        different = [found for found in self._ids.values() if found is not None]
        return different[-1].what if 2 * len(different) > self._num_serving else self._reason

    def disagrees(self, replica: str) -> bool:
        """Return whether the replica counted other tokens last, or makes other ids."""
        return self._agrees.get(replica) is False or self._ids.get(replica) is not None

    def has_compared(self, replica: str) -> bool:
        """Return whether the ids of the replica's process were compared with ours."""
        return replica in self._ids

    def observe_ids(
        self, replica: str, difference: Difference | None, *, num_serving: int = 1
    ) -> None:
        """Note the outcome of a comparison of ids; None: they are the same.

        `num_serving`: replicas that serve the model now.
        """
        self._ids[replica] = difference
        self._num_serving = max(num_serving, len(self._ids))
        if difference is not None:
            self.num_mismatches += 1
            self.proven.clear()

    def observe_usage(
        self, replica: str, num_tokens: int, prompt_tokens: int, *, has_others: bool, now_s: float
    ) -> bool:
        """Compare our count of a prompt with a replica's `usage.prompt_tokens`.

        Only for prompts that were tokenized here. `has_others`: other replicas serve the model,
        too. Returns whether the counts agree.
        """
        is_match = num_tokens == prompt_tokens
        reason = f"counted {num_tokens} prompt tokens, the engine {prompt_tokens}"
        if not is_match or not self._is_missed(replica):
            self._judge(replica, is_match, reason, has_others=has_others, now_s=now_s)
        self._count(is_match)
        return is_match

    def observe_blocks(self, replica: str, came: bool, *, has_others: bool, now_s: float) -> None:
        """Note whether a replica stored our blocks of a prompt that it tokenized itself."""
        recent = self._blocks.setdefault(replica, deque(maxlen=_NUM_RECENT))
        recent.append(came)
        if not came:
            self._count(False)
            self.proven.clear()
        if self._is_missed(replica):
            reason = f"the engine stored other blocks of {recent.count(False)} recent prompts"
            self._judge(replica, False, reason, has_others=has_others, now_s=now_s)

    def num_missed(self, replica: str) -> int:
        """Count the recent prompts of which a replica stored other blocks."""
        return self._blocks.get(replica, _NONE).count(False)

    def _is_missed(self, replica: str) -> bool:
        """Return whether blocks show that a replica's ids are not ours, whatever it counts."""
        return self.num_missed(replica) >= _MAX_MISSED

    def _judge(
        self, replica: str, is_match: bool, reason: str, *, has_others: bool, now_s: float
    ) -> None:
        """Note a replica's evidence; it ends local tokens where enough replicas have such."""
        self._agrees[replica] = is_match
        if is_match:
            return
        num_against = sum(not agrees for agrees in self._agrees.values())
        is_enough = num_against >= (_MIN_AGAINST if has_others else 1)
        if is_enough and 2 * num_against > len(self._agrees):
            self._end(reason, now_s)

    def forget(self, replica: str) -> None:
        """Forget what a replica counted and made: it is gone, or another process."""
        self._agrees.pop(replica, None)
        self._blocks.pop(replica, None)
        if replica in self._ids:
            del self._ids[replica]
            self._num_serving = len(self._ids)

    def observe_proof(self, is_proven: bool, *, now_s: float) -> bool:
        """Note the outcome of a full encode of a prompt that was encoded in pieces."""
        self.num_proofs += 1
        self._count(is_proven)
        if not is_proven:
            self._end("a full encode gave other tokens than the pieces", now_s)
        return is_proven

    def try_again(self, now_s: float) -> bool:
        """Use our tokens again once the pause is over; True: from now on."""
        if self._reason is None or self._suspension.is_on(now_s):
            return False
        self._reason = None
        self._agrees.clear()
        self._blocks.clear()
        return self.reason is None

    def start_again(self) -> None:
        """Forget what spoke against our tokens: they are made in another way from now on."""
        self._reason = None
        self._agrees.clear()
        self._blocks.clear()
        self._ids.clear()

    def _count(self, is_match: bool) -> None:
        if not is_match:
            self.num_mismatches += 1
            self._num_in_a_row = 0
            return
        self.num_matches += 1
        self._num_in_a_row += 1
        if self._num_in_a_row >= _NUM_PROVEN:
            self._suspension.reset()

    def _end(self, reason: str, now_s: float) -> None:
        if self._reason is None:  # requests of before may still come to the same end
            self._reason = reason
            self.proven.clear()
            self._suspension.begin(now_s)
