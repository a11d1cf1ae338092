"""All experiments there are: what was ordered, here or on another router, and what follows of it.

The way of a request: `enrol` -> (policy, replicas) -> `observe`, which may stop its arm. Orders
change the state at once and leave it in `unsaved`, to be shared; `apply` takes other routers' in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from policies.hashing import mix, text_hash
from router.errors import ConfigError, ExperimentConflict, UnknownExperiment
from router.experiments.allocation import NOBODY, Layout
from router.experiments.assignment import Enrolment, NotCounted
from router.experiments.definition import UNIT, Experiment, check, check_shares, conflict
from router.experiments.guardrails import Guard, Reading, Verdict
from router.experiments.slots import place_in_block, slot_of
from router.experiments.state import Change, State, Stopped, merged

MAX_EXPERIMENTS: Final = 16  # known at once, ended ones too: their names are labels of metrics
_MAX_CHANGES: Final = 1_000
_MAX_REASON: Final = 200  # characters of it in each record of a stopped arm


class Trial:
    """One experiment, made ready: policies made, the line laid out, guardrails watching."""

    __slots__ = ("_arms", "_guard", "_line", "_policies", "_salt", "_slot", "_without", "state")

    def __init__(self, state: State, guard: Guard | None = None) -> None:
        definition = state.definition
        self.state = state
        self._arms = definition.arms
        self._policies = [arm.made() for arm in definition.arms]
        self._line = state.layouts()
        self._salt = text_hash(f"{definition.name}\0{definition.seed}")
        self._guard = guard or Guard(definition)
        self._slot: tuple[int, Enrolment | None, float] | None = None  # the last one looked at
        replicas = {name for arm in definition.arms for name in _both(arm.replicas)}
        self._without = frozenset(replicas) or None

    # -- questions ---------------------------------------------------------------------------

    def shares(self, at_s: float) -> dict[str, float]:
        """Tell the arms' shares at a time; before the start those of the start."""
        return self._laid(at_s)[0]

    def readings(self) -> Sequence[Reading]:
        """Tell how the guardrails stand."""
        return tuple(self._guard.readings())

    def arm_of_slot(self, slot: int) -> str | None:
        """Name the arm that a switchback's time slot belongs to; None: none."""
        owner = self._slot_owner(slot)
        return None if owner == NOBODY else self._arms[owner].name

    def enrol(
        self, digest: int | None, at_s: float, stepped_at_s: float | None = None
    ) -> Enrolment | None:
        """Find a request's place; None: the default policy's, as if there were no experiment.

        Args:
            digest: Of its session, 64 bits at most; None: it has none.
            at_s: Unix time.
            stepped_at_s: When the wall clock was set last.
        """
        state = self.state
        if at_s < state.started_s or not state.is_running:
            return None
        if state.definition.design == "switchback":
            return self._enrol_slot(digest, at_s, stepped_at_s)
        owner = NOBODY
        shares: dict[str, float] = {}
        if digest is not None:
            shares, layout = self._laid(at_s)
            owner = layout.owner(self._point(digest))
        if owner == NOBODY:
            return self._outside() if self._without else None
        return self._enrolment(owner, f"{digest:016x}", shares)

    def _enrol_slot(
        self, digest: int | None, at_s: float, stepped_at_s: float | None
    ) -> Enrolment | None:
        definition = self.state.definition
        slot = slot_of(at_s, definition.slot_s)
        if self._slot is None or self._slot[0] != slot:
            self._slot = slot, *self._look_at(slot)
        _, enrolment, wash_out_until_s = self._slot
        if definition.holdout and digest is not None:
            if self._point(digest) >= self._line[0][2].size:
                return None
        if enrolment is None or enrolment.not_counted is not None:  # stopped
            return enrolment
        not_counted: NotCounted | None = None
        if stepped_at_s is not None and stepped_at_s >= slot * definition.slot_s:
            not_counted = "clock_step"
        elif at_s < wash_out_until_s:
            not_counted = "wash_out"
        return replace(enrolment, not_counted=not_counted) if not_counted else enrolment

    def _look_at(self, slot: int) -> tuple[Enrolment | None, float]:
        """Find a slot's arm, and until when it is washed out."""
        definition = self.state.definition
        begin_s = max(slot * definition.slot_s, self.state.started_s)
        owner = self._slot_owner(slot)
        is_first = begin_s == self.state.started_s
        is_change = is_first or self._slot_owner(slot - 1) != owner
        until_s = begin_s + definition.wash_out if is_change else begin_s
        if owner == NOBODY:
            return None, until_s
        shares, _ = self._laid(begin_s)
        return self._enrolment(owner, str(slot), shares, slot), until_s

    def _slot_owner(self, slot: int) -> int:
        """Draw a slot's arm, by the shares as they were when it began.

        Slots of equal arms come in permuted blocks, others each for itself.
        """
        begin_s = max(slot * self.state.definition.slot_s, self.state.started_s)
        _, layout = self._laid(begin_s)
        equals = layout.equals()
        if equals:
            return equals[place_in_block(slot, len(equals), self._salt)]
        return layout.owner(mix(mix(self._salt ^ 1) ^ (slot & _MASK)) * layout.size >> 64)

    def _enrolment(
        self, owner: int, unit: str, shares: Mapping[str, float], slot: int | None = None
    ) -> Enrolment:
        """Place into an arm; where that is stopped, the control arm's policy decides."""
        state, arm, policy = self.state, self._arms[owner], self._policies[owner]
        stopped = state.stopped.get(arm.name)
        if stopped is not None:
            names = [each.name for each in self._arms]
            policy = self._policies[names.index(state.definition.control_arm)]
        return Enrolment(
            trial=state.id,
            experiment=state.definition.name,
            design=state.definition.design,
            arm=arm.name,
            policy=policy,
            unit=unit,
            share=shares[arm.name],
            slot=slot,
            not_counted="stopped" if stopped is not None else None,
            stop_reason=stopped.reason[:_MAX_REASON] if stopped is not None else None,
            control=state.definition.control_arm,
            within=frozenset(_both(arm.replicas)) if arm.replicas else None,
        )

    def _outside(self) -> Enrolment:
        """Keep what is in no arm of a partition off the arms' replicas."""
        definition = self.state.definition
        return Enrolment(
            trial=self.state.id,
            experiment=definition.name,
            design=definition.design,
            arm=None,
            policy=None,
            without=self._without,
        )

    def _laid(self, at_s: float) -> tuple[dict[str, float], Layout]:
        for since_s, shares, layout in reversed(self._line):
            if since_s <= at_s:
                return shares, layout
        return self._line[0][1], self._line[0][2]

    def _point(self, digest: int) -> int:
        return mix(self._salt ^ digest) * UNIT >> 64

    # -- what happened -----------------------------------------------------------------------

    def moved(self, state: State) -> Trial:
        """Go on with another state; evidence stays if it is the same start."""
        return Trial(state, self._guard if state.id == self.state.id else None)

    def observe(
        self, enrolment: Enrolment, *, is_error: bool | None, ttft_s: float | None
    ) -> Verdict | None:
        """Take in what became of a request; a verdict: its arm is to be stopped.

        `is_error` None: it tells nothing of the arm, as where a client left. `ttft_s` None: no
        first token was seen.
        """
        arm = enrolment.arm
        if arm is None or arm in self.state.stopped:
            return None
        verdict = self._guard.ended(arm, is_error) if is_error is not None else None
        if verdict is None and ttft_s is not None and enrolment.not_counted is None:
            verdict = self._guard.answered(arm, enrolment.unit, enrolment.slot, ttft_s)
        return verdict


