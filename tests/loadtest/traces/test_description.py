"""Figures of workloads, against published ones and against a second way of counting.

`tests/data/mooncake_extract.jsonl` is 58 lines of kvcache-ai/Mooncake's conversation_trace.jsonl
(Apache-2.0): six sessions of 5 to 14 turns and twenty single requests.

Sessions derived from shared blocks.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadtest.traces import describe, read_workload, sessions_of
from loadtest.traces.description import lru_hit_ratio, table_of
from loadtest.traces.request import Draft
from loadtest.workload import Turn, Workload

EXTRACT = Path(__file__).parents[2] / "data" / "mooncake_extract.jsonl"
TRACE = os.environ.get("MOONCAKE_CONVERSATION_TRACE", "")


def test_an_extract_has_its_known_figures() -> None:
    """Ideal and LRU hit ratios as a list that is searched and cut counts them."""
    figures = describe(read_workload(EXTRACT), capacities=[10, 100, 300, 1000])

    assert figures.num_requests == 58
    assert figures.num_sessions == 26
    assert figures.input_tokens.mean == pytest.approx(825_918 / 58)
    assert figures.ideal_hit_ratio == pytest.approx(0.499653, abs=1e-6)
    assert figures.lru_hit_ratios == {
        10: pytest.approx(0.066951, abs=1e-6),
        100: pytest.approx(0.372570, abs=1e-6),
        300: pytest.approx(0.468657, abs=1e-6),
        1000: pytest.approx(0.499653, abs=1e-6),
    }


@pytest.mark.skipif(not TRACE, reason="MOONCAKE_CONVERSATION_TRACE names no file")
def test_the_conversation_trace_has_its_published_figures() -> None:
    """Within half a point: ideal 37.4 %, and what LRU caches of several sizes keep of it."""
    figures = describe(read_workload(Path(TRACE)))

    assert (figures.num_requests, figures.num_sessions) == (12_031, 7_373)
    assert figures.span_s == pytest.approx(3_537, abs=1)
    assert (figures.input_tokens.p50, figures.output_tokens.p50) == (6_909, 350)
    assert figures.input_per_output == pytest.approx(35, abs=0.5)
    assert figures.ideal_hit_ratio == pytest.approx(0.374, abs=0.005)
    published = {
        1_000: 0.045,
        5_859: 0.139,
        10_000: 0.216,
        30_000: 0.332,
        50_000: 0.362,
        100_000: 0.371,
    }
    assert figures.lru_hit_ratios == {
        size: pytest.approx(ratio, abs=0.005) for size, ratio in published.items()
    }


prompts = st.lists(
    st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True), min_size=1, max_size=25
)


@given(prompts, st.integers(1, 8))
def test_lru_agrees_with_a_list(prompts: list[list[int]], capacity: int) -> None:
    """Leading blocks in the cache are hits; the first block of a prompt is kept longest."""
    turns = tuple(
        Turn(
            session_id=str(n), number=0, arrival_s=float(n), num_input_tokens=10 * len(ids),
            num_output_tokens=1, hash_ids=tuple(ids),
        )
        for n, ids in enumerate(prompts)
    )  # fmt: skip
    cache: list[int] = []
    num_hits = 0
    for ids in prompts:
        held = [block in cache for block in ids]
        num_hits += held.index(False) if False in held else len(held)
        cache = [block for block in cache if block not in ids] + ids[::-1]
        cache = cache[-capacity:]

    ratio = lru_hit_ratio(Workload(name="", block_size=10, turns=turns), capacity)

    assert ratio == pytest.approx(num_hits / sum(map(len, prompts)))


def test_a_partial_block_counts_its_tokens() -> None:
    """A repeated prompt of 15 tokens is a hit of 15, not of two blocks of ten."""
    turn = Turn(
        session_id="a", number=0, arrival_s=0.0, num_input_tokens=15, num_output_tokens=1,
        hash_ids=(1, 2),
    )  # fmt: skip

    assert lru_hit_ratio(Workload(name="", block_size=10, turns=(turn, turn)), None) == 0.5


def test_a_description_is_laid_out(tmp_path: Path) -> None:
    """Every figure has a row; what does not apply has none."""
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    workload = read_workload(EXTRACT)

    console.print(table_of(describe(workload)))

    shown = console.export_text()
    assert "mooncake_extract.jsonl" in shown
    assert "ideal hit, of tokens" in shown
    assert "50.0 %" in shown
    assert "LRU of 5,859 blocks" in shown
    assert "context at turn 30" not in shown
    console.file.close()


def request(*hash_ids: int) -> Draft:
    return Draft(
        timestamp_ms=0.0, num_input_tokens=512, num_output_tokens=1, hash_ids=tuple(hash_ids)
    )


def test_sessions_are_joined_by_rare_blocks() -> None:
    """The shared system block joins no sessions; a conversation's own blocks do."""
    trace = [request(0, 1000 + n % 60, 2000 + n) for n in range(360)]

    sessions = sessions_of(trace)

    assert sessions == [n % 60 for n in range(360)]


def test_few_requests_may_all_be_one_conversation() -> None:
    """In a short trace even a block that all have may be one conversation's own."""
    trace = [request(0, n) for n in range(1, 48)]

    assert set(sessions_of(trace)) == {0}
    assert len(set(sessions_of([*trace, trace[0]]))) == 47
