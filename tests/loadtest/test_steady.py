"""Constant load: what counts in a window, and that the simulator keeps the load constant."""

from __future__ import annotations

from msgspec.structs import replace

from loadtest.generated import Agents
from loadtest.results import TurnResult
from loadtest.simulator import Setup, simulate
from loadtest.steady import steady
from loadtest.workload import Turn, Workload
from policies import create


def turn(session_id: str, number: int) -> Turn:
    return Turn(
        session_id=session_id, number=number, arrival_s=0.0, num_input_tokens=10,
        num_output_tokens=1, hash_ids=(1,),
    )  # fmt: skip


def result(
    session_id: str, number: int, start_s: float, ttft_s: float, total_s: float
) -> TurnResult:
    return TurnResult(
        session_id=session_id, number=number, start_s=start_s, ttft_s=ttft_s, total_s=total_s,
        num_prompt_tokens=100, num_cached_tokens=60, num_output_tokens=10,
    )  # fmt: skip


def test_turns_count_where_they_end_and_waits_where_they_begin() -> None:
    """A window of 10 s, with turns that cross either of its ends."""
    turns = [turn("a", 0), turn("a", 1), turn("b", 0), turn("b", 1)]
    workload = Workload(name="w", block_size=16, turns=tuple(turns))
    results = [
        result("a", 0, start_s=1.0, ttft_s=8.0, total_s=11.0),  # ends in it
        result("a", 1, start_s=13.0, ttft_s=1.0, total_s=2.0),
        result("b", 0, start_s=14.0, ttft_s=3.0, total_s=7.0),  # is sent in it
        replace(result("b", 1, start_s=15.0, ttft_s=9.0, total_s=9.0), error="broken"),
    ]

    found = steady(results, workload, 10.0, 20.0)

    assert (found.num_turns, found.num_errors) == (2, 1)
    assert (found.output_per_s, found.turns_per_s) == (2.0, 0.2)
    assert (found.num_computed_tokens, found.hits) == (80, 0.6)
    assert (found.ttft_p50_s, found.longest_wait_s) == (3.0, 9.0)
    assert (found.num_sessions, found.session_mean_s) == (1, 14.0)


def test_a_simulation_keeps_the_number_of_sessions() -> None:
    """Where waits are short, all but a few of the live sessions have a turn in flight or pause."""
    asked = Agents(num_live=6, span_s=120.0, num_turns=3, scale_tokens=0.1, sub_agent_share=0.0)
    workload = asked.workload()
    setup = Setup(num_replicas=2, load=None, loop="closed", stop_s=120.0)

    found = simulate(workload, create("least_loaded"), setup)
    spans: dict[str, list[float]] = {}
    for each in found.run.turns:
        span = spans.setdefault(each.session_id, [each.start_s, 0.0])
        span[1] = each.start_s + each.total_s

    assert max(each.start_s for each in found.run.turns) < 120.0
    for at_s in range(15, 120, 5):
        assert sum(begin_s <= at_s < end_s for begin_s, end_s in spans.values()) <= 6
    assert steady(found.run.turns, workload, 20.0, 120.0).num_sessions > 6
