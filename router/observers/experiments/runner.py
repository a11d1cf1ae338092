"""All experiments of this router: orders given here or elsewhere, and what follows from them.

A request passes `assign`, is placed by the policy of its variant, and ends in `observe`, which may
stop the variant. Orders change the state at once and leave it in `unsaved`, to be shared; `apply`
takes other routers' states in. The caller brings the wall clock's time (`at_s`, unix seconds), the
time that routers have in common.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from router.base.errors import ConfigError, ExperimentConflict, UnknownExperiment
from router.config.experiments import Experiment, check, check_shares, conflict
from router.observers.experiments.arm_metrics import ArmMetrics
from router.observers.experiments.description import description_of, metric_state_of, status_of
from router.observers.experiments.guardrails import Breach
from router.observers.experiments.metrics import ExperimentMetrics, ExperimentState
from router.observers.experiments.state import SharesChange, State, Stopped, merged
from router.observers.experiments.trial import Trial
from router.records.outcome import Outcome
from router.records.record import AssignmentRecord, DecisionRecord
from router.request.results import Variant

logger = logging.getLogger(__name__)

MAX_EXPERIMENTS: Final = 16  # known at once, ended ones too: their names are labels of metrics
_MAX_CHANGES: Final = 1_000

_IS_ERROR: Final = {
    Outcome.OK.value: False,
    Outcome.REPLICA_FAILED.value: True,
    Outcome.REPLICA_UNREACHABLE.value: True,
}
"""Whether an outcome is an error of the variant; a client that left says nothing about it."""


class ExperimentRunner:
    """Assigns requests, follows orders, stops variants.

    is_empty: No experiment claims traffic.
    """

    def __init__(self, metrics: ExperimentMetrics) -> None:
        self.is_empty = True
        self.unsaved: dict[str, State] = {}  # by name: not yet stored
        self._trials: dict[str, Trial] = {}
        self._claims: tuple[Trial, ...] = ()  # running ones, in the order of their claims
        self._metrics = metrics
        self._by_arm: dict[tuple[str, str], ArmMetrics] = {}
        self._refused: set[str] = set()  # names of states that were logged

    # -- questions ---------------------------------------------------------------------------

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Return all experiments that are not removed, in the order of their start."""
        known = [trial for trial in self._trials.values() if not trial.state.removed]
        return tuple(sorted(known, key=_order))

    @property
    def states(self) -> Mapping[str, State]:
        """Return all states by name, also removed ones, for a store that lost them."""
        return {name: trial.state for name, trial in self._trials.items()}

    def find(self, name: str) -> Trial:
        """Return an experiment.

        Raises:
            UnknownExperiment: no experiment has this name.
        """
        trial = self._trials.get(name)
        if trial is None or trial.state.removed:
            known = ", ".join(t.state.definition.name for t in self.trials) or "none"
            raise UnknownExperiment(f"no experiment {name!r}; known: {known}", param="name")
        return trial

    def overruled_by(self, trial: Trial) -> str | None:
        """Return the name of an earlier experiment that claims some of its traffic; None: none.

        Two routers can start conflicting experiments at the same moment.
        """
        for other in self._claims:
            if other is trial:
                return None
            if conflict(other.state.definition, trial.state.definition) is not None:
                return other.state.definition.name
        return None

    def describe(self, name: str, at_s: float) -> dict[str, Any]:
        """Describe one experiment, for the admin API.

        Raises:
            UnknownExperiment: it is unknown.
        """
        trial = self.find(name)
        return description_of(trial, at_s, overruled_by=self.overruled_by(trial))

    def metric_states(self, at_s: float) -> list[ExperimentState]:
        """Describe all experiments, for /metrics."""
        return [metric_state_of(trial, at_s) for trial in self.trials]

    # -- for requests ------------------------------------------------------------------------

    def assign(self, model: str, digest: int | None, at_s: float) -> Variant | None:
        """Assign a prompt to a variant; see `Trial.assign`."""
        for trial in self._claims:
            if trial.state.definition.claims(model):
                return trial.assign(digest, at_s)
        return None

    def observe(self, record: DecisionRecord, ttft_s: float | None) -> None:
        """Record the result of a request; it may stop the variant that the request is in."""
        assignment = record.assignment
        if assignment is None:
            return
        self._of(assignment.experiment, assignment.arm).count(record, ttft_s)
        is_error = _IS_ERROR.get(record.outcome)
        self.judge(assignment, record.at, is_error=is_error, ttft_s=ttft_s)

    def judge(
        self,
        assignment: AssignmentRecord,
        at_s: float,
        *,
        is_error: bool | None,
        ttft_s: float | None,
    ) -> Breach | None:
        """Record evidence against a request's variant; with a verdict, the variant is stopped."""
        trial = self._trials.get(assignment.experiment)
        if trial is None or trial.state.id != assignment.trial or not trial.state.is_running:
            return None
        verdict = trial.observe(assignment, is_error=is_error, ttft_s=ttft_s)
        if verdict is None:
            return None
        name, arm, guardrail = assignment.experiment, verdict.arm, verdict.guardrail
        self._metrics.experiment_stops.labels(name, arm, guardrail).inc()
        self.stop(name, at_s, verdict.reason, arm=arm, guardrail=guardrail)
        return verdict

    def _of(self, experiment: str, arm: str) -> ArmMetrics:
        metrics = self._by_arm.get((experiment, arm))
        if metrics is None:
            metrics = ArmMetrics(self._metrics, experiment, arm)
            self._by_arm[experiment, arm] = metrics
        return metrics

    # -- orders given here -------------------------------------------------------------------

    def start(self, definition: Experiment, at_s: float, *, configured: bool = False) -> State:
        """Start an experiment. A configured one is the same start at every router and every time.

        Raises:
            ConfigError: the definition is wrong.
            ExperimentConflict: another experiment has its name or its traffic.
        """
        check(definition)
        name, known = definition.name, self._trials.get(definition.name)
        if known is not None and known.state.is_running:
            raise ExperimentConflict(f"experiment {name!r} is running; stop it first", param="name")
        for trial in self._claims:
            claimed = conflict(trial.state.definition, definition)
            if claimed is not None:
                other = trial.state.definition.name
                raise ExperimentConflict(f"{other!r} claims {claimed} already", param="models")
        if known is None and len(self.trials) >= MAX_EXPERIMENTS:
            raise ExperimentConflict(
                f"{MAX_EXPERIMENTS} experiments are known already; remove one", param="name"
            )
        started_s = at_s if definition.start_at is None else max(definition.start_at, 0.0)
        salt = "" if configured else f"{at_s!r}"
        packed = msgspec.json.encode(definition, order="sorted") + salt.encode()
        id_ = hashlib.blake2b(packed, digest_size=8).hexdigest()
        logger.info(
            "experiment started",
            extra={"experiment": name, "design": definition.design, "id": id_},
        )
        return self._order(State(id=id_, definition=definition, started_s=started_s))

    def ramp(self, name: str, shares: Mapping[str, float], at_s: float) -> State:
        """Set the shares of some variants; this ends the definition's own ramp.

        Raises:
            UnknownExperiment, ExperimentConflict: it is unknown, or has ended.
            ConfigError: the shares are wrong.
        """
        trial = self._running(name)
        state = trial.state
        wanted = trial.shares(at_s) | dict(shares)
        check_shares(state.definition, wanted, "shares")
        for arm in shares:
            if arm in state.stopped:
                raise ExperimentConflict(f"variant {arm!r} is stopped", param=f"shares.{arm}")
        if len(state.changes) >= _MAX_CHANGES:
            raise ExperimentConflict(f"{name!r} was ramped {_MAX_CHANGES} times", param="shares")
        change = SharesChange(at_s=max([at_s, *(c.at_s for c in state.changes)]), shares=wanted)
        logger.info("experiment ramped", extra={"experiment": name, "shares": dict(shares)})
        return self._order(replace(state, changes=(*state.changes, change)))

    def stop(
        self,
        name: str,
        at_s: float,
        reason: str,
        *,
        arm: str | None = None,
        guardrail: str | None = None,
    ) -> State:
        """Stop a variant, or the experiment; it also ends when no variant beside control is left.

        Raises:
            UnknownExperiment, ExperimentConflict: it is unknown, or has ended.
            ConfigError: there is no such variant.
        """
        state = self._running(name).state
        stopped = Stopped(at_s=at_s, reason=reason, guardrail=guardrail)
        if arm is None:
            state = self._order(replace(state, ended=stopped))
        else:
            check_shares(state.definition, {arm: 0.0}, "variant")
            if arm not in state.stopped:
                stops = {**state.stopped, arm: stopped}
                state = self._order(_ended(replace(state, stopped=stops)))
        _log_stopped(state, arm)
        return state

    def remove(self, name: str, at_s: float) -> State:
        """Remove an experiment; it ends if it runs.

        Raises:
            UnknownExperiment: it is unknown.
        """
        state = self.find(name).state
        ended = state.ended or Stopped(at_s=at_s, reason="removed")
        removed = self._order(replace(state, ended=ended, removed=True))
        self._forget(name)
        logger.info("experiment removed", extra={"experiment": name})
        return removed

    def saved(self, name: str, state: State) -> None:
        """Record that a state is stored, unless there is a newer one."""
        if self.unsaved.get(name) == state:
            del self.unsaved[name]

    # -- orders given elsewhere --------------------------------------------------------------

    def apply(self, states: Mapping[str, State], at_s: float) -> tuple[State, ...]:
        """Merge the store's states; return those that changed here. Idempotent."""
        changed = []
        for name, state in states.items():
            reason = refused(name, state)
            if reason is not None:
                if name not in self._refused:
                    self._refused.add(name)
                    logger.warning("experiment not followed", extra={"reason": reason})
                continue
            known = self._trials.get(name)
            both = _ended(state if known is None else merged(known.state, state))
            if known is None or both != known.state:
                self._put(both)
                changed.append(both)
            if both == state:
                self.unsaved.pop(name, None)
            else:  # the store lacks something
                self.unsaved[name] = both
        for each in changed:
            name, stopped = each.definition.name, sorted(each.stopped)
            fields = {"experiment": name, "standing": status_of(each, at_s), "stopped": stopped}
            logger.info("experiment ordered elsewhere", extra=fields)
            if each.removed:
                self._forget(name)
        return tuple(changed)

    # -- inside ------------------------------------------------------------------------------

    def _running(self, name: str) -> Trial:
        trial = self.find(name)
        if not trial.state.is_running:
            raise ExperimentConflict(f"experiment {name!r} has ended", param="name")
        return trial

    def _order(self, state: State) -> State:
        self.unsaved[state.definition.name] = state
        self._put(state)
        return state

    def _put(self, state: State) -> None:
        known = self._trials.get(state.definition.name)
        trial = Trial(state) if known is None else known.moved(state)
        self._trials[state.definition.name] = trial
        running = [trial for trial in self._trials.values() if trial.state.is_running]
        self._claims = tuple(sorted(running, key=_order))
        self.is_empty = not running

    def _forget(self, name: str) -> None:
        """Remove an experiment's labels from /metrics."""
        for key in [key for key in self._by_arm if key[0] == name]:
            del self._by_arm[key]
        self._metrics.drop("experiment", name)


