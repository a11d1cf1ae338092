"""Gives requests their variants, and counts the results of each variant.

The configuration has one experiment. If it is read again with another one, that one takes over at
its `start_at`, or at once. Until then the experiment before it goes on, so routers that read the
file at different moments switch at the same one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from router.config.experiments import Experiment
from router.observers.experiments.assignment import Trial
from router.observers.experiments.metrics import ExperimentMetrics
from router.records.record import Outcome
from router.request.observer import Facts, Observer
from router.request.results import Read, Variant

logger = logging.getLogger(__name__)


class Experiments(Observer):
    """The experiment that runs, and the one that takes over.

    Args:
        clock: Returns unix seconds, the time that routers have in common.
    """

    def __init__(
        self,
        definition: Experiment | None,
        metrics: ExperimentMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._running: Trial | None = None
        self._next: Trial | None = None
        self.configure(definition)

    def configure(self, definition: Experiment | None) -> None:
        """Run another definition, from its `start_at` on; None: end the experiment at once."""
        now_s = self._clock()
        running, self._next = self._at(now_s), None
        if definition is None:
            self._switch(None)
        elif running is None or definition != running.definition:
            self._next = Trial(definition, max(now_s, definition.start_at or 0.0))
            self._at(now_s)

    def choose(self, read: Read) -> Variant | None:
        """Assign a prompt to a variant. None: it is in no experiment.

        By session: the client's session id, or the first turn of the conversation. A completion
        without a session id takes part in switchbacks only.
        """
        if self._running is None and self._next is None:
            return None
        now_s = self._clock()
        trial = self._at(now_s)
        if trial is None:
            return None
        return trial.assign(read.model or "", read.whose.session_hash, now_s)

    def ended(self, facts: Facts) -> None:
        if facts.prompt.variant is None or facts.placement is None:
            return
        assigned, running = facts.prompt.variant.record, self._running
        if running is None or assigned.experiment != running.definition.name:
            return  # its labels are gone
        labels = assigned.experiment, assigned.arm
        metrics = self._metrics
        if assigned.not_counted is not None:
            metrics.variant_not_counted.labels(*labels, assigned.not_counted).inc()
            return
        metrics.variant_requests.labels(*labels, facts.outcome.value).inc()
        if facts.first_s is not None and facts.ttft_ms is not None:
            metrics.variant_ttft.labels(*labels).observe(
                facts.first_s - facts.read.inbound.arrived_s
            )
        if facts.outcome == Outcome.OK:
            cached = facts.num_reported_cached_tokens
            if cached is None:
                cached = facts.num_predicted_cached_tokens
            num_tokens = facts.prompt.num_tokens
            metrics.variant_tokens.labels(*labels, "prompt").inc(num_tokens)
            metrics.variant_tokens.labels(*labels, "recomputed").inc(max(0, num_tokens - cached))

    def running(self) -> list[tuple[str, Experiment]]:
        """Return the experiment that runs, by name, for /metrics; []: none."""
        trial = self._at(self._clock())
        return [] if trial is None else [(trial.definition.name, trial.definition)]

    def described(self) -> dict[str, Any] | None:
        """Describe the experiment that runs and the next one, for people; None: there is none."""
        now_s = self._clock()
        running, coming = self._at(now_s), self._next
        shown = running or coming
        if shown is None:
            return None
        definition, shares, slot = shown.definition, shown.definition.shares(), None
        if running is not None and definition.design == "switchback":
            number = int(now_s // definition.slot_s)
            ends_at = (number + 1) * definition.slot_s
            slot = {"variant": running.variant_of_slot(number), "ends_at": ends_at}
        return {
            "name": definition.name,
            "id": shown.id,
            "design": definition.design,
            "standing": "scheduled" if running is None else "running",
            "started_at": shown.started_s,
            "variants": [
                {"name": each.name, "policy": each.policy, "share": shares[each.name]}
                for each in definition.variants
            ],
            "slot": slot,
            "next": None
            if running is None or coming is None
            else {"name": coming.definition.name, "id": coming.id, "starts_at": coming.started_s},
        }

    def _at(self, now_s: float) -> Trial | None:
        """Return what runs now."""
        if self._next is not None and now_s >= self._next.started_s:
            trial, self._next = self._next, None
            self._switch(trial)
        return self._running

    def _switch(self, trial: Trial | None) -> None:
        old, self._running = self._running, trial
        if old is not None and (trial is None or trial.definition.name != old.definition.name):
            self._metrics.drop("experiment", old.definition.name)
            logger.info("experiment ended", extra={"experiment": old.definition.name})
        if trial is not None:
            fields = {"experiment": trial.definition.name, "design": trial.definition.design}
            logger.info("experiment started", extra=fields | {"id": trial.id})
