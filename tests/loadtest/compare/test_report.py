"""Figures, words, terminal and page of made-up comparisons."""

from __future__ import annotations

import io
import json
import re
import sys
from functools import cache
from html import unescape
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from loadtest.compare import answer
from loadtest.compare.page import make_page
from loadtest.compare.report import REPORT_SCHEMA, Report, make_report
from loadtest.compare.store import write_report
from loadtest.compare.terminal import show
from loadtest.pages import render
from router.base.extras import install_hint
from tests.loadtest.compare.samples import TTFTS, made_run, made_runs, made_setting, made_turns

SETTING = made_setting()
RUNS = made_runs(SETTING, TTFTS)


@cache
def whole() -> Report:
    """Make the report of all runs."""
    return make_report(SETTING, RUNS)


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
    setting = made_setting(num_rounds=1)

    report = make_report(setting, made_runs(setting, TTFTS))

    assert {c.verdict for c in report.comparisons} == {"blurred"}
    assert "single round" in answer.lead(report)


def test_late_drivers_take_verdicts_on_times_away() -> None:
    """Token counts keep theirs."""
    late = [replace(r, turns=tuple(replace(t, late_s=0.3) for t in r.turns)) for r in RUNS]

    report = make_report(SETTING, late)

    verdicts = {c.measure: c.verdict for c in report.comparisons}
    assert verdicts["mean TTFT"] == verdicts["TTFT P99"] == "blurred"
    assert verdicts["computed tokens"] == "within the spread"
    assert "no verdict (the driver was 300 ms late" in answer.lead(report)


def test_the_lead_says_what_came_out() -> None:
    """In the sense of the figures."""
    assert "least_loaded takes 2.00 times as long" in answer.lead(whole())
    equal = make_report(SETTING, made_runs(SETTING, dict.fromkeys(TTFTS, 0.1)))
    assert "does not differ by more than the spread" in answer.lead(equal)
    less = make_report(SETTING, made_runs(SETTING, {"kv_aware": 0.2, "least_loaded": 0.15}))
    assert "takes 25.0% less" in answer.lead(less)


def test_a_dead_target_is_said_on_top_and_common_turns_are_compared() -> None:
    """What it did before it died is kept; how much is not compared is reported."""
    label = SETTING.order[1][1]
    died = made_run(label, 2, turns=made_turns(TTFTS[label], label)[:40], is_complete=False,
                    note="the target is gone at 12.1 s", position=3)  # fmt: skip

    report = make_report(SETTING, [*RUNS[:3], died])
    text = printed(report)

    assert not report.is_complete
    assert text.startswith(f"NOT COMPLETE: {label}, round 2: the target is gone at 12.1 s")
    assert "compared over the 112 turns that succeeded in both; 32 others are not" in " ".join(
        text.split()
    )
    assert "Not complete." in render(make_page(report, [*RUNS[:3], died]))


def test_an_interrupted_comparison_says_so() -> None:
    """With one round done and another begun; even with one run."""
    report = make_report(SETTING, RUNS[:3], note="stopped by SIGINT after 3 of 4 runs")

    assert not report.is_complete
    assert "stopped by SIGINT" in printed(report).splitlines()[0]
    alone = make_report(SETTING, RUNS[:1], note="stopped")
    assert alone.comparisons == ()
    assert "Nothing can be compared" in printed(alone)
    assert "nothing to compare" in render(make_page(alone, RUNS[:1]))


def test_terminal_shows_arms_differences_and_checks() -> None:
    """In 140 columns."""
    text = printed(whole())

    assert "kv_aware *" in text
    assert "× 2.00" in text
    assert "cold caches" in text
    assert max(map(len, text.splitlines())) <= 140


def test_figures_are_held_against_the_limit() -> None:
    """Over the variant `unlimited`: twice the time to first token is 2.00 ×."""
    setting = made_setting(("kv_aware", "unlimited"))
    text = printed(make_report(setting, made_runs(setting, {"kv_aware": 0.2, "unlimited": 0.1})))

    table = text.partition("variant over the limit")[2].splitlines()
    row = next(line for line in table if line.startswith("kv_aware"))
    assert row.split()[:6] == ["kv_aware", "1.00", "×", "2.00", "×", "2.00"]
    assert "variant over the limit" not in printed(whole())


def test_json_says_its_version_and_reads_back(tmp_path: Path) -> None:
    """report.json is the report."""
    write_report(tmp_path, whole(), RUNS)

    text = (tmp_path / "report.json").read_text()
    assert json.loads(text)["schema"] == REPORT_SCHEMA
    assert msgspec.json.decode(text, type=Report) == whole()


def test_page_is_self_contained_and_has_all_pictures() -> None:
    """Three pictures, every check, every comparison."""
    html = render(make_page(whole(), RUNS))

    assert html.count("<figure>") == 3
    assert all(s.startswith("data:") for s in re.findall(r'(?:src|href)="([^"]*)"', html))
    for check in whole().checks:
        assert f"<td>{check.name}</td>" in html
    assert '<td class="bad">more</td>' in html


def test_page_without_matplotlib_says_how_to_get_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else is there."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    html = render(make_page(whole(), RUNS))

    assert install_hint("plots") in unescape(html)
    assert "<figure>" not in html


def test_other_routers_that_report_nothing_are_listed() -> None:
    """No replica, no cached tokens, no prediction: said, not drawn."""
    silent = [
        replace(r, turns=tuple(replace(t, replica=None, num_cached_tokens=None) for t in r.turns))
        for r in RUNS
    ]

    report = make_report(SETTING, silent)
    html = render(make_page(report, silent))

    assert report.arms[0].imbalance is None
    assert answer.hit_ratio(report.arms[0]) is None
    assert "computed tokens" not in {c.measure for c in report.comparisons}
    assert "No engine reported how many tokens were cached" in html
