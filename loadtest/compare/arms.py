"""What is compared: a policy with its parameters, or a target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final

import click
import msgspec
from msgspec import Struct

from policies import Policy, create
from policies.naming import split, split_list
from policies.registry import POLICIES
from router.config import QueueConfig
from router.config.experiments import ArmQueue
from router.scheduling.waiting import QueueRules

_QUEUE = "queue."
UNLIMITED: Final = "unlimited"
_BEST: Final = "kv_aware"


class Arm(Struct, frozen=True, kw_only=True):
    """One variant: a policy with its parameters, or the `url` of a running target."""

    label: str
    policy: str | None = None
    params: dict[str, str] = {}
    url: str | None = None
    queue: ArmQueue | None = None  # None: as a router of this policy has it
    is_unlimited: bool = False  # on caches that never evict: the limit of what a router can do

    def make_policy(self) -> Policy:
        """Make the policy object, for the simulator."""
        assert self.policy is not None
        return create(self.policy, self.params)

    def queue_rules(self) -> QueueRules | None:
        """Return the rules of the queue, for the simulator; None: there is no queue."""
        assert self.policy is not None
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
    queue = _queue_of(params)
    create(name, params)
    return Arm(label=label, policy=name, params=params, queue=queue)


def parse_policies(texts: Iterable[str]) -> tuple[Arm, ...]:
    """Read variants (`arm_of`) with commas between; `all` stands for every policy.

    Raises:
        click.BadParameter: a policy or parameter is unknown (names the nearest), or a value is
            out of its range.
    """
    arms: list[Arm] = []
    for spec in (spec for text in texts for spec in split_list(text)):
        if spec == "all":
            arms += [Arm(label=name, policy=name) for name in POLICIES]
            continue
        try:
            arms.append(arm_of(spec))
        except ValueError as exc:
            raise click.BadParameter(str(exc), param_hint="--policies") from exc
    return tuple(arms)


def _queue_of(params: dict[str, str]) -> ArmQueue | None:
    """Remove the parameters of the queue from `params`; None: there are none.

    Raises:
        ValueError: There is no such key, or a value is out of its range.
    """
    names = [name for name in params if name.startswith(_QUEUE)]
    if not names:
        return None
    own = {name.removeprefix(_QUEUE): params.pop(name) for name in names}
    known = [field.name for field in msgspec.structs.fields(ArmQueue)]
    for key in own:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            meant = f"; did you mean {_QUEUE}{near[0]}?" if near else ""
            allowed = ", ".join(f"{_QUEUE}{name}" for name in known)
            raise ValueError(f"unknown parameter {_QUEUE}{key}{meant} (allowed: {allowed})")
    try:
        return msgspec.convert({"mode": "on", **own}, ArmQueue, strict=False)
    except msgspec.ValidationError as exc:
        raise ValueError(f"{_QUEUE[:-1]}: {exc}") from exc


def _given(queue: ArmQueue) -> dict[str, float]:
    """List the settings of a variant's queue, without its mode."""
    given = msgspec.structs.asdict(queue)
    del given["mode"]
    return {key: value for key, value in given.items() if value is not None}


def parse_targets(pairs: Iterable[str]) -> tuple[Arm, ...]:
    """Read `NAME=URL`; a URL alone is its own name.

    Raises:
        click.BadParameter: one is no http(s) base URL, or carries credentials.
    """
    arms = []
    for pair in pairs:
        name, equals, url = pair.partition("=")
        if not equals or "://" in name:
            name, url = pair, pair
        arms.append(Arm(label=name.strip(), url=parse_url(url.strip(), "--target")))
    return tuple(arms)


def parse_url(text: str, hint: str) -> str:
    """Bring a base URL into one form, without `/v1`.

    Raises:
        click.BadParameter: it is none.
    """
    from loadtest.runner.target import TargetError, base_url

    try:
        return base_url(text)
    except TargetError as exc:
        raise click.BadParameter(str(exc), param_hint=hint) from exc


def check_arms(arms: Sequence[Arm], baseline: str | None) -> tuple[tuple[Arm, ...], str]:
    """Check that there is something to compare, and with what.

    Returns:
        The variants, and the label of the baseline: the one named, else the first.

    Raises:
        click.UsageError: fewer than two variants, two of one name, or a baseline that is none.
    """
    labels = [arm.label for arm in arms]
    if len(labels) < 2:
        named = f"only {labels[0]!r}" if labels else "none"
        raise click.UsageError(
            f"a comparison needs two variants or more, there is {named}"
            ": name policies with --policies A,B or targets with --target NAME=URL (repeatable)"
        )
    for label in labels:
        if labels.count(label) > 1:
            raise click.UsageError(
                f"two variants are called {label!r}; to see how far equal variants differ (an A/A "
                "test), write one policy with a parameter at its default, or give targets other "
                "names"
            )
    if baseline is not None and baseline not in labels:
        near = get_close_matches(baseline, labels, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise click.UsageError(
            f"the baseline {baseline!r} is none of the variants{meant} (they are: "
            f"{', '.join(labels)})"
        )
    return tuple(arms), baseline or labels[0]


def serve_flags(arm: Arm) -> list[str]:
    """Write the options of `warmroute serve` for a variant's policy and queue."""
    assert arm.policy is not None
    flags = ["--policy", arm.policy]
    for key, value in arm.params.items():
        flags += ["--policy-param", f"{key}={value}"]
    if arm.queue is not None:
        flags += ["--queue", arm.queue.mode or "on"]
        for option, setting in _given(arm.queue).items():
            flags += [f"--queue-{option}", str(setting)]
    return flags
