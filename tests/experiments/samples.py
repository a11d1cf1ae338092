"""Experiments to test with."""

from __future__ import annotations

from typing import Any

from router.experiments.definition import Arm, Experiment, Step

NOW_S = 1_800_000_000.0


def arms(**shares: float) -> tuple[Arm, ...]:
    """Make arms by name; each with a policy of its own."""
    policies = ("kv_aware", "least_loaded", "random", "round_robin")
    return tuple(
        Arm(name=name, policy=policy, share=share)
        for (name, share), policy in zip(shares.items(), policies, strict=False)
    )


def experiment(**fields: Any) -> Experiment:
    """Make an experiment of two arms with half of the traffic each."""
    return Experiment(**({"name": "e", "arms": arms(a=0.5, b=0.5)} | fields))


def partition(**fields: Any) -> Experiment:
    """Make one that parts the replicas r1 and r2 from r3."""
    a = Arm(name="a", policy="kv_aware", share=0.5, replicas=("r1", "http://h2/"))
    b = Arm(name="b", policy="random", share=0.5, replicas=("r3",))
    return experiment(**({"design": "partition", "arms": (a, b)} | fields))


def step(after_s: float, **shares: float) -> Step:
    return Step(after_s=after_s, shares=shares)
