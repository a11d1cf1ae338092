from __future__ import annotations

from collections import OrderedDict

import pytest

from loadtest.simulator import published
from loadtest.simulator.published import HITS, LOADS, RULES, hit_percent, hit_verdict, order_verdict
from loadtest.workload import Workload
from tests.loadtest.simulator.workloads import SIZE, conversations


def counted_percent(workload: Workload, num_blocks: int) -> float:
    """Count LRU hits as on paper: leading blocks in a cache, a request at a time."""
    cache: OrderedDict[int, None] = OrderedDict()
    num_hit = 0
    for turn in workload.turns:
        num = 0
        for hash_id in turn.hash_ids:
            if hash_id not in cache:
                break
            num += 1
        num_hit += min(num * SIZE, turn.num_input_tokens)
        for hash_id in reversed(turn.hash_ids):
            cache[hash_id] = None
            cache.move_to_end(hash_id)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return 100 * num_hit / workload.num_input_tokens


@pytest.mark.parametrize("num_blocks", [150, 400, 10_000])
def test_hits_are_those_that_are_counted(num_blocks: int) -> None:
    """One replica has the hits of a plain LRU list, within the tolerance of the study."""
    given = conversations(80, seed=5)

    expected = counted_percent(given, num_blocks)

    assert 3.0 < expected < 80.0
    assert hit_percent(given, num_blocks) == pytest.approx(expected, abs=published.TOLERANCE)


def test_verdicts_can_fail() -> None:
    """A point too much, or two rules the wrong way round, is said."""
    ours = [[rule.fast_s] * len(LOADS) for rule in RULES]

    assert "within the tolerance" in hit_verdict(HITS)
    assert "NOT within" in hit_verdict({**HITS, 1000: 5.5})
    assert "order is the published one" in order_verdict(ours)
    assert "-14% in FAST'25; ours -14% at load 0.9" in order_verdict(ours)
    assert "NOT the published one" in order_verdict(ours[::-1])


def test_report_has_both_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published and simulated, side by side; the progress adds up."""
    monkeypatch.setattr(published, "HITS", {100: 1.0, 1000: 2.0})
    given = conversations(8)
    seen: list[int] = []

    text = published.report(given, seen.append)

    assert "| simulated |" in text
    assert "| KVCache-centric | 3.07 s | 6.26 s |" in text
    assert sum(seen) == published.num_turns_to_simulate(given)
