from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.studies.cells import Cell
from loadtest.studies.terms import VARIANTS, Ablated, ablate, ablate_on, main, report
from loadtest.traces import read_workload
from policies import Snapshot
from policies.cost import KvAware, candidate_costs
from tests.policies.snapshots import replica, snapshot

WHOLE, NO_PRICE, NO_SESSIONS, NO_BUSY, NO_MARGIN = VARIANTS


def others_ms(name: str, given: Snapshot) -> list[float]:
    return [cost.others_ms for cost in VARIANTS[name].decide(given).costs]


def test_each_variant_lacks_its_term_alone() -> None:
    """What a request costs others, by the variant and by the formula without the term."""
    given = snapshot(
        replica("a", busy=0.5, queue_ms=100.0),
        replica("b", busy=0.8, queue_ms=100.0),
        arrivals_per_s=4.0,
        sessions=(1, 3),
    )
    whole = others_ms(WHOLE, given)

    assert whole == [cost.others_ms for cost in candidate_costs(given, KvAware().alpha)]
    assert others_ms(NO_PRICE, given) == [0.0, 0.0]
    assert others_ms(NO_SESSIONS, given) == pytest.approx([2.0 * whole[0], whole[1] / 1.5])
    assert others_ms(NO_BUSY, given) == pytest.approx([0.5 * whole[0], 0.2 * whole[1]])
    assert others_ms(NO_MARGIN, given) == whole  # nothing is read


def test_a_small_cell_is_simulated_under_each() -> None:
    """The whole policy is what the others are held against."""
    found = ablate([Cell(working_set=0.2)], [1])

    assert [each.variant for each in found] == list(VARIANTS)
    assert {each.where for each in found} == {"0.2, small"}
    assert (found[0].recomputed_ratio, found[0].ttft_ratio) == (1.0, 1.0)
    assert all(each.ttft_ratio > 0.0 for each in found)


def test_a_row_for_each_cell() -> None:
    """Ratios of recomputed tokens and mean times; the whole policy has no column."""
    found = [
        Ablated(variant=name, where="trace, load 0.9", recomputed_ratio=1.25, ttft_ratio=0.5)
        for name in VARIANTS
    ]

    text = report(found)

    assert "| trace, load 0.9 | 1.25, 0.50 | 1.25, 0.50 | 1.25, 0.50 | 1.25, 0.50 |" in text


def test_a_trace_is_simulated_under_each() -> None:
    """At each load, against the whole policy at that load."""
    trace = read_workload(Path("tests/data/mooncake_extract.jsonl"), max_requests=20)

    found = ablate_on(trace, [0.5, 1.0])

    assert [each.where for each in found[:: len(VARIANTS)]] == [
        "trace, load 0.5",
        "trace, load 1",
    ]
    assert [each.ttft_ratio for each in found[:: len(VARIANTS)]] == [1.0, 1.0]


@pytest.mark.parametrize("words", [["--working-set", "0"], ["--trace", "/nowhere"]])
def test_what_makes_no_sense_is_refused(words: list[str]) -> None:
    """A command line that asks for nothing possible ends with a usage error."""
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
