"""Policies as text: `NAME`, or `NAME:PARAM=VALUE[:PARAM=VALUE…]`, in flags, labels and records."""

from __future__ import annotations

import msgspec

from policies.policy import Policy
from policies.registry import create


def label_of(policy: Policy, *, between: str = ":") -> str:
    """Name a policy and those of its parameters that are no defaults; `parse` undoes it."""
    changed = [
        f"{field.name}={_text(getattr(policy, field.name))}"
        for field in msgspec.structs.fields(policy)
        if getattr(policy, field.name) != field.default
    ]
    return policy.name + (":" + between.join(changed) if changed else "")


def split(text: str) -> tuple[str, dict[str, str]]:
    """Split a label into name, and parameters as text; commas part them as well.

    Raises:
        ValueError: a parameter is not PARAM=VALUE.
    """
    name, _, rest = text.strip().partition(":")
    params: dict[str, str] = {}
    for pair in filter(None, rest.replace(",", ":").split(":")):
        param, equals, value = pair.partition("=")
        if not equals or not param:
            raise ValueError(f"policy {text!r}: {pair!r} is not PARAM=VALUE")
        params[param.strip()] = value.strip()
    return name, params


def split_list(text: str) -> list[str]:
    """Split a list of labels at commas; `PARAM=VALUE` belongs to the policy before it."""
    labels: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if labels and "=" in part and ":" not in part:
            labels[-1] += f",{part}"
        else:
            labels.append(part)
    return labels


def parse(text: str) -> Policy:
    """Make the policy that a label names.

    Raises:
        ValueError: as `split` and `policies.create`.
    """
    return create(*split(text))


def _text(value: object) -> str:
    return f"{int(value)}" if isinstance(value, float) and value.is_integer() else f"{value}"
