"""The experiments of the live page's state."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any, Final

from router.observers.experiments.runner import ExperimentRunner

MAX_EXPERIMENTS: Final = 5


def experiment_fields(runner: ExperimentRunner) -> list[dict[str, Any]]:
    """Describe the first experiments: variants, shares, and what stopped them."""
    now = time.time()
    described = (
        runner.describe(trial.state.definition.name, now)
        for trial in islice(runner.trials, MAX_EXPERIMENTS)
    )
    return [
        {
            "name": each["name"],
            "standing": each["standing"],
            "arms": [
                {name: arm[name] for name in ("name", "policy", "is_control", "share", "stopped")}
                for arm in each["arms"]
            ],
        }
        for each in described
    ]
