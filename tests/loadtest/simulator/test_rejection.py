"""What is refused where halves are overloaded."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from loadtest.emulator.time_model import TimeModel
from loadtest.simulator import Halves, Setup, Simulated, simulate
from loadtest.simulator.setup import Rejection, RejectionRule
from loadtest.workload import Turn
from policies import create
from router.scheduling.queue import QueueRules
from tests.loadtest.simulator.workloads import turn, workload

SLOW = TimeModel(base_ms=10.0, ms_per_prefill_token=0.1, ms_per_decode=10.0)
SETUP = Setup(
    num_replicas=0,
    halves=Halves(num_prefill=1, num_decode=1, always_apart=True),
    num_blocks=2_000,
    load=None,
    time_model=SLOW,
)


def played(rule: RejectionRule, *turns: Turn, slo_ttft_s: float = 30.0) -> Simulated:
    rejection = Rejection(rule=rule, slo_ttft_s=slo_ttft_s, slo_tbt_s=0.025)  # one at a time
    return simulate(workload(*turns), create("kv_aware"), replace(SETUP, rejection=rejection))


def asked(number: int, at_s: float, num_output_tokens: int = 101) -> Turn:
    return turn(number, at_s, tuple(range(10 * number, 10 * number + 10)),
                num_output_tokens=num_output_tokens)  # fmt: skip


def statuses(found: Simulated) -> list[int | None]:
    return [each.status for each in sorted(found.run.turns, key=lambda each: each.session_id)]


def test_after_its_prompt_an_answer_that_would_be_too_slow_is_refused() -> None:
    """What computed its prompt is lost, and counted."""
    found = played("after_prefill", asked(1, 0.0), asked(2, 1.0))

    assert statuses(found) == [200, 429]
    overload = found.overload
    assert overload is not None
    assert (overload.num_wasted, overload.num_slow_answers) == (1, 0)
    assert overload.num_wasted_tokens == asked(2, 1.0).num_input_tokens
    assert sum(use.num_computed_tokens for use in found.replicas if use.role == "prefill") == (
        2 * overload.num_wasted_tokens
    )


def test_by_first_tokens_alone_no_answer_is_too_slow() -> None:
    """Whatever the time between tokens."""
    found = played("prompts", asked(1, 0.0), asked(2, 1.0))

    assert statuses(found) == [200, 200]
    assert max(each.tbt_tail_s or 0.0 for each in found.run.turns) > 0.025


def test_on_arrival_it_is_refused_by_the_load_of_then() -> None:
    """No prompt is computed for it; one that is over before is not in its way."""
    found = played("on_arrival", asked(1, 0.0), asked(2, 1.0), asked(3, 30.0))

    assert statuses(found) == [200, 429, 200]
    overload = found.overload
    assert overload is not None
    assert (overload.num_wasted, overload.num_slow_answers) == (0, 1)


def test_by_prediction_it_counts_what_will_be_over() -> None:
    """An answer that has run for so long as others did is taken to be over by then."""
    turns = [asked(1, 0.0), asked(2, 10.0), asked(3, 12.3)]

    by_now, predicted = played("on_arrival", *turns), played("predicted", *turns)

    assert statuses(by_now) == [200, 200, 429]
    assert statuses(predicted) == [200, 200, 200]


def test_how_far_the_load_was_misjudged_is_kept() -> None:
    """Of what was let in by a load: that of now was right for the first, not for the second."""
    found = played("on_arrival", asked(1, 0.0), asked(2, 20.0), asked(3, 20.1))
    by_first_tokens = played("prompts", asked(1, 0.0))

    assert found.overload is not None
    assert found.overload.load_errors == pytest.approx((0.0, 0.0, 0.4))
    assert by_first_tokens.overload is not None
    assert by_first_tokens.overload.load_errors == ()


def test_by_prediction_it_learns_how_long_answers_last() -> None:
    """The first one was short: those that run longer count as over at first, and prompts are lost.

    Each time the load is higher than predicted, so the next answer is taken to last longer.
    """
    rounds = [(asked(2 * n, 20.0 * n, 301), asked(2 * n + 1, 20.0 * n + 2.6)) for n in range(1, 21)]
    turns = [each for pair in rounds for each in pair]

    found = played("predicted", asked(0, 0.0), *turns)

    assert found.overload is not None
    num_wasted = found.overload.num_wasted
    assert 5 <= num_wasted <= 15
    assert found.overload.num_slow_answers == 20 - num_wasted
    assert found.overload.load_errors[-1] == pytest.approx(0.0)


def test_by_prediction_it_counts_prompts_that_come_first() -> None:
    """Their answers will have begun: what is refused has not cost a prompt."""
    turns = [asked(1, 0.0), asked(2, 20.0), asked(3, 20.1)]

    by_now, predicted = played("on_arrival", *turns), played("predicted", *turns)

    assert statuses(by_now) == statuses(predicted) == [200, 200, 429]
    assert by_now.overload is not None
    assert predicted.overload is not None
    assert (by_now.overload.num_wasted, predicted.overload.num_wasted) == (1, 0)


@pytest.mark.parametrize("rule", ["prompts", "after_prefill", "on_arrival", "predicted"])
def test_a_prompt_is_refused_on_arrival_where_prefill_is_overloaded(rule: RejectionRule) -> None:
    """Under every rule: by what is there, however short it is itself."""
    turns = [asked(1, 0.0, 2), asked(2, 100.0, 2), asked(3, 100.0, 2), asked(4, 100.0, 2)]

    found = played(rule, *turns, slo_ttft_s=0.8)

    assert statuses(found) == [200, 200, 200, 429]
    assert found.overload is not None
    assert found.overload.num_late_prompts == 1
    assert [each.prefill for each in found.overload.samples[:3]] == pytest.approx(
        [0, 0, 0.65], abs=0.05
    )


@pytest.mark.parametrize("changes", [{"halves": None, "num_replicas": 1}, {"queue": QueueRules()}])
def test_it_needs_halves_and_no_queue(changes: dict[str, object]) -> None:
    """A setup in which it would do nothing is refused."""
    setup = replace(SETUP, rejection=Rejection(rule="predicted"), **changes)

    with pytest.raises(ValueError, match="halves"):
        simulate(workload(asked(1, 0.0)), create("kv_aware"), setup)
