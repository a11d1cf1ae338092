"""The definition of an experiment: its variants, and which traffic each of them gets.

This module has the structs that operators write, and the checks that types and ranges cannot make.
It has no state: `router.observers.experiments` assigns requests.

Shares are shares of the traffic in scope, the requests for `models`. They sum to 1 at most. The
rest is not in the experiment, and the router's own policy places it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from policies.naming import split
from policies.policy import Policy
from policies.refusals import meant
from policies.registry import create
from router.base.errors import ConfigError

Design = Literal["split", "switchback"]
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$")]

MAX_VARIANTS: Final = 8
UNIT: Final = 1_000_000
"""Shares are counted in millionths, so that every router rounds them the same way."""

_QUEUE: Final = "queue."


class VariantQueue(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A variant's own queue settings; what is None is as in the router's `queue`."""

    mode: Literal["off", "on"] | None = None
    fill: Annotated[float, Meta(ge=0.1, le=10)] | None = None


class VariantConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One variant of an experiment."""

    name: Annotated[Name, Meta(description="letters, digits, '.', '_', '-'")]
    policy: Annotated[
        str,
        Meta(
            description="NAME or NAME:PARAM=VALUE[:PARAM=VALUE…] (see `warmroute policies`); "
            "design switchback also takes `queue.mode` and `queue.fill`"
        ),
    ]
    share: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(description="share of the traffic in scope; default: equal shares of all of it"),
    ] = None

    def made(self) -> tuple[Policy, VariantQueue | None]:
        """Create the policy, and its queue settings; None: those of the router.

        Raises:
            ValueError: a policy or parameter is unknown, or a value is wrong.
        """
        name, params = split(self.policy)
        queue = queue_of(params)
        return create(name, params), queue


class Experiment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A comparison of policies on live traffic."""

    name: Annotated[Name, Meta(description="letters, digits, '.', '_', '-'")]
    variants: Annotated[
        tuple[VariantConfig, ...],
        Meta(
            min_length=2,
            max_length=MAX_VARIANTS,
            description="at least two; the others are compared with the first",
        ),
    ]
    design: Annotated[
        Design,
        Meta(description="split: by session; switchback: by time slot of the whole fleet"),
    ] = "split"
    models: Annotated[
        tuple[str, ...],
        Meta(description="models (or adapters) whose requests take part; default: all"),
    ] = ()
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
    start_at: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="unix seconds at which all routers switch to it; default: when a router "
            "reads it"
        ),
    ] = None

    @property
    def wash_out(self) -> float:
        """Return the seconds after a change of variant that do not count."""
        return self.slot_s / 10 if self.wash_out_s is None else self.wash_out_s

    def shares(self) -> dict[str, float]:
        """Return the share of each variant."""
        equal = UNIT // len(self.variants) / UNIT
        return {each.name: equal if each.share is None else each.share for each in self.variants}


def queue_of(params: dict[str, str]) -> VariantQueue | None:
    """Remove the parameters `queue.KEY` from a policy's; None: there are none.

    Any of them switches the queue on; `queue.mode=off` switches it off.

    Raises:
        ValueError: there is no such key, or a value is out of its range.
    """
    own = {name: params.pop(name) for name in list(params) if name.startswith(_QUEUE)}
    if not own:
        return None
    known = [f"{_QUEUE}{name}" for name in VariantQueue.__struct_fields__]
    for name in own:
        if name not in known:
            hint = f"{meant(name, known)} (allowed: {', '.join(known)})"
            raise ValueError(f"unknown parameter {name!r}{hint}")
    values = {name.removeprefix(_QUEUE): value for name, value in own.items()}
    try:
        return msgspec.convert({"mode": "on", **values}, VariantQueue, strict=False)
    except msgspec.ValidationError as exc:
        raise ValueError(f"{_QUEUE[:-1]}: {exc}") from exc


def check(experiment: Experiment | None) -> None:
    """Refuse what types cannot.

    Raises:
        ConfigError: the message and `param` name the key.
    """
    if experiment is None:
        return
    names: set[str] = set()
    for i, each in enumerate(experiment.variants):
        key = f"variants[{i}]"
        try:
            _, queue = each.made()
        except ValueError as exc:
            raise _wrong(f"{key}.policy", str(exc)) from exc
        if experiment.design == "split" and queue is not None:
            text = "only design switchback has a queue: variants of a split share one"
            raise _wrong(f"{key}.policy", text)
        if each.name in names:
            raise _wrong(f"{key}.name", f"{each.name!r} is used twice")
        names.add(each.name)
    given = [each.share is not None for each in experiment.variants]
    if any(given) and not all(given):
        raise _wrong(f"variants[{given.index(False)}].share", "give all variants a share, or none")
    total = sum(experiment.shares().values())
    if not 0 < total <= 1 + 0.5 / UNIT:
        raise _wrong("variants[].share", f"shares sum to {total:g}; above 0, and at most 1")
    if experiment.wash_out >= experiment.slot_s:
        raise _wrong("wash_out_s", f"must be less than slot_s, {experiment.slot_s:g}")


def _wrong(key: str, text: str) -> ConfigError:
    return ConfigError(f"experiment.{key}: {text}", param=f"experiment.{key}")
