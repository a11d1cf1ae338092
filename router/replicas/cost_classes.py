"""Which replicas share a learned speed: those whose first tokens take equally long.

Replicas with one label begin in one class. The label is `hardware`, else the model. Recent first
tokens show whether a replica belongs there. Their median ratio of observed to predicted time is
compared with the class's other replicas. So a wrong fit, or a slowdown of all, moves no replica.

A replica leaves its class if it takes 50 % longer than the others, or a third less. It goes to the
oldest class of its label that differs by less than 20 %. If there is none, it gets a class of its
own. That begins with the scaled model of the old class, and with the recent first tokens. If an
older class fits again later, the replica goes back there.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from itertools import count
from math import exp, log
from statistics import median
from typing import Final, NamedTuple

from policies.view import CostModel
from router.replicas.cost_fit import CostFit, Work, scaled

logger = logging.getLogger(__name__)

NUM_RECENT: Final = 32
"""First tokens that are compared: with errors of 50 % their median is good to 11 %."""
_EVERY: Final = 8  # first tokens between two comparisons: as often as a fit is solved
_LEAVES: Final = log(1.5)
_JOINS: Final = log(1.2)
_FLOOR_MS: Final = 50.0
"""Shorter times count as this: they are scheduling and network, not compute."""
_NUM_COMPARED: Final = 9  # of a class's replicas: a comparison takes 0.3 ms


class _Seen(NamedTuple):
    """A first token."""

    work: Work
    ttft_ms: float


class CostClass:
    """Replicas of one speed, and the fit that they share."""

    __slots__ = ("fit", "members", "name")

    def __init__(self, name: str, fit: CostFit) -> None:
        self.name = name
        self.fit = fit
        self.members: list[Speed] = []


class CostClasses:
    """The classes of every label; what a label's first class learned outlives its replicas."""

    __slots__ = ("_by_label", "_prior")

    def __init__(self, prior: CostModel) -> None:
        self._prior = prior
        self._by_label: dict[tuple[str, str], list[CostClass]] = {}

    def of(self, model: str, label: str) -> list[CostClass]:
        """Return the classes of a label, oldest first."""
        classes = self._by_label.setdefault((model, label), [])
        if not classes:
            classes.append(CostClass(label, CostFit(self._prior)))
        return classes


class Speed:
    """One replica's speed: the class that it is in, and why.

    Args:
        replica: Its name, for the log.
        classes: Those of its label, oldest first; it begins in the first. More may be added.
    """

    __slots__ = ("_num_until_look", "_recent", "classes", "cost_class", "fit", "replica")

    def __init__(self, replica: str, classes: list[CostClass]) -> None:
        self.replica = replica
        self.classes = classes
        self._recent: deque[_Seen] = deque(maxlen=NUM_RECENT)
        self._num_until_look = NUM_RECENT
        self._join(classes[0])

    def leave(self) -> None:
        """Leave the class; an empty class is dropped, except for the first."""
        self.cost_class.members.remove(self)
        if not self.cost_class.members and self.cost_class is not self.classes[0]:
            self.classes.remove(self.cost_class)

    def observe(
        self, work: Work, ttft_ms: float, predicted_ms: float, elsewhere_s: float | None = None
    ) -> None:
        """Add one first token to the fit; arguments as of `CostFit.observe`.

        `elsewhere_s`: now, if another router saw it.
        """
        if elsewhere_s is None or self.fit.takes_elsewhere(elsewhere_s):
            self.fit.observe(work, ttft_ms, predicted_ms)
        self._recent.append(_Seen(work, ttft_ms))
        self._num_until_look -= 1
        if self._num_until_look <= 0:
            self._num_until_look = _EVERY
            self._look()

    def _look(self) -> None:
        """Move to a better class if there is one; see the module."""
        here = self._away_from(self.cost_class)
        leaves = here is not None and abs(here) > _LEAVES
        for other in self.classes:
            if other is self.cost_class:
                if not leaves:
                    return
                continue
            there = self._away_from(other)
            if there is not None and abs(there) < _JOINS:
                self._move(other)
                return
        if here is not None:
            self._move(self._found(here))

    def _away_from(self, cost_class: CostClass) -> float | None:
        """Return the logarithm of its time relative to the others of a class.

        None: none of them has enough first tokens.
        """
        model = cost_class.fit.model
        others = [
            each._off(model)
            for each in cost_class.members[-_NUM_COMPARED:]
            if each is not self and len(each._recent) == NUM_RECENT
        ]
        return self._off(model) - median(others) if others else None

    def _off(self, model: CostModel) -> float:
        """Return the median of log(observed / predicted)."""
        return median(
            log(max(seen.ttft_ms, _FLOOR_MS) / max(seen.work.predict_ms(model), _FLOOR_MS))
            for seen in self._recent
        )

    def _found(self, away: float) -> CostClass:
        """Create a class for a replica that is `exp(away)` times as slow."""
        before, first = self.cost_class, self.classes[0]
        fit = CostFit(scaled(before.fit.model, exp(away)))
        fit.steps, fit.mixed_steps = copy.deepcopy((before.fit.steps, before.fit.mixed_steps))
        for work, ttft_ms in self._recent:
            fit.observe(work, ttft_ms, work.predict_ms(fit.model))
        taken = {each.name for each in self.classes}
        names = (f"{first.name}~{number}" for number in count(2))
        found = CostClass(next(name for name in names if name not in taken), fit)
        self.classes.append(found)
        return found

    def _move(self, to: CostClass) -> None:
        before = self.cost_class
        self.leave()
        self._join(to)
        logger.info(
            "replica differs in speed from its class",
            extra={"replica": self.replica, "class": before.name, "goes_to": to.name},
        )

    def _join(self, cost_class: CostClass) -> None:
        self.cost_class, self.fit = cost_class, cost_class.fit  # the fit is what its class learned
        cost_class.members.append(self)
