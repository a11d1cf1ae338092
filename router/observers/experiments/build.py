"""Builds the experiments, and what shares their orders with other routers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from router.cluster import Orders
from router.http.part import ObserverPart
from router.metrics.families import Families
from router.observers.experiments import Experiments
from router.observers.experiments.admin import ExperimentPages
from router.observers.experiments.metrics import EXPERIMENT, ExperimentMetrics
from router.observers.experiments.rows import experiment_fields
from router.observers.experiments.runner import ExperimentRunner
from router.observers.experiments.state import decode_state

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> ObserverPart:
    """Build the part.

    Raises:
        ConfigError: a definition is wrong.
        ExperimentConflict: two definitions claim the same traffic.
    """
    registry = router.metrics.registry
    runner = ExperimentRunner(ExperimentMetrics(registry))
    for definition in router.config.experiment.definitions:
        runner.start(definition, time.time(), configured=True)
    registry.register(Families(EXPERIMENT, lambda: runner.metric_states(time.time())))
    if router.cluster.orders is not None:
        router.cluster.orders.add(
            Orders(
                key="experiments",
                decode=decode_state,
                known=lambda: runner.states,
                unsaved=runner.unsaved,
                saved=runner.saved,
                apply=lambda states: runner.apply(states, time.time()),
            )
        )
    experiments = Experiments(runner)
    return ObserverPart(
        observers=[experiments],
        choose=experiments.choose,
        pages=[ExperimentPages(runner)],
        sections={"experiments": lambda: experiment_fields(runner)},
    )
