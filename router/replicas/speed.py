"""How fast a replica is: the fit of its label, times a factor of its own.

Replicas with one label share a fit. The label is `hardware`, else the model. A replica's factor is
the median of observed to fitted time of its recent first tokens, smoothed. The fit learns from
observed times over the factor. So a mislabelled or slow replica spoils no prediction of the others.
"""

from __future__ import annotations

from collections import deque
from math import sqrt
from statistics import median
from typing import Final

from policies.view import CostModel
from router.replicas.cost_fit import CostFit, Work, scaled

NUM_RECENT: Final = 32
"""First tokens that are compared: with errors of 50 % their median is good to 11 %."""
_EVERY: Final = 8  # first tokens between two comparisons: as often as a fit is solved
_LEAST, _MOST = 0.5, 3.0  # of the factor
_FLOOR_MS: Final = 50.0
"""Shorter times do not count: they are scheduling and network, not compute."""


class Speed:
    """One replica's speed; `fit` is that of its label."""

    __slots__ = ("_fitted", "_model", "_num_until_look", "_ratio", "_recent", "factor", "fit")

    def __init__(self, fit: CostFit) -> None:
        self.fit = fit
        self.factor = 1.0
        self._ratio: float | None = None  # the factor without its bounds; None: not known yet
        self._fitted = self._model = fit.model
        self._recent: deque[tuple[Work, float]] = deque(maxlen=NUM_RECENT)
        self._num_until_look = NUM_RECENT

    @property
    def model(self) -> CostModel:
        """What to predict with."""
        if self._fitted is not self.fit.model:
            self._scale()
        return self._model

    def observe(
        self, work: Work, ttft_ms: float, predicted_ms: float, elsewhere_s: float | None = None
    ) -> None:
        """Add one first token to the fit; arguments as of `CostFit.observe`.

        `elsewhere_s`: now, if another router saw it.
        """
        if elsewhere_s is None or self.fit.takes_elsewhere(elsewhere_s):
            self.fit.observe(work, ttft_ms / self.factor, predicted_ms / self.factor)
        self._recent.append((work, ttft_ms))
        self._num_until_look -= 1
        if self._num_until_look <= 0:
            self._num_until_look = _EVERY
            self._compare()

    def _compare(self) -> None:
        """Set the factor, if enough of the recent first tokens show it."""
        fitted = [(work.predict_ms(self.fit.model), ttft_ms) for work, ttft_ms in self._recent]
        ratios = [ttft_ms / fitted_ms for fitted_ms, ttft_ms in fitted if fitted_ms >= _FLOOR_MS]
        if len(ratios) >= _EVERY:
            ratio = median(ratios)
            self._ratio = ratio if self._ratio is None else sqrt(self._ratio * ratio)
            self.factor = min(_MOST, max(_LEAST, self._ratio))
            self._scale()

    def _scale(self) -> None:
        self._fitted = self.fit.model
        self._model = scaled(self._fitted, self.factor)
