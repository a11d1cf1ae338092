"""How the admin API and /metrics show an experiment."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET
from msgspec.structs import asdict

from router.observers.experiments.draw import slot_of
from router.observers.experiments.metrics import ExperimentState
from router.observers.experiments.state import State
from router.observers.experiments.trial import Trial


def description_of(trial: Trial, at_s: float, *, overruled_by: str | None) -> dict[str, Any]:
    """Describe an experiment for people: variants, shares, guardrails, slot, orders."""
    state = trial.state
    shares = trial.shares(at_s)
    guards: dict[str, list[dict[str, Any]]] = {}
    for reading in trial.readings():
        guards.setdefault(reading.arm, []).append(asdict(reading))
    return {
        "name": state.definition.name,
        "id": state.id,
        "standing": status_of(state, at_s),
        "overruled_by": overruled_by if state.is_running else None,
        "started_at": state.started_s,
        "ended": state.ended,
        "arms": [
            {
                "name": arm.name,
                "policy": arm.policy,
                "params": arm.params,
                **({"queue": arm.queue} if arm.queue is not UNSET else {}),
                "is_control": arm.name == state.definition.control_arm,
                "share": shares[arm.name],
                "stopped": state.stopped.get(arm.name),
                "guardrails": guards.get(arm.name, []),
            }
            for arm in state.definition.arms
        ],
        "slot": _slot(trial, at_s),
        "definition": state.definition,
        "changes": state.changes,
    }


def metric_state_of(trial: Trial, at_s: float) -> ExperimentState:
    """Describe an experiment for /metrics."""
    state = trial.state
    is_running = status_of(state, at_s) == "running"
    return ExperimentState(
        name=state.definition.name,
        design=state.definition.design,
        is_running=is_running,
        shares={
            arm: share if is_running and arm not in state.stopped else 0.0
            for arm, share in trial.shares(at_s).items()
        },
        evidence={
            (reading.arm, reading.guardrail): reading.log_wealth / reading.needed
            for reading in trial.readings()
        },
    )


def status_of(state: State, at_s: float) -> str:
    """Return scheduled, running, ended or removed."""
    if state.removed:
        return "removed"
    if state.ended is not None:
        return "ended"
    return "running" if at_s >= state.started_s else "scheduled"


def _slot(trial: Trial, at_s: float) -> dict[str, Any] | None:
    """Describe the slot of a running switchback; None: there is none."""
    definition = trial.state.definition
    if definition.design != "switchback" or status_of(trial.state, at_s) != "running":
        return None
    number = slot_of(at_s, definition.slot_s)
    return {
        "number": number,
        "arm": trial.arm_of_slot(number),
        "ends_at": (number + 1) * definition.slot_s,
    }
