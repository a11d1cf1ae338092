"""Variants by their names on a command line: `kv_aware`, `prefix_hash:num_points=9`, `all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct

from policies import POLICIES, Policy, create
from policies.naming import split, split_list
from router.config import QueueConfig
from router.config.experiments import VariantQueue, queue_of
from router.scheduling.waiting import QueueRules

UNLIMITED: Final = "unlimited"
_BEST: Final = "kv_aware"


class Arm(Struct, frozen=True, kw_only=True):
    """One variant: a policy with its parameters, and its queue."""

    label: str
    policy: str
    params: dict[str, str] = {}
    queue: VariantQueue | None = None  # None: as a router of this policy has it
    is_unlimited: bool = False  # on caches that never evict: the limit of what a router can do

    def make_policy(self) -> Policy:
        """Make the policy object."""
        return create(self.policy, self.params)

    def queue_rules(self) -> QueueRules | None:
        """Return the rules of the queue; None: there is no queue."""
        if self.queue is None:
            return QueueRules() if QueueConfig().is_on(self.policy) else None
        if self.queue.mode == "off":
            return None
        return msgspec.structs.replace(QueueRules(), **_given(self.queue))


def arm_of(label: str) -> Arm:
    """Read `NAME[:PARAM=VALUE,…]`: a policy and its queue.

    A parameter `queue.KEY` belongs to the router's queue and switches the queue on.
    `queue.mode=off` switches it off. `unlimited` is `kv_aware` on caches that never evict.

    Raises:
        ValueError: A policy or parameter is unknown (names the nearest), or a value is out of its
            range.
    """
    if label == UNLIMITED:
        return Arm(label=label, policy=_BEST, is_unlimited=True)
    name, params = split(label)
    queue = queue_of(params)
    create(name, params)
    return Arm(label=label, policy=name, params=params, queue=queue)


def arms_of(texts: Iterable[str]) -> list[Arm]:
    """Read variants (`arm_of`) with commas between; `all` stands for every policy.

    Raises:
        ValueError: As `arm_of`; or a variant is named twice, or none is named.
    """
    arms: dict[str, Arm] = {}
    for spec in (spec for text in texts for spec in split_list(text)):
        for label in POLICIES if spec == "all" else [spec]:
            if label in arms:
                raise ValueError(f"policy {label!r} is named twice")
            arms[label] = arm_of(label)
    if not arms:
        raise ValueError(f"no policy is named; there are: {', '.join(POLICIES)}")
    return list(arms.values())


def _given(queue: VariantQueue) -> dict[str, float]:
    """List the settings of a variant's queue, without its mode."""
    given = msgspec.structs.asdict(queue)
    del given["mode"]
    return {key: value for key, value in given.items() if value is not None}


def serve_flags(arm: Arm) -> list[str]:
    """Write the options of `warmroute serve` for a variant's policy and queue."""
    flags = ["--policy", arm.policy]
    for key, value in arm.params.items():
        flags += ["--policy-param", f"{key}={value}"]
    if arm.queue is not None:
        flags += ["--queue", arm.queue.mode or "on"]
        for option, setting in _given(arm.queue).items():
            flags += ["--set", f"queue.{option}={setting}"]
    return flags
