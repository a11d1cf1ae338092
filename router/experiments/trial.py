"""One experiment, made ready: which request gets which variant, and the evidence against one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import UNSET
from msgspec.structs import replace

from policies.hashing import mix, text_hash
from router.addresses import base_url
from router.experiments.allocation import NO_ARM, Layout
from router.experiments.assignment import Assignment, NotCounted
from router.experiments.definition import UNIT
from router.experiments.guardrails import Guard, Reading, Verdict
from router.experiments.slots import place_in_block, slot_of
from router.experiments.state import State

_MAX_REASON: Final = 200  # characters of it in each record of a stopped arm
_MASK: Final = (1 << 64) - 1


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
        self._slot: tuple[int, Assignment | None, float] | None = None  # the last one looked at
        replicas = {name for arm in definition.arms for name in _both(arm.replicas)}
        self._without = frozenset(replicas) or None

    # -- questions ---------------------------------------------------------------------------

    def shares(self, at_s: float) -> dict[str, float]:
        """Return the arms' shares at a time; before the start those of the start."""
        return self._laid(at_s)[0]

    def readings(self) -> Sequence[Reading]:
        """Return the evidence at the guardrails."""
        return tuple(self._guard.readings())

    def arm_of_slot(self, slot: int) -> str | None:
        """Name the arm that a switchback's time slot belongs to; None: none."""
        owner = self._slot_owner(slot)
        return None if owner == NO_ARM else self._arms[owner].name

    def assign(
        self, digest: int | None, at_s: float, stepped_at_s: float | None = None
    ) -> Assignment | None:
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
            return self._assign_slot(digest, at_s, stepped_at_s)
        owner = NO_ARM
        shares: dict[str, float] = {}
        if digest is not None:
            shares, layout = self._laid(at_s)
            owner = layout.owner(self._point(digest))
        if owner == NO_ARM:
            return self._outside() if self._without else None
        return self._assigned(owner, f"{digest:016x}", shares)

    def _assign_slot(
        self, digest: int | None, at_s: float, stepped_at_s: float | None
    ) -> Assignment | None:
        definition = self.state.definition
        slot = slot_of(at_s, definition.slot_s)
        if self._slot is None or self._slot[0] != slot:
            self._slot = slot, *self._look_at(slot)
        _, assignment, wash_out_until_s = self._slot
        if definition.holdout and digest is not None:
            if self._point(digest) >= self._line[0][2].size:
                return None
        if assignment is None or assignment.not_counted is not None:  # stopped
            return assignment
        not_counted: NotCounted | None = None
        if stepped_at_s is not None and stepped_at_s >= slot * definition.slot_s:
            not_counted = "clock_step"
        elif at_s < wash_out_until_s:
            not_counted = "wash_out"
        return replace(assignment, not_counted=not_counted) if not_counted else assignment

    def _look_at(self, slot: int) -> tuple[Assignment | None, float]:
        """Find a slot's arm, and until when it is washed out."""
        definition = self.state.definition
        begin_s = max(slot * definition.slot_s, self.state.started_s)
        owner = self._slot_owner(slot)
        is_first = begin_s == self.state.started_s
        is_change = is_first or self._slot_owner(slot - 1) != owner
        until_s = begin_s + definition.wash_out if is_change else begin_s
        if owner == NO_ARM:
            return None, until_s
        shares, _ = self._laid(begin_s)
        return self._assigned(owner, str(slot), shares, slot), until_s

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

    def _assigned(
        self, owner: int, unit: str, shares: Mapping[str, float], slot: int | None = None
    ) -> Assignment:
        """Place into an arm; where that is stopped, the control arm's policy and queue decide."""
        state, arm, policy = self.state, self._arms[owner], self._policies[owner]
        stopped, queue = state.stopped.get(arm.name), arm.queue
        if stopped is not None:
            names = [each.name for each in self._arms]
            control = names.index(state.definition.control_arm)
            policy, queue = self._policies[control], self._arms[control].queue
        return Assignment(
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
            queue=queue if queue is not UNSET else None,
        )

    def _outside(self) -> Assignment:
        """Keep what is in no arm of a partition off the arms' replicas."""
        definition = self.state.definition
        return Assignment(
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
        self, assignment: Assignment, *, is_error: bool | None, ttft_s: float | None
    ) -> Verdict | None:
        """Take in what became of a request; a verdict: its arm is to be stopped.

        `is_error` None: it says nothing about the arm, as where a client left. `ttft_s` None: no
        first token was seen.
        """
        arm = assignment.arm
        if arm is None or arm in self.state.stopped:
            return None
        verdict = self._guard.ended(arm, is_error) if is_error is not None else None
        if verdict is None and ttft_s is not None and assignment.not_counted is None:
            verdict = self._guard.answered(arm, assignment.unit, assignment.slot, ttft_s)
        return verdict


def _both(replicas: Sequence[str]) -> list[str]:
    return [base_url(name) for name in replicas]