class Experiments:
    """See the module."""

    __slots__ = ("_claims", "_trials", "unsaved")

    def __init__(self) -> None:
        self.unsaved: dict[str, State] = {}  # by name: not known to be stored
        self._trials: dict[str, Trial] = {}
        self._claims: tuple[Trial, ...] = ()  # those that run, who claimed first first

    # -- questions ---------------------------------------------------------------------------

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All experiments but removed ones, in the order of their start."""
        known = [trial for trial in self._trials.values() if not trial.state.removed]
        return tuple(sorted(known, key=_order))

    @property
    def records(self) -> Mapping[str, State]:
        """All states by name, removed ones included: for a store that lost them."""
        return {name: trial.state for name, trial in self._trials.items()}

    @property
    def is_empty(self) -> bool:
        """Whether none claims any traffic."""
        return not self._claims

    def find(self, name: str) -> Trial:
        """Find an experiment.

        Raises:
            UnknownExperiment: there is none of that name.
        """
        trial = self._trials.get(name)
        if trial is None or trial.state.removed:
            known = ", ".join(t.state.definition.name for t in self.trials) or "none"
            raise UnknownExperiment(f"no experiment {name!r}; known: {known}", param="name")
        return trial

    def overruled_by(self, trial: Trial) -> str | None:
        """Name the experiment that claimed some of its traffic before; None: none.

        Only where two were started at two routers at once.
        """
        for other in self._claims:
            if other is trial:
                return None
            if conflict(other.state.definition, trial.state.definition) is not None:
                return other.state.definition.name
        return None

    def enrol(
        self, model: str, digest: int | None, at_s: float, stepped_at_s: float | None = None
    ) -> Enrolment | None:
        """Find a request's place; see `Trial.enrol`."""
        for trial in self._claims:
            if trial.state.definition.claims(model):
                return trial.enrol(digest, at_s, stepped_at_s)
        return None

    # -- orders given here -------------------------------------------------------------------

    def start(self, definition: Experiment, at_s: float, *, configured: bool = False) -> State:
        """Start an experiment. A configured one is the same start at every router and every time.

        Raises:
            ConfigError: it cannot be one.
            ExperimentConflict: its name or its traffic is another's.
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
        return self._order(State(id=id_, definition=definition, started_s=started_s))

    def ramp(self, name: str, shares: Mapping[str, float], at_s: float) -> State:
        """Set the shares of some arms; the definition's own ramp is over.

        Raises:
            UnknownExperiment, ExperimentConflict: there is none, or it has ended.
            ConfigError: the shares cannot be.
        """
        trial = self._running(name)
        state = trial.state
        wanted = trial.shares(at_s) | dict(shares)
        check_shares(state.definition, wanted, "shares")
        for arm in shares:
            if arm in state.stopped:
                raise ExperimentConflict(f"arm {arm!r} is stopped", param=f"shares.{arm}")
        if len(state.changes) >= _MAX_CHANGES:
            raise ExperimentConflict(f"{name!r} was ramped {_MAX_CHANGES} times", param="shares")
        change = Change(at_s=max([at_s, *(c.at_s for c in state.changes)]), shares=wanted)
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
        """Stop an arm, or the whole experiment: with it if no other arm but the control is left.

        Raises:
            UnknownExperiment, ExperimentConflict: there is none, or it has ended.
            ConfigError: there is no such arm.
        """
        state = self._running(name).state
        stopped = Stopped(at_s=at_s, reason=reason, guardrail=guardrail)
        if arm is None:
            return self._order(replace(state, ended=stopped))
        check_shares(state.definition, {arm: 0.0}, "arm")
        if arm in state.stopped:
            return state
        return self._order(_settled(replace(state, stopped={**state.stopped, arm: stopped})))

    def remove(self, name: str, at_s: float) -> State:
        """Forget an experiment; it ends if it runs.

        Raises:
            UnknownExperiment: there is none.
        """
        state = self.find(name).state
        ended = state.ended or Stopped(at_s=at_s, reason="removed")
        return self._order(replace(state, ended=ended, removed=True))

    def observe(
        self, enrolment: Enrolment, at_s: float, *, is_error: bool | None, ttft_s: float | None
    ) -> tuple[State, Verdict] | None:
        """Take in what became of a request; where that stops its arm, say so."""
        trial = self._trials.get(enrolment.experiment)
        if trial is None or trial.state.id != enrolment.trial or not trial.state.is_running:
            return None
        verdict = trial.observe(enrolment, is_error=is_error, ttft_s=ttft_s)
        if verdict is None:
            return None
        state = self.stop(
            enrolment.experiment,
            at_s,
            verdict.reason,
            arm=verdict.arm,
            guardrail=verdict.guardrail,
        )
        return state, verdict

    def saved(self, name: str, state: State) -> None:
        """Learn that a state is stored; a newer one still is not."""
        if self.unsaved.get(name) == state:
            del self.unsaved[name]

    # -- orders given elsewhere --------------------------------------------------------------

    def apply(self, states: Mapping[str, State]) -> tuple[State, ...]:
        """Follow the store; return what changed here. Idempotent; see `refused`."""
        changed = []
        for name, state in states.items():
            if refused(name, state) is not None:
                continue
            known = self._trials.get(name)
            both = _settled(state if known is None else merged(known.state, state))
            if known is None or both != known.state:
                self._put(both)
                changed.append(both)
            if both == state:
                self.unsaved.pop(name, None)
            else:  # the store lacks something
                self.unsaved[name] = both
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


def refused(name: str, state: State) -> str | None:
    """Say why a state from the store is not followed; None: it is."""
    try:
        check(state.definition)
        for change in state.changes:
            check_shares(state.definition, change.shares, "changes")
    except ConfigError as exc:
        return exc.message
    return None if name == state.definition.name else f"{name!r} is not its name"


def _settled(state: State) -> State:
    """End an experiment that has nothing left to compare: no arm but one, or no control."""
    if state.ended is not None:
        return state
    control = state.definition.control_arm
    left = [arm.name for arm in state.definition.arms if arm.name not in state.stopped]
    if control in left and len(left) > 1:
        return state
    last = max(state.stopped.items(), key=lambda item: (item[1].at_s, item[0]))
    arm, stopped = last
    ended = replace(stopped, reason=f"arm {arm}: {stopped.reason}")
    return replace(state, ended=ended)


def _order(trial: Trial) -> tuple[float, str]:
    return trial.state.started_s, trial.state.definition.name


def _both(replicas: Sequence[str]) -> list[str]:
    return [name.rstrip("/") for name in replicas]


_MASK: Final = (1 << 64) - 1
