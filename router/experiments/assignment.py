"""An experiment's decision about one request: its variant, and the policy that places it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from policies.policy import Policy
from router.experiments.definition import ArmQueue
from router.records.record import AssignmentRecord

NotCounted = Literal["wash_out", "stopped"]


class Assignment(Struct, frozen=True, kw_only=True, gc=False):
    """One request's variant.

    `unit` is what was randomised: the digest of a session, or a slot's number.
    """

    trial: str  # id of the experiment's state; another start has another id
    experiment: str
    design: str
    arm: str
    policy: Policy
    unit: str
    share: float
    control: str  # name of the control variant
    slot: int | None = None
    not_counted: NotCounted | None = None
    stop_reason: str | None = None  # why the variant is stopped
    queue: ArmQueue | None = None  # None: the router's

    def record(self) -> AssignmentRecord:
        """Return the assignment as the decision record has it."""
        return AssignmentRecord(
            experiment=self.experiment,
            design=self.design,
            arm=self.arm,
            unit=self.unit,
            share=self.share,
            slot=self.slot,
            is_wash_out=self.not_counted is not None,
            not_counted=self.not_counted,
            stop_reason=self.stop_reason,
            control=self.control,
            trial=self.trial,
        )
