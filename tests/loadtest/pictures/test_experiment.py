"""loadtest.pictures.experiment: pictures of experiments, whatever is known of them."""

from __future__ import annotations

import numpy as np

from loadtest.pictures import experiment


def grown(low: list[float], high: list[float]) -> experiment.Growth:
    middle = [(a + b) / 2 if np.isfinite(a) else np.nan for a, b in zip(low, high, strict=True)]
    return experiment.Growth(
        at_s=1.8e9 + 3600.0 * np.arange(len(low)),
        value=np.array(middle),
        low=np.array(low),
        high=np.array(high),
    )


def is_svg(picture: bytes | None) -> bool:
    return picture is not None and picture.lstrip().startswith(b"<?xml") and b"</svg>" in picture


def test_a_verdict_that_grows() -> None:
    """Bands that narrow are drawn, also where they began infinite."""
    inf = np.inf
    arms = {
        "kv_aware": grown([-inf, -0.4, -0.3], [inf, 0.1, -0.1]),
        "random": grown([-inf, -inf, -inf], [inf, inf, inf]),
    }

    picture = experiment.growth(arms, baseline="control", margin=0.05, what="first token, %")

    assert is_svg(picture)


def test_distributions_sources_and_ratios() -> None:
    """Thousands of requests, four sources, and units beside their numbers."""
    rng = np.random.default_rng(0)
    times = {arm: (rng.lognormal(5, 1, 3000), np.ones(3000)) for arm in ("a", "b")}
    parts = {"gpu": 900.0, "cpu": 0.0, "pool": 80.0, "computed": 20.0}

    assert is_svg(experiment.distributions(times))
    assert is_svg(experiment.sources({"a": parts, "b": parts}))
    assert is_svg(experiment.ratio({"a": 90, "b": 110}, {"a": 100.0, "b": 100.0}, "sessions"))


def test_nothing_known_is_no_picture() -> None:
    """An empty picture would say that there is nothing; there is nothing known."""
    unknown = {"a": grown([-np.inf], [np.inf])}
    none = {"gpu": 0.0, "cpu": 0.0, "pool": 0.0, "computed": 0.0}

    assert experiment.growth(unknown, baseline="b", margin=0.05, what="x") is None
    assert experiment.distributions({"a": (np.empty(0), np.empty(0))}) is None
    assert experiment.sources({"a": none}) is None
    assert experiment.ratio({"a": 0, "b": 0}, {"a": 0.0, "b": 0.0}, "slots") is None


def test_curves_are_thinned_and_weighted() -> None:
    """A curve ends at 1, and a request that stands for nine moves it by nine."""
    values, shares = experiment.curve_of(np.array([2.0, 1.0]), np.array([9.0, 1.0]))
    many, _ = experiment.curve_of(np.arange(5000.0), np.ones(5000))

    assert values.tolist() == [1.0, 2.0]
    assert shares.tolist() == [0.1, 1.0]
    assert len(many) <= 400
    assert many[-1] == 4999.0
