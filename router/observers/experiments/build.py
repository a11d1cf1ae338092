"""Builds the experiments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.http.part import ObserverPart
from router.observers.experiments import Experiments
from router.observers.experiments.metrics import EXPERIMENT, ExperimentMetrics

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> ObserverPart:
    """Build the part."""
    experiments = Experiments(router.config.experiment, ExperimentMetrics(router.metrics.registry))
    router.metrics.watch(EXPERIMENT, experiments.running)
    return ObserverPart(
        observers=[experiments],
        choose=experiments.choose,
        sections={"experiment": experiments.described},
        configure=lambda config: experiments.configure(config.experiment),
    )
