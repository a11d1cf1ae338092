from __future__ import annotations

import pytest

from loadtest.simulator.named import named_policies
from policies import POLICIES


def test_all_are_all() -> None:
    """`all` is every policy with its defaults, under its name."""
    assert [label for label, _ in named_policies(["all"])] == list(POLICIES)


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        (["kv_aware,random"], ["kv_aware", "random"]),
        (
            ["prefix_hash:load_factor=8,num_points=4,random"],
            ["prefix_hash:load_factor=8,num_points=4", "random"],
        ),
        (["kv_aware:alpha=4.0", "kv_aware:alpha=1"], ["kv_aware", "kv_aware:alpha=1"]),
        (["mooncake:kvcache_balancing_threshold=4"], ["mooncake:kvcache_balancing_threshold=4"]),
    ],
)
def test_a_list_may_have_parameters(texts: list[str], labels: list[str]) -> None:
    """`name=value` behind a comma belongs to the policy before it; defaults are not shown."""
    assert [label for label, _ in named_policies(texts)] == labels


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("kv_awar", "did you mean 'kv_aware'"),
        ("kv_aware:alpa=1", "did you mean 'alpha'"),
        ("kv_aware:alpha", "'alpha' is not PARAM=VALUE"),
        ("kv_aware:alpha=much", "policy 'kv_aware'"),
        ("random,random", "named twice"),
        ("all,random", "named twice"),
        (" , ", "no policy is named; there are: "),
    ],
)
def test_wrong_names_are_explained(text: str, error: str) -> None:
    """The error says what is wrong, and what was probably meant."""
    with pytest.raises(ValueError, match=error):
        named_policies([text])
