"""policies.naming: a label is the policy, written down."""

from __future__ import annotations

import pytest
from msgspec.structs import asdict

from policies import POLICIES, create
from policies.cost import KvAware
from policies.naming import label_of, parse, split


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
