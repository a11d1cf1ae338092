"""Each picture is drawn from what there is, and what is not there is not drawn."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from loadtest import pictures
from loadtest.compare.report import imbalance
from loadtest.pictures.forest import scaled
from loadtest.pictures.origins import short
from loadtest.results import Predicted, TurnResult
from loadtest.statistics import MEASURES, Comparison, Round, compare
from tests.loadtest.statistics.samples import session_turns, turn


def made_arms() -> dict[str, list[list[TurnResult]]]:
    return {
        label: [
            [
                turn(
                    f"s{s}", start_s=s / 4, ttft_s=ttft_s * (1 + s % 5),
                    replica=f"r{s % 2}",
                    predicted=Predicted(gpu=500, pool=200),
                )
                for s in range(60)
            ]
            for _ in range(2)
        ]
        for label, ttft_s in (("kv_aware", 0.1), ("other", 8.0))
    }  # fmt: skip


def is_picture(svg: bytes | None) -> bool:
    return svg is not None and ElementTree.fromstring(svg).tag.endswith("svg")


def test_all_are_drawn() -> None:
    """Two variants with two rounds each."""
    arms = made_arms()

    assert is_picture(pictures.origins(arms))


def test_what_was_not_reported_is_not_drawn() -> None:
    """All turns failed, or there are none: no picture rather than an empty one."""
    for turns in ([turn("a", error="connect")], []):
        arms = {"a": [turns], "b": []}
        assert pictures.origins(arms) is None
    assert pictures.forest([]) is None


def test_an_arm_without_results_does_not_spoil_the_others() -> None:
    """A target that never answered leaves its place empty."""
    arms = {**made_arms(), "dead": [[turn("s0", error="connect")]]}

    assert is_picture(pictures.origins(arms))


def test_tokens_are_split_by_engine_and_router() -> None:
    """Cached tokens are the engine's word, tiers the router's; the rest is not guessed."""
    turns = [
        turn("a", prompt=1000, cached=800, predicted=Predicted(gpu=500, cpu=100, pool=150)),
        turn("b", prompt=1000, cached=300, predicted=Predicted(gpu=500)),  # predicted too much
        turn("c", prompt=1000, cached=400),
        turn("d", cached=None),
        turn("e", error="timeout"),
    ]

    found = pictures.origin(turns)

    assert found == pictures.Origin(
        num_turns=3, gpu=800, cpu=100, pool=150, unknown=450, computed=1500
    )
    assert found.total == 3000


def test_the_busiest_replica_is_held_against_the_mean() -> None:
    """By computed tokens, or by requests where engines do not report them."""
    turns = [turn("a", cached=0, replica="r1"), turn("b", cached=500, replica="r2")]
    silent = [turn(f"s{i}", cached=None, replica="r1" if i else "r2") for i in range(4)]

    assert imbalance(turns) == pytest.approx(1000 / 750)
    assert imbalance(silent) == 1.5
    assert imbalance([]) == 1.0


def made_comparison(name: str, factor: float) -> Comparison:
    rounds = [Round(ours=session_turns(0.1 * factor), theirs=session_turns(0.1))] * 2
    found = compare(MEASURES[name], "other", "kv_aware", rounds)
    assert found is not None
    return found


def test_comparisons_are_drawn_as_ratios() -> None:
    """Differences of percentiles are drawn in units of the baseline's."""
    ratio, difference = made_comparison("mean TTFT", 2.0), made_comparison("TTFT P90", 2.0)

    assert scaled(ratio, ratio.effect) == pytest.approx(2.0)
    assert scaled(difference, difference.effect) == pytest.approx(2.0)
    assert scaled(difference, -100.0) == 0.02
    assert is_picture(pictures.forest([ratio, difference, made_comparison("mean turn", 1.0)]))


def test_counts_are_short() -> None:
    """Three digits or so."""
    assert [short(n) for n in (812, 12_345, 412_000, 1_430_000)] == [
        "812",
        "12.3K",
        "412K",
        "1.43M",
    ]
