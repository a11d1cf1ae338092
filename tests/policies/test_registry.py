"""

policies.naming: a label is the policy, written down.
"""

from __future__ import annotations

import pytest
from msgspec.structs import asdict

from policies import POLICIES, create
from policies.cost import KvAware
from policies.naming import label_of, parse, split
from policies.registry import DEFAULT_POLICY


def test_defaults() -> None:
    """Every policy can be made without parameters, and the default is one of them."""
    assert [create(name).name for name in POLICIES] == list(POLICIES)
    assert create(DEFAULT_POLICY) == KvAware(alpha=4.0)


def test_parameters_may_be_text() -> None:
    """Flags and environment give text; it is converted to the parameter's type."""
    assert create("kv_aware", {"alpha": "3"}) == KvAware(alpha=3.0)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("kv_awre", {}, r"unknown policy: 'kv_awre'; did you mean 'kv_aware'\? .*round_robin"),
        ("zzz", {}, r"unknown policy: 'zzz' \(allowed: random, "),
        (
            "kv_aware",
            {"alfa": 1},
            r"'alfa'; did you mean 'alpha'\? \(allowed: alpha\)",
        ),
        ("random", {"seed": 1}, r"unknown parameter of policy 'random': 'seed' \(allowed: none\)"),
        ("kv_aware", {"alpha": -1}, r"policy 'kv_aware': alpha: must be at least 0, not -1"),
        ("kv_aware", {"alpha": "much"}, r"policy 'kv_aware': alpha: must be a number, not 'much'"),
        ("prefix_hash", {"load_factor": 0.5}, r"load_factor: must be at least 1, not 0\.5"),
        ("prefix_hash", {"num_points": 10**6}, r"num_points: must be at most 1000, not 1000000"),
    ],
)
def test_refuses(name: str, params: dict[str, object], message: str) -> None:
    """A wrong name or value is refused with what would have been right."""
    with pytest.raises(ValueError, match=message):
        create(name, params)


@pytest.mark.parametrize("name", POLICIES)
def test_a_label_names_the_very_policy(name: str) -> None:
    """So do its name and parameters."""
    policy = POLICIES[name]()

    assert label_of(policy) == name
    assert parse(label_of(policy)) == policy
    assert create(policy.name, asdict(policy)) == policy


@pytest.mark.parametrize(
    ("policy", "label"),
    [
        (KvAware(alpha=0.0), "kv_aware:alpha=0"),
        (
            create("prefix_hash", {"load_factor": 1.5, "num_points": 9}),
            "prefix_hash:load_factor=1.5:num_points=9",
        ),
        (create("prefix_hash", {"num_points": 3}), "prefix_hash:num_points=3"),
    ],
)
def test_a_label_shows_what_is_no_default(policy: KvAware, label: str) -> None:
    """And nothing else."""
    assert label_of(policy) == label
    assert parse(label) == policy
    assert parse(label.replace("5:num_points", "5,num_points")) == policy


@pytest.mark.parametrize("text", ["kv_aware:alpha", "kv_aware:=1", "kv_aware:a,b=1"])
def test_a_parameter_without_a_value_is_refused(text: str) -> None:
    """The text is quoted."""
    with pytest.raises(ValueError, match="is not PARAM=VALUE"):
        split(text)