def refused(name: str, state: State) -> str | None:
    """Return why a state from the store is ignored; None: it is followed."""
    try:
        check(state.definition)
        for change in state.changes:
            check_shares(state.definition, change.shares, "changes")
    except ConfigError as exc:
        return exc.message
    return None if name == state.definition.name else f"{name!r} is not its name"


def _ended(state: State) -> State:
    """End an experiment with nothing left to compare: one variant, or no control."""
    if state.ended is not None:
        return state
    control = state.definition.control_arm
    left = [arm.name for arm in state.definition.arms if arm.name not in state.stopped]
    if control in left and len(left) > 1:
        return state
    last = max(state.stopped.items(), key=lambda item: (item[1].at_s, item[0]))
    arm, stopped = last
    ended = replace(stopped, reason=f"variant {arm}: {stopped.reason}")
    return replace(state, ended=ended)


def _order(trial: Trial) -> tuple[float, str]:
    return trial.state.started_s, trial.state.definition.name


def _log_stopped(state: State, arm: str | None) -> None:
    name = state.definition.name
    if arm is not None and arm in state.stopped:
        stopped = state.stopped[arm]
        why = {"guardrail": stopped.guardrail, "reason": stopped.reason}
        logger.warning("variant stopped", extra={"experiment": name, "arm": arm, **why})
    if state.ended is not None:
        logger.warning("experiment ended", extra={"experiment": name, "reason": state.ended.reason})
