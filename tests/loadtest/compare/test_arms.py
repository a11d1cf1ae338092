"""What is compared, as written on a command line."""

from __future__ import annotations

import click
import pytest

from loadtest.compare.arms import Arm, check_arms, parse_policies, parse_targets, serve_flags
from policies import POLICIES
from router import config
from router.scheduling.waiting import QueueRules


def test_policies_with_their_parameters() -> None:
    """A comma before NAME=VALUE belongs to the policy before it."""
    arms = parse_policies(["kv_aware, prefix_hash:load_factor=2,num_points=4", "least_loaded"])

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
    assert [arm.policy for arm in parse_policies(["all"])] == list(POLICIES)


def test_arms_may_differ_in_their_queue() -> None:
    """Simulated as a router of the policy has it; a key of the queue switches it on or off."""
    specs = "kv_aware,least_loaded,kv_aware:queue.mode=off,least_loaded:queue.fill=0.5"
    default, other, off, filled = parse_policies([specs])

    assert (default.queue_rules(), other.queue_rules()) == (QueueRules(), None)
    assert (off.queue_rules(), filled.queue_rules()) == (None, QueueRules(fill=0.5))
    assert filled.params == {}
    assert serve_flags(default) == ["--policy", "kv_aware"]
    assert serve_flags(off)[2:] == ["--queue", "off"]
    assert serve_flags(filled)[2:] == ["--queue", "on", "--queue-fill", "0.5"]
    options = {f"--{option.flag}" for option in config.options()}
    assert {flag for flag in serve_flags(filled) if flag.startswith("--")} <= options


def test_unlimited_is_kv_aware_on_caches_that_never_evict() -> None:
    """The limit of what a router can do, as one more variant; `all` does not name it."""
    (limit,) = parse_policies(["unlimited"])

    assert (limit.policy, limit.is_unlimited, limit.queue_rules()) == (
        "kv_aware",
        True,
        QueueRules(),
    )
    assert not any(arm.is_unlimited for arm in parse_policies(["all"]))


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
    ],
)
def test_wrong_policies_are_refused(text: str, said: str) -> None:
    """The message has the nearest known name."""
    with pytest.raises(click.BadParameter, match=said):
        parse_policies([text])


def test_targets_have_names() -> None:
    """NAME=URL, or the URL is the name; `/v1` goes."""
    named, bare = parse_targets(["ours=http://127.0.0.1:1/v1/", "http://127.0.0.1:2"])

    assert (named.label, named.url) == ("ours", "http://127.0.0.1:1")
    assert bare.label == bare.url == "http://127.0.0.1:2"
    with pytest.raises(click.BadParameter, match="base URL"):
        parse_targets(["ours=127.0.0.1:1"])


def test_a_comparison_needs_two_different_arms() -> None:
    """None, one, or one twice is no comparison; neither is a baseline that is no arm."""
    one, two = Arm(label="kv_aware"), Arm(label="least_loaded")

    assert check_arms([one, two], None)[1] == "kv_aware"
    assert check_arms([one, two], "least_loaded")[1] == "least_loaded"
    with pytest.raises(click.UsageError, match="there is none"):
        check_arms([], None)
    with pytest.raises(click.UsageError, match="only 'kv_aware'"):
        check_arms([one], None)
    with pytest.raises(click.UsageError, match="two variants are called 'kv_aware'"):
        check_arms([one, two, one], None)
    with pytest.raises(click.UsageError, match="did you mean 'kv_aware'"):
        check_arms([one, two], "kv_awar")
