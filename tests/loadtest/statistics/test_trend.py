"""A drift is found where there is one, and not where there is none."""

from __future__ import annotations

import numpy as np

from loadtest.statistics import across, within


def test_a_run_that_slows_down_is_noticed() -> None:
    """Twice as slow at the end as at the beginning, noise beside it."""
    random = np.random.default_rng(1)
    values = np.linspace(1.0, 2.5, 90) * random.lognormal(0.0, 0.2, size=90)

    trend = within(values.tolist())

    assert trend.is_sure
    assert 1.6 < trend.change < 2.6


def test_noise_is_no_trend() -> None:
    """At most a few of 200 steady runs look as if they drifted: the test is at 1 %."""
    random = np.random.default_rng(2)

    num_sure = sum(within(random.lognormal(size=60).tolist()).is_sure for _ in range(200))

    assert num_sure <= 8


def test_too_little_says_nothing() -> None:
    """A handful of turns, equal turns, two runs: no trend."""
    assert not within([1.0, 2.0, 3.0]).is_sure
    assert not within([1.0] * 50).is_sure
    assert not within([0.0] * 20 + [1.0] * 20).is_sure
    assert not across([("a", 1.0), ("b", 2.0)]).is_sure


def test_drift_over_rounds_is_distinguished_from_a_difference_of_arms() -> None:
    """Each arm has a level of its own; what both share over time is drift."""
    order = ["a", "b", "b", "a", "a", "b", "b", "a"]
    random = np.random.default_rng(3)
    level = {"a": 1.0, "b": 3.0}

    steady = across([(arm, level[arm] * random.lognormal(0, 0.02)) for arm in order])
    warming = across(
        [(arm, level[arm] * 1.5 ** (i / 7) * random.lognormal(0, 0.02))
         for i, arm in enumerate(order)]
    )  # fmt: skip

    assert not steady.is_sure
    assert warming.is_sure
    assert 1.35 < warming.change < 1.65


def test_an_exact_drift_is_sure() -> None:
    """Simulated runs have no noise: any slope is one."""
    trend = across([("a", 1.1**i) for i in range(5)])

    assert trend.is_sure
    assert round(trend.change, 3) == round(1.1**4, 3)


def test_arms_one_after_the_other_look_like_drift() -> None:
    """With one run per arm, level and trend are the same thing: nothing is claimed."""
    assert not across([(name, 1.0 + i) for i, name in enumerate("abcd")]).is_sure
