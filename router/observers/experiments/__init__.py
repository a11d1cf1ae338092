"""Gives requests their variants, and experiments the results of their requests."""

from __future__ import annotations

import time

from router.observers.experiments.runner import ExperimentRunner
from router.request.observer import Facts, Observer
from router.request.record import record_of
from router.request.results import Read, Variant


class Experiments(Observer):
    """Assigns requests, and hands their results to their experiments."""

    def __init__(self, runner: ExperimentRunner) -> None:
        self.runner = runner

    def choose(self, read: Read) -> Variant | None:
        """Assign a prompt to a variant. None: it is in no experiment.

        By session: the client's session id, or the first turn of the conversation. A completion
        without a session id takes part in switchbacks only.
        """
        if self.runner.is_empty:
            return None
        return self.runner.assign(read.model or "", read.whose.session_hash, time.time())

    def ended(self, facts: Facts) -> None:
        if facts.prompt.variant is None or facts.placement is None:
            return
        ttft_s = None
        if facts.first_s is not None and facts.ttft_ms is not None:
            ttft_s = facts.first_s - facts.read.inbound.arrived_s
        self.runner.observe(record_of(facts), ttft_s)
