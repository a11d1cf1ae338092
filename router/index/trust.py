"""How far predictions for one candidate can be trusted, told apart by what they rest on.

What must live here: what answers show, and what follows from it. What must not: matches, streams.

    rests on                 if its predictions are wrong
    events of the GPU        history is read again, each time after twice as many answers
    the cpu tier             the tier counts no more, until what it would have added is right again
    how copies are counted   the other way is taken (router.index.copies), and history read again

Source of the last: vllm-project/vllm#55092 reports a block's removal with its last copy, vLLM
0.32.0 each copy's.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

TRUST_DECAY: Final = 0.98  # half of the weight lies on the last 35 audits
MIN_AUDITS: Final = 20  # nothing is concluded from fewer
SUSPECT_BELOW: Final = 0.6
"""Share of right predictions under which a stream is re-synced, or a tier does not count. Evictions
between decision and schedule do not count (`CacheView.was_overtaken`); a lost event costs nearly
all of a session's turns."""

GOOD_FROM: Final = 0.9
"""Share of right predictions from which on it is as if there never was a doubt."""

_CPU_DECAY: Final = 0.95  # a tier is mostly right, or mostly wrong
_CPU_AUDITS: Final = 10
_MAX_NEEDED: Final = 64 * MIN_AUDITS
_RUN: Final = 3  # answers that speak for the other way of counting copies
_MAX_RUN: Final = 384


class Account(Struct):
    """The share of right predictions of one kind, recent ones counting more."""

    ratio: float = 1.0
    num_audits: int = 0
    decay: float = TRUST_DECAY
    num_needed: int = MIN_AUDITS  # nothing is concluded from fewer

    def observe(self, right: bool) -> None:
        """Note a prediction's outcome."""
        self.ratio = self.decay * self.ratio + (1 - self.decay) * right
        self.num_audits += 1

    @property
    def is_bad(self) -> bool:
        """Whether enough predictions were seen, and too many of them were wrong."""
        return self.num_audits >= self.num_needed and self.ratio < SUSPECT_BELOW


class Trust:
    """What answers show of one candidate."""

    __slots__ = ("_num_needed", "_run", "_run_needed", "counts_cpu", "cpu", "gpu")

    def __init__(self) -> None:
        self.gpu = Account()
        self.cpu = Account(decay=_CPU_DECAY, num_needed=_CPU_AUDITS)
        self.counts_cpu = True
        self._num_needed = MIN_AUDITS  # answers before history is read again
        self._run = 0
        self._run_needed = _RUN

    def observe_gpu(self, right: bool) -> bool:
        """Note a prediction by the GPU's events; return whether to read history again."""
        self.gpu.observe(right)
        if self.gpu.num_audits >= MIN_AUDITS and self.gpu.ratio >= GOOD_FROM:
            self._num_needed = MIN_AUDITS
        return self.gpu.is_bad and self.gpu.num_audits >= self._num_needed

    def observe_cpu(self, right: bool) -> bool:
        """Note what the cpu tier would have added; return whether it counts, or not, from now on.

        It counts again where it would have been right for some time.
        """
        self.cpu.observe(right)
        if self.counts_cpu:
            changes = self.cpu.is_bad
        else:
            changes = self.cpu.ratio >= GOOD_FROM
        if changes:
            self.counts_cpu = not self.counts_cpu
        return changes

    def observe_copies(self) -> bool:
        """Note an answer that counting copies the other way explains; return whether to do so."""
        self._run += 1
        if self._run < self._run_needed:
            return False
        self._run = 0
        self._run_needed = min(2 * self._run_needed, _MAX_RUN)
        return True

    def forgive(self, *, was_read: bool = False) -> None:
        """Begin the GPU's account again; `was_read`: history is being read again for it."""
        self.gpu = Account()
        if was_read:
            self._num_needed = min(2 * self._num_needed, _MAX_NEEDED)
