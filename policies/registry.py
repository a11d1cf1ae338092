"""Policies by name, made from loose parameters (configuration, command line, admin API)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from policies.cost import KvAware, MinTtft
from policies.decode import DecodeLoad
from policies.lmetric import Lmetric
from policies.load import LeastLoaded, PowerOfTwo, Random, RoundRobin
from policies.mooncake import Mooncake
from policies.policy import Policy
from policies.prefix import LongestPrefix, PrefixHash
from policies.refusals import in_words, meant
from policies.session import SessionHash, SessionSticky

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Random,
        RoundRobin,
        LeastLoaded,
        PowerOfTwo,
        SessionHash,
        SessionSticky,
        PrefixHash,
        LongestPrefix,
        Lmetric,
        DecodeLoad,
        Mooncake,
        MinTtft,
        KvAware,
    )
}
"""Every policy, from the simplest to the default."""

DEFAULT_POLICY = KvAware.name


def create(name: str, params: Mapping[str, object] | None = None) -> Policy:
    """Make the policy called `name`.

    Args:
        name: A key of `POLICIES`.
        params: Parameter name to value; text is converted ("2" is 2.0). None: all defaults.

    Raises:
        ValueError: Unknown policy or parameter (names the nearest known and lists all), or a
            value of the wrong type or out of range.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise ValueError(_unknown("policy", name, POLICIES))
    params = dict(params or {})
    allowed = [field.name for field in msgspec.structs.fields(policy)]
    for param in params:
        if param not in allowed:
            raise ValueError(_unknown(f"parameter of policy {name!r}", param, allowed))
    try:
        return msgspec.convert(params, policy, strict=False)
    except msgspec.ValidationError as exc:
        text, _, where = str(exc).partition(" - at `$.")
        param = where.rstrip("`")
        place = f": {param}" if param else ""
        raise ValueError(f"policy {name!r}{place}: {in_words(text, params.get(param))}") from exc


def _unknown(what: str, name: str, allowed: Iterable[str]) -> str:
    """Describe an unknown `name`: what was probably meant, and what there is."""
    listed = ", ".join(allowed) or "none"
    return f"unknown {what}: {name!r}{meant(name, allowed)} (allowed: {listed})"
