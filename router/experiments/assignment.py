"""What an experiment says about one request: which variant, which policy, which replicas."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from policies.policy import Policy
from router.experiments.definition import ArmQueue

NotCounted = Literal["wash_out", "clock_step", "beyond_partition", "stopped"]


class Assignment(Struct, frozen=True, kw_only=True, gc=False):
    """One request's place. `arm` None: it is in no arm, but some replicas may not be its.

    `unit` is what was randomised: the digest of a session, or a slot's number. `policy` None: the
    default one. `within` and `without` hold names and base URLs of replicas.
    """

    trial: str  # id of the experiment's state: another start is another one
    experiment: str
    design: str
    arm: str | None
    policy: Policy | None
    unit: str = ""
    share: float = 0.0
    slot: int | None = None
    not_counted: NotCounted | None = None
    stop_reason: str | None = None  # why its arm is stopped
    control: str = ""  # name of the control arm
    within: frozenset[str] | None = None  # None: all
    without: frozenset[str] | None = None  # None: none
    queue: ArmQueue | None = None  # None: the router's

    @property
    def is_narrow(self) -> bool:
        """Whether some replicas are not for this request."""
        return self.within is not None or self.without is not None

    def allows(self, name: str, url: str) -> bool:
        """Return whether this request may use a replica."""
        if self.within is not None:
            return name in self.within or url in self.within
        return self.without is None or not (name in self.without or url in self.without)
