"""Experiments to test with."""

from __future__ import annotations

from typing import Any

from router.config.experiments import Arm, Experiment, Step

NOW_S = 1_800_000_000.0


def arms(**shares: float) -> tuple[Arm, ...]:
    """Make variants by name, each with its own policy."""
    policies = ("kv_aware", "least_loaded", "random", "round_robin")
    return tuple(
        Arm(name=name, policy=policy, share=share)
        for (name, share), policy in zip(shares.items(), policies, strict=False)
    )


def experiment(**fields: Any) -> Experiment:
    """Make an experiment of two variants with half of the traffic each."""
    return Experiment(**({"name": "e", "arms": arms(a=0.5, b=0.5)} | fields))


def step(after_s: float, **shares: float) -> Step:
    return Step(after_s=after_s, shares=shares)
