"""What is compared, as written on a command line."""

from __future__ import annotations

import pytest

from loadtest.simulator.arms import arms_of, serve_flags
from policies import POLICIES
from router.scheduling.waiting import QueueRules


def test_policies_with_their_parameters() -> None:
    """A comma before NAME=VALUE belongs to the policy before it."""
    arms = arms_of(["kv_aware, prefix_hash:load_factor=2,num_points=4", "least_loaded"])

    assert [arm.label for arm in arms] == [
        "kv_aware",
        "prefix_hash:load_factor=2,num_points=4",
        "least_loaded",
    ]
    assert arms[1].params == {"load_factor": "2", "num_points": "4"}
    assert arms[1].make_policy() != arms[0].make_policy()
    assert serve_flags(arms[1]) == [
        "--policy", "prefix_hash",
        "--policy-param", "load_factor=2", "--policy-param", "num_points=4",
    ]  # fmt: skip
    assert [arm.policy for arm in arms_of(["all"])] == list(POLICIES)


def test_arms_may_differ_in_their_queue() -> None:
    """Simulated as a router of the policy has it; a key of the queue switches it on or off."""
    specs = "kv_aware,least_loaded,kv_aware:queue.mode=off,least_loaded:queue.fill=0.5"
    default, other, off, filled = arms_of([specs])

    assert (default.queue_rules(), other.queue_rules()) == (QueueRules(), None)
    assert (off.queue_rules(), filled.queue_rules()) == (None, QueueRules(fill=0.5))
    assert filled.params == {}
    assert serve_flags(default) == ["--policy", "kv_aware"]
    assert serve_flags(off)[2:] == ["--queue", "off"]
    assert serve_flags(filled)[2:] == ["--queue", "on", "--set", "queue.fill=0.5"]


def test_unlimited_is_kv_aware_on_caches_that_never_evict() -> None:
    """The limit of what a router can do, as one more variant; `all` does not name it."""
    (limit,) = arms_of(["unlimited"])

    assert (limit.policy, limit.is_unlimited, limit.queue_rules()) == (
        "kv_aware",
        True,
        QueueRules(),
    )
    assert not any(arm.is_unlimited for arm in arms_of(["all"]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kv_aware:queue.full=1", "did you mean queue.fill"),
        ("kv_aware:queue.fill=-1", "queue: Expected `float` >= 0.1"),
        ("kv_aware:queue.mode=maybe", "queue: Invalid enum value"),
        ("kv_awear", "did you mean 'kv_aware'"),
        ("kv_aware:alpa=1", "did you mean 'alpha'"),
        ("kv_aware:alpha", "is not PARAM=VALUE"),
        ("kv_aware:alpha=much", "alpha"),
        ("random,random", "named twice"),
        ("all,random", "named twice"),
        (" , ", "no policy is named; there are: "),
    ],
)
def test_wrong_policies_are_refused(text: str, said: str) -> None:
    """The message has the nearest known name."""
    with pytest.raises(ValueError, match=said):
        arms_of([text])
