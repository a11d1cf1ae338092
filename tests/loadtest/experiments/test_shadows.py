"""loadtest.experiments.shadows: what others would have done, from the records."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from loadtest.experiments import load, make_report
from loadtest.experiments.shadows import summarize
from tests.loadtest.experiments.samples import Scene, records, write


def test_shadows_are_summed_by_live_policy(tmp_path: Path) -> None:
    """Means, agreement and regret are those of the records."""
    made = records(Scene(num_sessions=60, shadows=("min_ttft", "kv_aware")))

    found = summarize(load([str(write(tmp_path / "r.jsonl", made))]))

    pairs = product(("min_ttft", "kv_aware"), ("least_loaded", "kv_aware"))
    assert {(s.policy, s.live) for s in found} == set(pairs)
    one = next(s for s in found if (s.policy, s.live) == ("min_ttft", "least_loaded"))
    own = [(r, r.shadows[0]) for r in made if r.policy == "least_loaded"]
    regrets = [shadow.regret_ms for _, shadow in own]
    assert one.num_decisions == len(own)
    assert one.agreement == pytest.approx(np.mean([shadow.agrees for _, shadow in own]))
    assert one.regret_ms == pytest.approx(np.mean(regrets))
    assert one.regret_ms == pytest.approx(one.gained_ms - one.lost_ms)
    assert one.regret_ms == pytest.approx(one.live_ttft_ms - one.ttft_ms)
    assert one.regret_quantiles["p90"] == pytest.approx(np.quantile(regrets, 0.9))
    assert one.lost_ms == pytest.approx(0.0)  # nothing is sooner than the soonest
    assert one.live_uncached_tokens == pytest.approx(
        np.mean([r.num_prompt_tokens - r.num_predicted_cached_tokens for r, _ in own])
    )
    same = next(s for s in found if s.policy == s.live)
    assert same.agreement == 1.0
    assert same.live_fetched_tokens == pytest.approx(same.fetched_tokens)


def test_shadows_need_no_experiment(tmp_path: Path) -> None:
    """Shadow first: a report without an experiment has shadows, and no verdict."""
    from msgspec.structs import replace

    made = [
        replace(r, assignment=None) for r in records(Scene(num_sessions=20, shadows=("random",)))
    ]

    report, _ = make_report(load([str(write(tmp_path / "r.jsonl", made))]))

    assert report.experiment is None
    assert report.verdicts == ()
    assert [s.policy for s in report.shadows] == ["random", "random"]
    assert report.findings[0].code == "no_experiment"
