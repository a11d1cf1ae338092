"""Policies by their names on a command line: `kv_aware`, `prefix_hash:num_points=9`, `all`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from policies import POLICIES, Policy, create
from policies.naming import label_of, parse, split_list


def named_policies(texts: Iterable[str]) -> list[tuple[str, Policy]]:
    """Make the policies that `texts` name, each with a label; one text may name several.

    Raises:
        ValueError: Unknown policy or parameter, a bad value, one that is named twice, or none.
    """
    made: dict[str, Policy] = {}
    for text in texts:
        for label, policy in _named(text):
            if label in made:
                raise ValueError(f"policy {label!r} is named twice")
            made[label] = policy
    if not made:
        raise ValueError(f"no policy is named; there are: {', '.join(POLICIES)}")
    return list(made.items())


def _named(text: str) -> Iterator[tuple[str, Policy]]:
    for spec in split_list(text):
        chosen = [create(name) for name in POLICIES] if spec == "all" else [parse(spec)]
        for policy in chosen:
            yield label_of(policy, between=","), policy
