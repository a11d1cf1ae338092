"""The definition of an experiment: its variants, design, traffic and guardrails.

This module has the structs that operators write, and the checks that types and ranges cannot make.
It has no state: `router.observers.experiments` assigns requests.

Shares are shares of the traffic in scope, the requests for `models`. The variants' shares and
`holdout` sum to 1 at most. The rest is not in the experiment, and the default policy places it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from policies.policy import Policy
from policies.registry import create
from router.base.errors import ConfigError

Design = Literal["split", "switchback"]
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$")]
Share = Annotated[float, Meta(ge=0, le=1)]

WRITTEN: Final = {"arms": "variants"}
"""What people write and read for a field that records and other routers name as before."""

MAX_ARMS = 8
UNIT = 1_000_000
"""Shares are counted in millionths, so that every router rounds them the same way."""


class ArmQueue(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A variant's own queue settings; what is not set is as in the router's `queue`."""

    mode: Annotated[Literal["off", "on"] | None, Meta(description="whether its prompts wait")] = (
        None
    )
    fill: Annotated[
        Annotated[float, Meta(ge=0.1, le=10)] | None,
        Meta(
            description="share of a cache that live conversations of all variants may fill, as "
            "queue.fill"
        ),
    ] = None


class Arm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One variant of an experiment."""

    name: Annotated[Name, Meta(description="letters, digits, '.', '_', '-'")]
    policy: Annotated[str, Meta(description="routing policy (see `warmroute policies`)")]
    params: Annotated[
        dict[str, Any], Meta(description="the policy's parameters; others keep their defaults")
    ] = {}
    share: Annotated[
        Share | None,
        Meta(
            description="share of the traffic in scope; default: equal shares of what the holdout "
            "leaves"
        ),
    ] = None
    queue: Annotated[
        ArmQueue | UnsetType,  # not written if it is not given: older routers refuse the key
        Meta(description="design switchback: its own mode, fill"),
    ] = UNSET

    def made(self) -> Policy:
        """Create the policy; ValueError if it is unknown or its parameters are wrong."""
        return create(self.policy, self.params)


class Step(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of a ramp."""

    after_s: Annotated[float, Meta(ge=0, description="seconds after the start")]
    shares: Annotated[
        dict[str, Share], Meta(min_length=1, description="variant: its share from then on")
    ]


class Guardrails(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds that stop a variant automatically; without any, nothing does."""

    max_error_rate: Annotated[
        Annotated[float, Meta(gt=0, lt=1)] | None,
        Meta(description="highest share of requests that fail (no answer, or a 5xx)"),
    ] = None
    max_ttft_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="highest first-token time, at the quantile ttft_quantile"),
    ] = None
    ttft_quantile: Annotated[
        float, Meta(gt=0, lt=1, description="quantile that max_ttft_s limits")
    ] = 0.95
    max_ttft_ratio: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        Meta(description="highest median first-token time, as a multiple of the control variant's"),
    ] = None
    min_samples: Annotated[
        int, Meta(ge=1, description="observations before a guardrail may stop its variant")
    ] = 20
    alpha: Annotated[
        float,
        Meta(
            gt=0,
            lt=1,
            description="chance that a variant within all its bounds is ever stopped, at any "
            "number of looks",
        ),
    ] = 0.01


class Experiment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A comparison of policies on live traffic."""

    name: Annotated[Name, Meta(description="letters, digits, '.', '_', '-'")]
    arms: Annotated[
        tuple[Arm, ...],
        Meta(min_length=2, max_length=MAX_ARMS, description="the variants, at least two"),
    ]
    design: Annotated[
        Design,
        Meta(description="split: sessions; switchback: time slots of the whole fleet"),
    ] = "split"
    models: Annotated[
        tuple[str, ...],
        Meta(description="models (or adapters) whose requests take part; default: all"),
    ] = ()
    control: Annotated[
        str | None,
        Meta(description="variant to compare with; default: the first"),
    ] = None
    holdout: Annotated[
        float, Meta(ge=0, le=0.99, description="share of sessions that never take part")
    ] = 0.0
    ramp: Annotated[
        tuple[Step, ...],
        Meta(
            max_length=100, description="shares over time; until the first step each variant's own"
        ),
    ] = ()
    guardrails: Annotated[Guardrails, Meta(description="what stops a variant by itself")] = (
        Guardrails()
    )
    slot_s: Annotated[
        float, Meta(ge=0.1, le=604_800, description="switchback: length of a time slot")
    ] = 600.0
    wash_out_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="switchback: time after a change of variant in which requests are not "
            "counted; default: a tenth of the slot"
        ),
    ] = None
    seed: Annotated[int, Meta(ge=0, description="seed of the assignment")] = 0
    start_at: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="unix seconds; default: at once"),
    ] = None

    @property
    def control_arm(self) -> str:
        """Name the variant that the others are compared with."""
        return self.control or self.arms[0].name

    @property
    def wash_out(self) -> float:
        """Return the seconds after a change of variant that do not count."""
        return self.slot_s / 10 if self.wash_out_s is None else self.wash_out_s

    def claims(self, model: str) -> bool:
        """Return whether requests for a model take part."""
        return not self.models or model in self.models

    def shares(self) -> dict[str, float]:
        """Return the variants' shares at the start."""
        equal = int((1 - self.holdout) * UNIT + 0.5) // len(self.arms) / UNIT
        return {arm.name: equal if arm.share is None else arm.share for arm in self.arms}


class ExperimentConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    definitions: Annotated[
        tuple[Experiment, ...],
        Meta(
            description="experiments on live traffic, from the start on",
            extra={"flag": "experiment", "only_in_file": True},
        ),
    ] = ()


def recorded_names(tree: Mapping[str, Any], key: str = "") -> dict[str, Any]:
    """Return a definition with the names of its fields; `key` goes before them in errors.

    Raises:
        ConfigError: it has a field under both names.
    """
    found = dict(tree)
    for recorded, written in WRITTEN.items():
        if written in found:
            if recorded in found:
                raise _wrong(f"{key}{written}", f"is there twice: remove {recorded}")
            found[recorded] = found.pop(written)
    return found


def check(experiment: Experiment, key: str = "") -> None:
    """Refuse what types cannot; `key` goes before the names of fields.

    Raises:
        ConfigError: the message and `param` name the field.
    """
    names: set[str] = set()
    for i, arm in enumerate(experiment.arms):
        _check_arm(experiment, arm, f"{key}variants[{i}].")
        if arm.name in names:
            raise _wrong(f"{key}variants[{i}].name", f"{arm.name!r} is used twice")
        names.add(arm.name)
    if experiment.control is not None and experiment.control not in names:
        raise _wrong(f"{key}control", f"{experiment.control!r} is no variant: {_list(names)}")
    given = [arm.share is not None for arm in experiment.arms]
    if any(given) and not all(given):
        raise _wrong(
            f"{key}variants[{given.index(False)}].share", "give all variants a share, or none"
        )
    check_shares(experiment, experiment.shares(), f"{key}variants[].share")
    if not any(experiment.shares().values()) and not experiment.ramp:
        raise _wrong(
            f"{key}variants[].share", "all are 0 and there is no ramp: no request takes part"
        )
    _check_ramp(experiment, f"{key}ramp")
    if experiment.wash_out >= experiment.slot_s:
        raise _wrong(f"{key}wash_out_s", f"must be less than slot_s, {experiment.slot_s:g}")


def check_shares(experiment: Experiment, shares: Mapping[str, float], key: str) -> None:
    """Refuse shares of unknown variants, outside 0 to 1, or with a sum above 1.

    Raises:
        ConfigError: the message and `param` name the field.
    """
    known = [arm.name for arm in experiment.arms]
    for name, share in shares.items():
        if name not in known:
            raise _wrong(f"{key}.{name}", f"no such variant; variants: {_list(known)}")
        if not 0 <= share <= 1:  # a NaN is neither
            raise _wrong(f"{key}.{name}", f"{share} is not a share: 0 to 1")
    total = sum(shares.values()) + experiment.holdout
    if total > 1 + 0.5 / UNIT:
        held = f" with the holdout of {experiment.holdout:g}" if experiment.holdout else ""
        raise _wrong(key, f"shares sum to {total:g}{held}; at most 1")


def conflict(one: Experiment, other: Experiment) -> str | None:
    """Return which traffic two experiments both claim; None: none."""
    if one.models and other.models:
        both = sorted({*one.models} & {*other.models})
        return f"requests for {_list(both)}" if both else None
    named = one.models or other.models
    return f"requests for {_list(named)}" if named else "all requests"


def check_all(experiments: Sequence[Experiment], key: str) -> None:
    """Refuse experiments that are wrong, or that claim the same name or traffic.

    Raises:
        ConfigError: the message and `param` name the field.
    """
    for i, experiment in enumerate(experiments):
        own = f"{key}[{i}]"
        check(experiment, f"{own}.")
        for j, other in enumerate(experiments[:i]):
            if other.name == experiment.name:
                raise _wrong(f"{own}.name", f"{experiment.name!r} is {key}[{j}]'s name, too")
            claimed = conflict(other, experiment)
            if claimed is not None:
                raise _wrong(
                    f"{own}.models",
                    f"{experiment.name!r} and {other.name!r} ({key}[{j}]) both claim {claimed}",
                )


def _check_arm(experiment: Experiment, arm: Arm, key: str) -> None:
    try:
        arm.made()
    except ValueError as exc:
        raise _wrong(f"{key}policy", str(exc)) from exc
    if experiment.design == "split" and arm.queue is not UNSET:
        raise _wrong(
            f"{key}queue",
            "only design switchback has it: variants of a split share one queue",
        )


def _check_ramp(experiment: Experiment, key: str) -> None:
    shares = experiment.shares()
    last_s = 0.0
    for i, step in enumerate(experiment.ramp):
        if step.after_s < last_s:
            raise _wrong(f"{key}[{i}].after_s", f"{step.after_s:g} comes before {last_s:g}")
        last_s = step.after_s
        shares |= step.shares
        check_shares(experiment, shares, f"{key}[{i}].shares")


def _wrong(key: str, text: str) -> ConfigError:
    return ConfigError(f"{key}: {text}", param=key)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
