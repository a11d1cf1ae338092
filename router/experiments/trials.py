"""Experiments in the way of requests: who is enrolled where, what became of it, who orders what.

The state is router.experiments'; here are the clocks, the log, the metrics, and the request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import asdict

from router.experiments import Enrolment, Experiments, State, Trial
from router.experiments.definition import Experiment
from router.experiments.slots import WallClock, slot_of
from router.experiments.standing import refused
from router.metrics import ExperimentState, Metrics
from router.records.outcome import Outcome
from router.records.record import DecisionRecord

logger = logging.getLogger(__name__)

BEYOND: Final = "beyond_partition"

_IS_ERROR: Final = {
    Outcome.OK.value: False,
    Outcome.REPLICA_FAILED.value: True,
    Outcome.REPLICA_UNREACHABLE.value: True,
}
"""What an outcome says of an arm; a client that erred or left says nothing."""


class Trials:
    """See the module.

    Args:
        wall: Unix time, what routers have in common.
        clock: Monotonic; tells that the wall clock was set.
    """

    def __init__(
        self,
        experiments: Experiments,
        *,
        metrics: Metrics,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.experiments = experiments
        self._metrics = metrics
        self._wall = wall
        self._clock = clock
        self._wall_clock = WallClock()
        self._by_arm: dict[tuple[str, str], _ArmMetrics] = {}
        self._refused: set[str] = set()  # states complained about

    # -- for requests ------------------------------------------------------------------------

    def enrol(self, model: str, digest: int | None) -> Enrolment | None:
        """Find a prompt's place; `digest` is of its session, None: it has none."""
        wall_s = self._wall()
        if self._wall_clock.look(wall_s, self._clock()):
            logger.warning("the wall clock was set", extra={"num": self._wall_clock.num_steps})
        stepped_at_s = self._wall_clock.stepped_at_s
        return self.experiments.enrol(model, digest, wall_s, stepped_at_s)

    def observed(self, enrolment: Enrolment, record: DecisionRecord, ttft_s: float | None) -> None:
        """Take in what became of an enrolled request; it may stop its arm."""
        assignment = record.assignment
        if assignment is None:
            return
        metrics = self._of(assignment.experiment, assignment.arm)
        metrics.count(record, ttft_s)
        is_beyond = assignment.not_counted == BEYOND  # another arm's replicas erred, or shone
        stopped = self.experiments.observe(
            enrolment,
            self._wall(),
            is_error=_IS_ERROR.get(record.outcome) if not is_beyond else None,
            ttft_s=ttft_s if not is_beyond else None,
        )
        if stopped is not None:
            state, verdict = stopped
            self._metrics.experiment_stops.labels(
                enrolment.experiment, verdict.arm, verdict.guardrail
            ).inc()
            self._say_stopped(state, verdict.arm)

    def _of(self, experiment: str, arm: str) -> _ArmMetrics:
        metrics = self._by_arm.get((experiment, arm))
        if metrics is None:
            metrics = _ArmMetrics(self._metrics, experiment, arm)
            self._by_arm[experiment, arm] = metrics
        return metrics

    # -- orders ------------------------------------------------------------------------------

    def start(self, definition: Experiment, *, configured: bool = False) -> dict[str, Any]:
        """Start an experiment.

        Raises:
            ConfigError, ExperimentConflict: it cannot be one; its name or traffic is another's.
        """
        state = self.experiments.start(definition, self._wall(), configured=configured)
        logger.info(
            "experiment started",
            extra={"experiment": definition.name, "design": definition.design, "id": state.id},
        )
        return self.describe(definition.name)

    def ramp(self, name: str, shares: Mapping[str, float]) -> dict[str, Any]:
        """Set the shares of some arms.

        Raises:
            UnknownExperiment, ExperimentConflict, ConfigError: it cannot be.
        """
        self.experiments.ramp(name, shares, self._wall())
        logger.info("experiment ramped", extra={"experiment": name, "shares": dict(shares)})
        return self.describe(name)

    def stop(self, name: str, *, arm: str | None, reason: str) -> dict[str, Any]:
        """Stop an arm, or the whole experiment.

        Raises:
            UnknownExperiment, ExperimentConflict, ConfigError: it cannot be.
        """
        state = self.experiments.stop(name, self._wall(), reason, arm=arm)
        self._say_stopped(state, arm)
        return self.describe(name)

    def remove(self, name: str) -> None:
        """Forget an experiment; it ends if it runs.

        Raises:
            UnknownExperiment: there is none.
        """
        self.experiments.remove(name, self._wall())
        self._forget(name)
        logger.info("experiment removed", extra={"experiment": name})

    def describe_all(self) -> list[dict[str, Any]]:
        """Describe all experiments, in the order of their start."""
        names = [trial.state.definition.name for trial in self.experiments.trials]
        return [self.describe(name) for name in names]

    def describe(self, name: str) -> dict[str, Any]:
        """Describe one experiment.

        Raises:
            UnknownExperiment: there is none.
        """
        trial = self.experiments.find(name)
        state, at_s = trial.state, self._wall()
        shares = trial.shares(at_s)
        guards: dict[str, list[dict[str, Any]]] = {}
        for reading in trial.readings():
            guards.setdefault(reading.arm, []).append(asdict(reading))
        return {
            "name": name,
            "id": state.id,
            "standing": _standing(state, at_s),
            "overruled_by": self.experiments.overruled_by(trial) if state.is_running else None,
            "started_at": state.started_s,
            "ended": state.ended,
            "arms": [
                {
                    "name": arm.name,
                    "policy": arm.policy,
                    "params": arm.params,
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

    def metric_states(self) -> list[ExperimentState]:
        """Describe all experiments, for /metrics."""
        at_s = self._wall()
        states = []
        for trial in self.experiments.trials:
            state = trial.state
            is_running = _standing(state, at_s) == "running"
            shares = trial.shares(at_s)
            states.append(
                ExperimentState(
                    name=state.definition.name,
                    design=state.definition.design,
                    is_running=is_running,
                    shares={
                        arm: share if is_running and arm not in state.stopped else 0.0
                        for arm, share in shares.items()
                    },
                    evidence={
                        (reading.arm, reading.guardrail): reading.log_wealth / reading.needed
                        for reading in trial.readings()
                    },
                )
            )
        return states

    # -- what other routers ordered ----------------------------------------------------------

    def apply(self, states: Mapping[str, State]) -> None:
        """Follow the states of the store; those that cannot be are told, once."""
        for name, state in states.items():
            reason = refused(name, state)
            if reason is not None and name not in self._refused:
                self._refused.add(name)
                logger.warning("experiment not followed", extra={"reason": reason})
        for state in self.experiments.apply(states):
            name = state.definition.name
            logger.info(
                "experiment ordered elsewhere",
                extra={
                    "experiment": name,
                    "standing": _standing(state, self._wall()),
                    "stopped": sorted(state.stopped),
                },
            )
            if state.removed:
                self._forget(name)

    # -- inside ------------------------------------------------------------------------------

    def _say_stopped(self, state: State, arm: str | None) -> None:
        name = state.definition.name
        if arm is not None and arm in state.stopped:
            stopped = state.stopped[arm]
            logger.warning(
                "arm stopped",
                extra={
                    "experiment": name,
                    "arm": arm,
                    "guardrail": stopped.guardrail,
                    "reason": stopped.reason,
                },
            )
        if state.ended is not None:
            logger.warning(
                "experiment ended", extra={"experiment": name, "reason": state.ended.reason}
            )

    def _forget(self, name: str) -> None:
        """Take a removed experiment's labels out of /metrics."""
        for key in [key for key in self._by_arm if key[0] == name]:
            del self._by_arm[key]
        self._metrics.forget_experiment(name)


def _standing(state: State, at_s: float) -> str:
    if state.removed:
        return "removed"
    if state.ended is not None:
        return "ended"
    return "running" if at_s >= state.started_s else "scheduled"


def _slot(trial: Trial, at_s: float) -> dict[str, Any] | None:
    """Describe the slot of a running switchback; None: there is none."""
    definition = trial.state.definition
    if definition.design != "switchback" or _standing(trial.state, at_s) != "running":
        return None
    number = slot_of(at_s, definition.slot_s)
    return {
        "number": number,
        "arm": trial.arm_of_slot(number),
        "ends_at": (number + 1) * definition.slot_s,
    }


class _ArmMetrics:
    """One arm's instruments, looked up once."""

    __slots__ = ("_experiment", "_metrics", "_name", "_tokens", "_ttft")

    def __init__(self, metrics: Metrics, experiment: str, arm: str) -> None:
        self._metrics = metrics
        self._experiment, self._name = experiment, arm
        self._ttft = metrics.arm_ttft.labels(experiment, arm)
        self._tokens = {
            kind: metrics.arm_tokens.labels(experiment, arm, kind)
            for kind in ("prompt", "recomputed")
        }

    def count(self, record: DecisionRecord, ttft_s: float | None) -> None:
        assignment = record.assignment
        assert assignment is not None
        labels = self._experiment, self._name
        if assignment.not_counted is not None:
            self._metrics.arm_not_counted.labels(*labels, assignment.not_counted).inc()
            return
        self._metrics.arm_requests.labels(*labels, record.outcome).inc()
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
        if record.outcome == Outcome.OK.value:
            cached = record.num_reported_cached_tokens
            if cached is None:
                cached = record.num_predicted_cached_tokens
            self._tokens["prompt"].inc(record.num_prompt_tokens)
            self._tokens["recomputed"].inc(max(0, record.num_prompt_tokens - cached))
