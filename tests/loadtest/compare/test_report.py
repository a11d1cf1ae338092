"""Figures, words, terminal and page of made-up comparisons."""

from __future__ import annotations

import io
from functools import cache

import pytest
from rich.console import Console

from loadtest.compare.report import Origin, Report, imbalance, origin
from loadtest.compare.shown import hit_ratio, lead, make_page, show
from loadtest.pages import render
from loadtest.results import Predicted
from tests.loadtest.compare.samples import TTFTS, changed, cut, made_runs, report_of
from tests.loadtest.statistics.samples import turn

RUNS = made_runs()


@cache
def whole() -> Report:
    """Make the report of all runs."""
    return report_of(RUNS)


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=140)
    show(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_arm_is_compared_with_the_baseline_by_every_measure() -> None:
    """Twice the time to first token is found as such; equal tokens are not a difference."""
    found = {c.measure: c for c in whole().comparisons}

    assert {(c.arm, c.baseline) for c in whole().comparisons} == {("least_loaded", "kv_aware")}
    assert round(found["mean TTFT"].effect, 6) == 2.0
    assert found["mean TTFT"].verdict == "more"
    assert found["computed tokens"].verdict == "within the spread"
    assert found["within SLO"].ours < 1.0
    assert whole().is_complete
    assert whole().num_errors == 0
    assert whole().arms[0].good_share == 1.0
    assert whole().arms[0].imbalance == 1.0


def test_a_single_round_gets_no_verdict() -> None:
    """However clear it looks: how far an arm differs from itself is unknown."""
    report = report_of(made_runs(num_rounds=1))

    assert {c.verdict for c in report.comparisons} == {"blurred"}
    assert "single round" in lead(report)


def test_late_drivers_take_verdicts_on_times_away() -> None:
    """Token counts keep theirs."""
    report = report_of(changed(RUNS, late_s=0.3))

    verdicts = {c.measure: c.verdict for c in report.comparisons}
    assert verdicts["mean TTFT"] == verdicts["TTFT P99"] == "blurred"
    assert verdicts["computed tokens"] == "within the spread"
    assert "no verdict (the driver was 300 ms late" in lead(report)


def test_the_lead_says_what_came_out() -> None:
    """In the sense of the figures."""
    assert "least_loaded takes 2.00 times as long" in lead(whole())
    equal = report_of(made_runs(dict.fromkeys(TTFTS, 0.1)))
    assert "does not differ by more than the spread" in lead(equal)
    less = report_of(made_runs({"kv_aware": 0.2, "least_loaded": 0.15}))
    assert "takes 25.0% less" in lead(less)


def test_a_dead_target_is_said_on_top_and_common_turns_are_compared() -> None:
    """What it did before it died is kept; how much is not compared is reported."""
    runs = [*RUNS[:3], cut(RUNS[3], 40, "the target is gone at 12.1 s")]

    report = report_of(runs)
    text = printed(report)

    assert not report.is_complete
    assert text.startswith("NOT COMPLETE: least_loaded, round 2: the target is gone at 12.1 s")
    assert "compared over the 112 turns that succeeded in both; 32 others are not" in " ".join(
        text.split()
    )
    assert "Not complete." in render(make_page(report))


def test_a_comparison_without_turns_in_common_says_so() -> None:
    """Every turn of the other variant failed."""
    runs = [cut(r, 0, "gone") if r.info.label == "least_loaded" else r for r in RUNS]
    report = report_of(runs)

    assert report.comparisons == ()
    assert "Nothing can be compared" in printed(report)
    assert "nothing to compare" in render(make_page(report))


def test_terminal_shows_arms_differences_and_checks() -> None:
    """In 140 columns."""
    text = printed(whole())

    assert "kv_aware *" in text
    assert "× 2.00" in text
    assert "cold caches" in text
    assert max(map(len, text.splitlines())) <= 140


def test_figures_are_held_against_the_limit() -> None:
    """Over the variant `unlimited`: twice the time to first token is 2.00 ×."""
    text = printed(report_of(made_runs({"kv_aware": 0.2, "unlimited": 0.1})))

    table = text.partition("variant over the limit")[2].splitlines()
    row = next(line for line in table if line.startswith("kv_aware"))
    assert row.split()[:6] == ["kv_aware", "1.00", "×", "2.00", "×", "2.00"]
    assert "variant over the limit" not in printed(whole())


def test_page_is_self_contained_and_has_every_check() -> None:
    html = render(make_page(whole()))

    assert "src=" not in html
    assert "href=" not in html
    for check in whole().checks:
        assert f"<td>{check.name}</td>" in html
    assert '<td class="bad">more</td>' in html


def test_prompt_tokens_are_split_by_engine_and_router() -> None:
    """Cached tokens are the engine's word, tiers the router's; the rest is not guessed."""
    turns = [
        turn("a", prompt=1000, cached=800, predicted=Predicted(gpu=500, cpu=100, pool=150)),
        turn("b", prompt=1000, cached=300, predicted=Predicted(gpu=500)),  # predicted too much
        turn("c", prompt=1000, cached=400),
        turn("d", cached=None),
        turn("e", error="timeout"),
    ]

    found = origin(turns)

    assert found == Origin(num_turns=3, gpu=800, cpu=100, pool=150, unknown=450, computed=1500)
    assert found.total == 3000


def test_the_busiest_replica_is_held_against_the_mean() -> None:
    """By computed tokens, or by requests where engines do not report them."""
    turns = [turn("a", cached=0, replica="r1"), turn("b", cached=500, replica="r2")]
    silent = [turn(f"s{i}", cached=None, replica="r1" if i else "r2") for i in range(4)]

    assert imbalance(turns) == pytest.approx(1000 / 750)
    assert imbalance(silent) == 1.5
    assert imbalance([]) == 1.0


def test_other_routers_that_report_nothing_are_listed() -> None:
    """No replica, no cached tokens, no prediction."""
    silent = changed(RUNS, replica=None, num_cached_tokens=None)

    report = report_of(silent)
    html = render(make_page(report))

    assert report.arms[0].imbalance is None
    assert hit_ratio(report.arms[0]) is None
    assert "computed tokens" not in {c.measure for c in report.comparisons}
    assert "computed tokens" not in html
