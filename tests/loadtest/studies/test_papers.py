from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.studies import papers
from loadtest.studies.papers import (
    DATA_SETS,
    FLEETS,
    Agents,
    DataSet,
    Fleet,
    Paced,
    Scaled,
    best_rate,
    datasets_report,
    limits_s,
    main,
    paced,
    scale,
    scaling_report,
    trace_report,
)
from loadtest.traces import read_workload

EXTRACT = Path("tests/data/mooncake_extract.jsonl")
FEW = DataSet(
    name="few", num_input_tokens=4_000, num_output_tokens=8, cached_ratio=0.5, published="+1 %"
)


def test_agents_grow_as_the_blog_says() -> None:
    """A common prompt, then each turn's tokens and the answers before."""
    turns = Agents(num_sessions=2, num_turns=3).workload().turns

    ours = [turn for turn in turns if turn.session_id == "s1"]
    assert [turn.num_input_tokens for turn in ours] == [30_000, 32_948, 35_896]
    common = {turn.hash_ids[:19] for turn in turns}
    assert len(common) == 1
    assert len({turn.hash_ids[19:25] for turn in turns}) == 2


def test_a_fleet_of_halves_serves_agents() -> None:
    """Twice the halves have about twice the tokens: they wait for their answers, not for room."""
    small, large = (
        scale("round_robin", num, Agents(num_sessions=4 * num, num_turns=4)) for num in (1, 2)
    )

    assert large.tokens_per_s == pytest.approx(2.0 * small.tokens_per_s, rel=0.3)
    assert 30.0 < small.tbt_p50_ms < 39.0
    assert small.hit_ratio > 0.5


def test_prompts_of_a_data_set_share_documents_or_nothing() -> None:
    """So many of their tokens begin another prompt, too."""
    shared, alone = (
        FEW.workload(1.0, 40, is_shared=is_shared).turns for is_shared in (True, False)
    )

    assert len({turn.hash_ids[0] for turn in shared}) <= 20
    assert len({turn.hash_ids[0] for turn in alone}) == len(alone)
    assert {turn.num_input_tokens for turn in (*shared, *alone)} == {4_000}


def test_the_best_rate_is_the_highest_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found to a few percent, wherever it lies; 0 where even an idle fleet is too slow."""

    def p90s(given: DataSet, fleet: Fleet, rate: float, num: int) -> tuple[float, float]:
        return rate, 0.1

    monkeypatch.setattr(papers, "p90s", p90s)

    for most in (0.01, 3.0):
        assert 0.9 * most <= best_rate(FEW, FLEETS[0], (most, 1.0)) <= most
    assert best_rate(FEW, FLEETS[0], (1.0, 0.05)) == 0.0


def test_limits_are_multiples_of_an_idle_fleets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times its first token, five times its time between tokens."""
    monkeypatch.setattr(papers, "_NUM_REQUESTS", (5, 5))

    ttft_s, tbt_s = limits_s(FEW)

    idle = papers.p90s(FEW, FLEETS[0], 0.001, 5)
    assert (ttft_s, tbt_s) == pytest.approx((10 * idle[0], 5 * idle[1]))


def test_a_trace_at_a_pace() -> None:
    """Shares of its requests; both limits at once are held by no more than either."""
    given = read_workload(EXTRACT, max_requests=20)
    name, policy, setup = papers._TRACE_FLEETS[-1]

    found = paced(given, name, policy, setup, 2.0)

    assert 0.0 < found.both_ratio <= min(found.ttft_ratio, found.tbt_ratio) <= 1.0


def test_tables_stand_beside_what_was_published() -> None:
    """Rows of every part."""
    sizes = [
        Scaled(policy="round_robin", num_each=num, tokens_per_s=1e5 * num, ttft_p50_s=0.3,
               tbt_p50_ms=38.0, hit_ratio=0.95, pool_ratio=0.5)
        for num in (1, 5)
    ]  # fmt: skip
    paces = [
        Paced(fleet="20 whole", pace=pace, ttft_ratio=1.0, tbt_ratio=0.5, both_ratio=0.5)
        for pace in (1.0, 2.0)
    ]

    assert "| 5P5D, 60 | 656k, 4.79; 2.2 s; 42 ms | 500k, 5.00; 0.30 s; 38 ms;" in scaling_report(
        sizes
    )
    rates = datasets_report([(DATA_SETS[0], [2.0] * (len(FLEETS) - 1) + [3.0])])
    assert "| ArXiv Summarization | +20 % | 2.00 | 2.00, +0% |" in rates
    assert "| 3.00, +50% |" in rates
    assert "| 20 whole | 100%, 50%, 50% | 100%, 50%, 50% |" in trace_report(paces)


def test_the_command_prints_the_parts_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a trace, those that need none."""
    monkeypatch.setattr(papers, "scaling", lambda step: "sizes")
    monkeypatch.setattr(papers, "datasets", lambda step: "rates")
    monkeypatch.setattr(papers, "trace", lambda path, step: f"trace of {path.name}")

    assert main([]) == 0
    assert capsys.readouterr().out == "sizes\n\nrates\n"
    assert main(["--part", "trace", "--trace", str(EXTRACT)]) == 0
    assert capsys.readouterr().out == f"trace of {EXTRACT.name}\n"


@pytest.mark.parametrize("words", [["--part", "trace"], ["--part", "nonsense"], ["--trace", "/no"]])
def test_what_makes_no_sense_is_refused(words: list[str]) -> None:
    """A command line that asks for nothing possible ends with a usage error."""
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
