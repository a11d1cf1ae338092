"""A running experiment: assigns requests to variants, and watches its guardrails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import UNSET
from msgspec.structs import replace

from policies.hashing import mix, text_hash
from router.config.experiments import UNIT, ArmQueue
from router.observers.experiments.draw import ArmLayout, place_in_block, slot_of
from router.observers.experiments.guardrails import Breach, ExperimentGuard, Reading
from router.observers.experiments.state import State
from router.records.record import AssignmentRecord
from router.request.results import Variant

_MAX_REASON: Final = 200  # characters in each record of a stopped variant
_MASK: Final = (1 << 64) - 1


class Trial:
    """An experiment's state with its policies, the layout of its shares and its guardrails."""

    __slots__ = ("_arms", "_guard", "_line", "_policies", "_salt", "_slot", "state")

    def __init__(self, state: State, guard: ExperimentGuard | None = None) -> None:
        definition = state.definition
        self.state = state
        self._arms = definition.arms
        self._policies = [arm.made() for arm in definition.arms]
        self._line = [
            (at_s, shares, ArmLayout([shares[arm.name] for arm in self._arms], definition.holdout))
            for at_s, shares in state.timeline()
        ]
        self._salt = text_hash(f"{definition.name}\0{definition.seed}")
        self._guard = guard or ExperimentGuard(definition)
        self._slot: tuple[int, Variant | None, float] | None = None  # cache of the last slot

    # -- questions ---------------------------------------------------------------------------

    def shares(self, at_s: float) -> dict[str, float]:
        """Return the variants' shares at a time; before the start those of the start."""
        return self._laid(at_s)[0]

    def readings(self) -> Sequence[Reading]:
        """Return the evidence at the guardrails."""
        return tuple(self._guard.readings())

    def arm_of_slot(self, slot: int) -> str | None:
        """Return the variant that a switchback's time slot belongs to; None: none."""
        owner = self._slot_owner(slot)
        return None if owner is None else self._arms[owner].name

    def assign(self, digest: int | None, at_s: float) -> Variant | None:
        """Assign a request; None: the default policy places it, as without an experiment.

        Args:
            digest: Of its session, 64 bits at most; None: it has none.
            at_s: Unix time.
        """
        state = self.state
        if at_s < state.started_s or not state.is_running:
            return None
        if state.definition.design == "switchback":
            return self._assign_slot(digest, at_s)
        if digest is None:
            return None
        shares, layout = self._laid(at_s)
        owner = layout.owner(self._point(digest))
        return None if owner is None else self._assigned(owner, f"{digest:016x}", shares)

    def _assign_slot(self, digest: int | None, at_s: float) -> Variant | None:
        definition = self.state.definition
        if definition.holdout and digest is not None:
            if self._point(digest) >= self._line[0][2].size:
                return None
        slot = slot_of(at_s, definition.slot_s)
        if self._slot is None or self._slot[0] != slot:
            self._slot = slot, *self._look_at(slot)
        _, variant, wash_out_until_s = self._slot
        if variant is None or variant.record.is_wash_out or at_s >= wash_out_until_s:
            return variant
        record = replace(variant.record, is_wash_out=True, not_counted="wash_out")
        return replace(variant, record=record)

    def _look_at(self, slot: int) -> tuple[Variant | None, float]:
        """Return a slot's variant, and the end of its wash-out."""
        definition = self.state.definition
        begin_s = max(slot * definition.slot_s, self.state.started_s)
        owner = self._slot_owner(slot)
        is_first = begin_s == self.state.started_s
        is_change = is_first or self._slot_owner(slot - 1) != owner
        until_s = begin_s + definition.wash_out if is_change else begin_s
        if owner is None:
            return None, until_s
        shares, _ = self._laid(begin_s)
        return self._assigned(owner, str(slot), shares, slot), until_s

    def _slot_owner(self, slot: int) -> int | None:
        """Draw a slot's variant by the shares at its beginning: in blocks if they are equal."""
        begin_s = max(slot * self.state.definition.slot_s, self.state.started_s)
        _, layout = self._laid(begin_s)
        if layout.blocks:
            return layout.blocks[place_in_block(slot, len(layout.blocks), self._salt)]
        return layout.owner(mix(mix(self._salt ^ 1) ^ (slot & _MASK)) * layout.size >> 64)

    def _assigned(
        self, owner: int, unit: str, shares: Mapping[str, float], slot: int | None = None
    ) -> Variant:
        """Assign to a variant; if it is stopped, the control's policy and queue decide."""
        state, arm = self.state, self._arms[owner]
        control = state.definition.control_arm
        stopped = state.stopped.get(arm.name)
        acting = owner
        if stopped is not None:
            acting = [each.name for each in self._arms].index(control)
        queue = self._arms[acting].queue
        if queue is UNSET:
            queue = ArmQueue()
        return Variant(
            policy=self._policies[acting],
            waits=queue.mode == "on" if queue.mode is not None else None,
            fill=queue.fill,
            record=AssignmentRecord(
                experiment=state.definition.name,
                design=state.definition.design,
                arm=arm.name,
                unit=unit,
                share=shares[arm.name],
                slot=slot,
                is_wash_out=stopped is not None,
                not_counted="stopped" if stopped is not None else None,
                stop_reason=stopped.reason[:_MAX_REASON] if stopped is not None else None,
                control=control,
                trial=state.id,
            ),
        )

    def _laid(self, at_s: float) -> tuple[dict[str, float], ArmLayout]:
        for since_s, shares, layout in reversed(self._line):
            if since_s <= at_s:
                return shares, layout
        return self._line[0][1], self._line[0][2]

    def _point(self, digest: int) -> int:
        return mix(self._salt ^ digest) * UNIT >> 64

    # -- what happened -----------------------------------------------------------------------

    def moved(self, state: State) -> Trial:
        """Continue with another state; the evidence stays if it is the same start."""
        return Trial(state, self._guard if state.id == self.state.id else None)

    def observe(
        self, assignment: AssignmentRecord, *, is_error: bool | None, ttft_s: float | None
    ) -> Breach | None:
        """Record a request's result; a verdict says that its variant must be stopped.

        Args:
            is_error: None: the result says nothing about the variant (the client left).
            ttft_s: None: there was no first token.
        """
        arm = assignment.arm
        if arm in self.state.stopped:
            return None
        verdict = self._guard.ended(arm, is_error) if is_error is not None else None
        if verdict is None and ttft_s is not None and assignment.not_counted is None:
            verdict = self._guard.answered(arm, assignment.unit, ttft_s)
        return verdict
