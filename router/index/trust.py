"""How far predictions for one candidate can be trusted, separately for what they are based on.

What must live here: what answers show, and what follows from it. What must not: matches, streams.

    based on                 if its predictions are wrong
    events of the GPU        history is read again; each time after twice as many answers
    the cpu tier             the tier does not count, until it would have been right again

Pauses are counted in answers, not in seconds as in `router.base.backoff`: if a candidate answers
nothing, nothing shows that it has become better.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

TRUST_DECAY: Final = 0.98  # half of the weight lies on the last 35 audits
MIN_AUDITS: Final = 20  # nothing is concluded from fewer
SUSPECT_BELOW: Final = 0.6
"""Below this share of right predictions a stream is read again, or a tier does not count. Evictions
between decision and schedule do not count (`Audit.was_overtaken`). A lost event makes nearly
all turns of a session wrong."""

GOOD_FROM: Final = 0.9
"""From this share of right predictions on, earlier wrong ones have no more effect."""

_CPU_DECAY: Final = 0.95  # a tier is mostly right, or mostly wrong
_CPU_AUDITS: Final = 10
_MAX_NEEDED: Final = 64 * MIN_AUDITS


class Account(Struct):
    """The share of right predictions of one kind; recent ones count more."""

    ratio: float = 1.0
    num_audits: int = 0
    decay: float = TRUST_DECAY
    num_needed: int = MIN_AUDITS  # nothing is concluded from fewer

    def observe(self, right: bool) -> None:
        """Record a prediction's outcome."""
        self.ratio = self.decay * self.ratio + (1 - self.decay) * right
        self.num_audits += 1

    @property
    def is_bad(self) -> bool:
        """Whether enough predictions were seen, and too many of them were wrong."""
        return self.num_audits >= self.num_needed and self.ratio < SUSPECT_BELOW


class Trust:
    """What answers show of one candidate."""

    __slots__ = ("_num_needed", "counts_cpu", "cpu", "gpu")

    def __init__(self) -> None:
        self.gpu = Account()
        self.cpu = Account(decay=_CPU_DECAY, num_needed=_CPU_AUDITS)
        self.counts_cpu = True
        self._num_needed = MIN_AUDITS  # answers before history is read again

    def observe_gpu(self, right: bool) -> bool:
        """Record a prediction by the GPU's events; return whether to read history again."""
        self.gpu.observe(right)
        if self.gpu.num_audits >= MIN_AUDITS and self.gpu.ratio >= GOOD_FROM:
            self._num_needed = MIN_AUDITS
        return self.gpu.is_bad and self.gpu.num_audits >= self._num_needed

    def observe_cpu(self, right: bool) -> bool:
        """Record what the cpu tier would have added; return whether `counts_cpu` changed."""
        self.cpu.observe(right)
        changes = self.cpu.is_bad if self.counts_cpu else self.cpu.ratio >= GOOD_FROM
        if changes:
            self.counts_cpu = not self.counts_cpu
        return changes

    def forgive(self, *, was_read: bool = False) -> None:
        """Begin the GPU's account again; `was_read`: history is being read again for it."""
        self.gpu = Account()
        if was_read:
            self._num_needed = min(2 * self._num_needed, _MAX_NEEDED)
