"""router.replicas.step_fit: the time between tokens, from what engines report."""

from __future__ import annotations

import random

import pytest

from router.replicas.step_fit import StepFit


def test_base_requests_and_context_are_told_apart() -> None:
    rng, fit = random.Random(1), StepFit()

    for _ in range(200):
        running, tokens = rng.randrange(1, 60), rng.randrange(0, 400_000)
        tbt_ms = 8.0 + 0.1 * running + 50.0 * tokens / 1e6
        fit.observe(running, tokens, tbt_ms * rng.uniform(0.9, 1.1))

    assert fit.predict_ms(1, 0) == pytest.approx(8.1, rel=0.1)
    assert fit.predict_ms(50, 300_000) == pytest.approx(28.0, rel=0.1)


def test_little_is_no_prediction_and_nonsense_is_none() -> None:
    fit = StepFit()

    for tbt_ms in (float("nan"), float("inf"), 0.0, -1.0):
        for _ in range(10):
            fit.observe(1, 1, tbt_ms)
    for _ in range(10):
        fit.observe(0, 0, 5.0)
    for _ in range(7):
        fit.observe(2, 100, 5.0)
    assert fit.predict_ms(2, 100) is None
    fit.observe(2, 100, 5.0)
    assert fit.predict_ms(2, 100) == pytest.approx(5.0, rel=0.01)


def test_no_load_makes_tokens_come_sooner() -> None:
    fit = StepFit()

    for running in range(1, 40):
        fit.observe(running, 1_000 * running, 50.0 - running)
    assert (fit.predict_ms(60, 60_000) or 0.0) >= (fit.predict_ms(1, 1_000) or 0.0) > 0.0
