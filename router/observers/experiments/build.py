"""Builds what experiments learn from requests, and their routes of the admin port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.http.part import Part
from router.observers.experiments import Results
from router.observers.experiments.admin import ExperimentPages
from router.observers.experiments.rows import experiment_fields

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> Part:
    """Build the part."""
    experiments = router.experiments
    return Part(
        observers=[Results(experiments)],
        pages=[ExperimentPages(experiments)],
        sections={"experiments": lambda: experiment_fields(experiments)},
    )
