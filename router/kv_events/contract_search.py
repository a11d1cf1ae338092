"""The search for an engine's hash contract, from its own events; and its verification later.

    phase        next          when
    SEARCHING    FOUND         an event that starts a prompt obeys a known contract
    SEARCHING    TRANSLATED    `MAX_MISSES` plain events obey none
    FOUND        SEARCHING     a plain event does not obey it any more: it is another engine
    TRANSLATED   SEARCHING     the engine restarts

In phase FOUND an event is verified now and then; one with extra keys shows `tagged`.

A contract taken over from another router counts as FOUND, and is verified by the first event that
can. If that fails, what is indexed stays right: a replay has proven that the engine is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Final

from msgspec import structs

from router.base.contracts import HashContract
from router.kv_events.stored_view import StoredView, find_contract, obeys

MAX_MISSES: Final = 3
"""Plain events that obey none before translation: not one, for an old engine hides salts."""

VERIFY_EVERY: Final = 256
"""One in so many of the events that start a prompt is verified with tokens."""

_MAX_TAG_CHECKS: Final = 64
"""An adapter whose path is not known obeys neither way: do not check for ever."""


class Phase(Enum):
    SEARCHING = auto()
    FOUND = auto()
    TRANSLATED = auto()


class ContractSearch:
    """The contract of one rank as far as it is known.

    Args:
        guess: The contract until one is found.
        seeds: Texts to try as the engine's seed before the defaults.
        lora_paths: Adapter name to path; read at each event, the owner may change it.
    """

    __slots__ = (
        "_guess",
        "_is_tag_known",
        "_is_taken_over",
        "_lora_paths",
        "_num_tag_checks",
        "_num_until_verified",
        "_seeds",
        "contract",
        "num_misses",
        "phase",
    )

    def __init__(
        self, guess: HashContract, seeds: Sequence[str], lora_paths: Mapping[str, str]
    ) -> None:
        self._guess = self.contract = guess
        self._seeds = seeds
        self._lora_paths = lora_paths
        self.phase = Phase.SEARCHING
        self.restart()

    def restart(self) -> None:
        """Search again: the engine may be another one now. The last contract is the next guess."""
        if self.phase is Phase.TRANSLATED:
            self.contract = self._guess
        self.phase = Phase.SEARCHING
        self.num_misses = 0
        self._num_until_verified = VERIFY_EVERY
        self._is_tag_known = False
        self._num_tag_checks = 0
        self._is_taken_over = False

    def take_over(self, contract: HashContract, *, is_verified: bool) -> None:
        """Go on with a contract that another router found, or guessed."""
        self.contract = contract
        if is_verified:
            self.phase = Phase.FOUND
            self._num_until_verified = 0
            self._is_taken_over = True

    def wants(self, stored: StoredView) -> bool:
        """Return whether to examine this event, which starts a prompt (tokens may be missing)."""
        if self.phase is Phase.FOUND:
            self._num_until_verified -= 1
            may_check_tag = not self._is_tag_known and not stored.is_plain
            return self._num_until_verified <= 0 or may_check_tag
        return self.phase is Phase.SEARCHING

    def examine(self, stored: StoredView) -> bool:
        """Check the contract against an event with its tokens, or search it.

        Returns:
            True if blocks were indexed under wrong keys so far: history is needed again.
        """
        if self.phase is Phase.SEARCHING:
            return self._try(stored)
        verdict = obeys(self.contract, stored, lora_paths=self._lora_paths)
        if not stored.is_plain:
            self._check_tag(stored, verdict)
            return False
        was_taken_over, self._is_taken_over = self._is_taken_over, False
        self._num_until_verified = VERIFY_EVERY
        if verdict is False:
            self.restart()
            self.num_misses = 1
            return not was_taken_over
        return False

    def _try(self, stored: StoredView) -> bool:
        found = find_contract(stored, seeds=self._seeds, lora_paths=self._lora_paths)
        if found is not None:
            self.contract = found
            self.phase = Phase.FOUND
            self._is_tag_known = not stored.is_plain
        elif stored.is_computable and stored.is_plain and not stored.is_sparse:
            self.num_misses += 1
            if self.num_misses >= MAX_MISSES:
                self.contract = HashContract(
                    algorithm="warmroute",
                    block_size=stored.block_size,
                    lookahead=0 if stored.lookahead is None else stored.lookaheads[0],
                )
                self.phase = Phase.TRANSLATED
                return True
        return False

    def _check_tag(self, stored: StoredView, verdict: bool | None) -> None:
        """Check by a salted or adapter's event whether extra keys are tagged in digests."""
        other = structs.replace(self.contract, tagged=not self.contract.tagged)
        if verdict is False and obeys(other, stored, lora_paths=self._lora_paths):
            self.contract = other
            verdict = True
        self._num_tag_checks += 1
        self._is_tag_known = verdict is True or self._num_tag_checks >= _MAX_TAG_CHECKS
