"""Builds the experiments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.http.part import ObserverPart
from router.metrics.families import Families
from router.observers.experiments import Experiments
from router.observers.experiments.metrics import EXPERIMENT, ExperimentMetrics

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> ObserverPart:
    """Build the part."""
    registry = router.metrics.registry
    experiments = Experiments(router.config.experiment, ExperimentMetrics(registry))
    registry.register(Families(EXPERIMENT, experiments.states))
    return ObserverPart(
        observers=[experiments],
        choose=experiments.choose,
        sections={"experiment": experiments.described},
        configure=lambda config: experiments.configure(config.experiment),
    )
