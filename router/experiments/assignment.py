"""An experiment's decision about one request: its variant, and the policy that places it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from policies.policy import Policy
from router.experiments.definition import ArmQueue

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
