"""Every check passes on a clean comparison, and warns about exactly what it is for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from loadtest.compare.hygiene import QUESTIONS, Check
from loadtest.compare.report import make_report
from loadtest.compare.setting import Setting, make_order
from loadtest.results import Run
from tests.loadtest.compare.samples import TTFTS, made_run, made_runs, made_setting, made_turns
from tests.loadtest.statistics.samples import run, turn

SETTING = made_setting()
RUNS = made_runs(SETTING, TTFTS)


def checks(setting: Setting, runs: Sequence[Run]) -> dict[str, Check]:
    return {check.name: check for check in make_report(setting, runs).checks}


def warned(setting: Setting, runs: Sequence[Run]) -> set[str]:
    return {name for name, found in checks(setting, runs).items() if found.outcome == "warned"}


def test_a_clean_comparison_passes_every_check() -> None:
    """And every check has a figure."""
    found = checks(SETTING, RUNS)

    assert list(found) == list(QUESTIONS)
    assert {check.outcome for check in found.values()} == {"passed"}
    assert all(check.figure for check in found.values())


def changed(position: int, **fields: object) -> list[Run]:
    """Change the turns of one run."""
    runs = list(RUNS)
    turns = tuple(replace(t, **fields) for t in runs[position].turns)
    runs[position] = replace(runs[position], turns=turns)
    return runs


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("same tokens", changed(1, num_prompt_tokens=1001)),
        ("same tokens", changed(1, num_output_tokens=21)),
        ("cold caches", changed(0, num_cached_tokens=500)),
        ("driver on time", changed(2, late_s=0.2)),
    ],
)
def test_what_one_run_did_otherwise_is_noticed(name: str, runs: list[Run]) -> None:
    """Exactly the check for it warns."""
    assert warned(SETTING, runs) == {name}


def test_a_prompt_that_was_overtaken_says_nothing_of_cold_caches() -> None:
    """It was sent first, and another one, answered before it, left it something."""
    first, *others = RUNS[0].turns
    slow = replace(first, ttft_s=5.0, num_cached_tokens=900)
    runs = [replace(RUNS[0], turns=(slow, *others)), *RUNS[1:]]

    assert "cold caches" not in warned(SETTING, runs)


def test_lateness_that_is_little_beside_the_times_blurs_nothing() -> None:
    """200 ms late where first tokens take ten seconds."""
    runs = [replace(r, turns=tuple(replace(t, late_s=0.2, ttft_s=10.0) for t in r.turns))
            for r in RUNS]  # fmt: skip

    assert "driver on time" not in warned(SETTING, runs)


def test_missing_and_partial_runs_are_noticed() -> None:
    """A run that never began, and one whose target died."""
    died = made_run(
        SETTING.order[1][1], 2, turns=made_turns(0.1, SETTING.order[1][1])[:40],
        is_complete=False, note="the target is gone", position=3,
    )  # fmt: skip

    assert "all runs done" in warned(SETTING, RUNS[:3])
    found = checks(SETTING, [*RUNS[:3], died])
    assert found["all runs done"].outcome == "warned"
    assert "the target is gone" in found["all runs done"].meaning
    assert found["turns in common"].outcome == "warned"
    assert found["turns in common"].figure.startswith("32 of 144 turns")


def test_errors_are_counted_by_arm_and_kind() -> None:
    """And the turns that are not compared for them."""
    failed = list(RUNS[0].turns)
    failed[0] = turn("s0", 0, error="http_503", start_s=0.0)
    runs = [replace(RUNS[0], turns=tuple(failed)), *RUNS[1:]]

    found = checks(SETTING, runs)["no errors"]

    assert found.outcome == "warned"
    assert found.figure == "1 of 288 turns failed"
    assert found.meaning == f"{RUNS[0].info.label}: 1 http_503"


def test_one_round_is_no_repetition() -> None:
    """How far an arm differs from itself is unknown then."""
    setting = made_setting(num_rounds=1)

    assert warned(setting, made_runs(setting, TTFTS)) == {"repetitions"}


def test_drift_within_runs_is_noticed() -> None:
    """The times of one variant grow within each run."""
    growing = [
        replace(r, turns=tuple(replace(t, ttft_s=0.1 * (1 + t.start_s)) for t in r.turns))
        if r.info.label == "kv_aware" else r
        for r in RUNS
    ]  # fmt: skip

    assert warned(SETTING, growing) == {"drift within runs"}


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 6])
def test_rounds_come_in_mirrored_pairs(num_rounds: int) -> None:
    """Every round has every variant once, and the second of a pair reverses the first."""
    order = make_order(["a", "b", "c"], num_rounds, seed=1)

    assert len(order) == num_rounds
    assert all(sorted(labels) == ["a", "b", "c"] for labels in order)
    for first, second in zip(order[::2], order[1::2], strict=False):
        assert second == first[::-1]


def test_same_bytes_on_caches_that_are_shared_are_noticed() -> None:
    """Salts must differ where runs follow one another on the same caches."""
    shared = [
        made_run(r.info.label, r.info.round, position=i, shares_caches=True)
        for i, r in enumerate(RUNS)
    ]
    salted = [
        replace(r, info=replace(r.info, settings={**r.info.settings, "salt": str(i)}))
        for i, r in enumerate(shared)
    ]

    assert "unseen bytes" in warned(SETTING, shared)
    assert "unseen bytes" not in warned(SETTING, salted)


def test_few_sessions_and_no_slo_are_said() -> None:
    """Both limit what the report can say."""
    setting = made_setting(slo_ttft_s=None)
    few = [
        made_run(r.info.label, r.info.round, position=i,
                 turns=made_turns(0.1, r.info.label, num_sessions=6))
        for i, r in enumerate(RUNS)
    ]  # fmt: skip

    assert warned(setting, few) == {"sessions", "SLO stated"}


def test_what_does_not_apply_to_simulations_is_said_so() -> None:
    """A simulation has no driver and no bytes."""
    setting = made_setting(place="simulated")
    runs = [run(r.info.label, r.turns, round=r.info.round) for r in RUNS]

    found = checks(setting, runs)

    skipped = {name for name, check in found.items() if check.outcome == "does not apply"}
    assert skipped == {"unseen bytes", "driver on time"}


def test_nothing_at_all_is_checked_too() -> None:
    """No turns: warnings, not a crash."""
    empty = [made_run(r.info.label, r.info.round, turns=[], is_complete=False) for r in RUNS]

    assert {"all runs done", "turns in common"} <= warned(SETTING, empty)
