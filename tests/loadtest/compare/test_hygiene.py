"""Every check passes on a clean comparison, and warns about exactly what it is for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from loadtest.compare.hygiene import QUESTIONS, Check
from loadtest.results import Run
from tests.loadtest.compare.samples import changed, cut, made_runs, report_of
from tests.loadtest.statistics.samples import run, turn

RUNS = made_runs()


def checks(runs: Sequence[Run], **slo: float | None) -> dict[str, Check]:
    return {check.name: check for check in report_of(runs, **slo).checks}


def warned(runs: Sequence[Run], **slo: float | None) -> set[str]:
    return {name for name, found in checks(runs, **slo).items() if found.outcome == "warned"}


def test_a_clean_comparison_passes_every_check() -> None:
    """And every check has a figure."""
    found = checks(RUNS)

    assert list(found) == list(QUESTIONS)
    assert {check.outcome for check in found.values()} == {"passed"}
    assert all(check.figure for check in found.values())


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("same tokens", changed(RUNS, 1, num_prompt_tokens=1001)),
        ("same tokens", changed(RUNS, 1, num_output_tokens=21)),
        ("cold caches", changed(RUNS, 0, num_cached_tokens=500)),
        ("driver on time", changed(RUNS, 2, late_s=0.2)),
        ("repetitions", made_runs(num_rounds=1)),
        ("sessions", made_runs(num_sessions=6)),
        (
            "unseen bytes",
            [replace(r, info=replace(r.info, settings={"salt": "one"})) for r in RUNS],
        ),
    ],
)
def test_what_runs_did_otherwise_is_noticed(name: str, runs: list[Run]) -> None:
    """Exactly the check for it warns."""
    assert warned(runs) == {name}


def test_no_slo_is_said() -> None:
    """There is no goodput without one."""
    assert warned(RUNS, slo_ttft_s=None) == {"SLO stated"}


def test_a_prompt_that_was_overtaken_says_nothing_of_cold_caches() -> None:
    """It was sent first, and another one, answered before it, left it something."""
    first, *others = RUNS[0].turns
    slow = replace(first, ttft_s=5.0, num_cached_tokens=900)

    assert "cold caches" not in warned([replace(RUNS[0], turns=(slow, *others)), *RUNS[1:]])


def test_lateness_that_is_little_beside_the_times_blurs_nothing() -> None:
    """200 ms late where first tokens take ten seconds."""
    assert "driver on time" not in warned(changed(RUNS, late_s=0.2, ttft_s=10.0))


def test_missing_and_partial_runs_are_noticed() -> None:
    """A run that is not there, and one whose target died."""
    missing = checks(RUNS[:3])["all runs done"]
    assert (missing.figure, missing.outcome) == ("3 of 4 runs complete", "warned")
    assert missing.meaning == "least_loaded: 1 of 2 runs"

    found = checks([*RUNS[:3], cut(RUNS[3], 40, "the target is gone")])

    assert found["all runs done"].outcome == "warned"
    assert "the target is gone" in found["all runs done"].meaning
    assert found["turns in common"].outcome == "warned"
    assert found["turns in common"].figure.startswith("32 of 144 turns")


def test_errors_are_counted_by_arm_and_kind() -> None:
    """And the turns that are not compared for them."""
    failed = (turn("s0", 0, error="http_503", start_s=0.0), *RUNS[0].turns[1:])

    found = checks([replace(RUNS[0], turns=failed), *RUNS[1:]])["no errors"]

    assert found.outcome == "warned"
    assert found.figure == "1 of 288 turns failed"
    assert found.meaning == "kv_aware: 1 http_503"


def test_drift_within_runs_is_noticed() -> None:
    """The times of one variant grow within each run."""
    growing = [
        replace(r, turns=tuple(replace(t, ttft_s=0.1 * (1 + t.start_s)) for t in r.turns))
        if r.info.label == "kv_aware" else r
        for r in RUNS
    ]  # fmt: skip

    assert warned(growing) == {"drift within runs"}


def test_what_does_not_apply_to_simulations_is_said_so() -> None:
    """A simulation has no driver and no bytes."""
    found = checks([run(r.info.label, r.turns, round=r.info.round) for r in RUNS])

    skipped = {name for name, check in found.items() if check.outcome == "does not apply"}
    assert skipped == {"unseen bytes", "driver on time"}
