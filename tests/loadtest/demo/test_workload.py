"""The demo's workload: what it promises in its own docstring."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from loadtest.demo.workload import (
    BLOCK_SIZE,
    CACHE_RATIO,
    FULL,
    NUM_REPLICAS,
    SHORT,
    TOKENS_PER_TOKEN,
    Workload,
    plan,
)
from loadtest.engine_model.time_model import PRESETS


@pytest.mark.parametrize("workload", [FULL, SHORT])
def test_fleet_holds_half_of_what_is_written_and_one_replica_less_than_is_needed(
    workload: Workload,
) -> None:
    """All caches together hold half of the text; the longest session fits one replica."""
    planned = plan(workload)

    fleet = NUM_REPLICAS * planned.cache_tokens
    assert fleet >= CACHE_RATIO * planned.written_tokens - NUM_REPLICAS * BLOCK_SIZE
    assert planned.cache_tokens < 0.5 * planned.written_tokens
    assert planned.cache_tokens > planned.longest_tokens


def test_cache_rule_is_exact_where_the_longest_session_does_not_overrule_it() -> None:
    """With many sessions the caches follow from the ratio alone."""
    planned = plan(FULL)

    fleet = NUM_REPLICAS * planned.cache_tokens
    assert fleet == pytest.approx(CACHE_RATIO * planned.written_tokens, rel=0.01)


def test_few_sessions_get_room_for_the_longest() -> None:
    """A context that did not fit its replica would be refused, whatever the ratio says."""
    planned = plan(replace(FULL, num_sessions=2))

    assert planned.cache_tokens > planned.longest_tokens


def test_same_seed_is_the_same_plan_and_another_seed_another() -> None:
    """The plan, like the sessions, depends on the seed alone."""
    assert plan(FULL) == plan(FULL)
    assert plan(FULL) != plan(replace(FULL, seed=FULL.seed + 1))


def test_planned_turns_are_those_that_come() -> None:
    """The progress bar ends at 100 %: sub-agents' turns are counted too."""
    queue = SHORT.sessions()
    num_turns = 0
    for session in queue:
        while session.next_turn() is not None:
            num_turns += 1
            queue.extend(session.advance("a reply of the model"))

    planned = plan(SHORT)
    assert planned.num_turns == num_turns
    assert planned.num_sub_agents == len(queue) - SHORT.num_sessions > 0


def test_session_lengths_are_skewed() -> None:
    """Some sessions are several times as long as the median: what stickiness suffers from."""
    assert plan(FULL).longest_turns >= 2 * FULL.num_turns


def test_replicas_are_scaled_from_their_preset() -> None:
    """One token stands for four: linear costs grow by four, costs of pairs by sixteen."""
    options = FULL.replica_options(1000)

    preset = PRESETS["h100x4-70b"]
    n = TOKENS_PER_TOKEN
    times = options.time_model
    assert options.num_gpu_blocks == 1000
    assert options.block_size == BLOCK_SIZE
    assert options.speed == 1.0
    assert times.base_ms == pytest.approx(n * preset.base_ms)
    assert times.ms_per_prefill_token == pytest.approx(n * preset.ms_per_prefill_token)
    assert times.ms_per_mtoken2 == pytest.approx(n * n * preset.ms_per_mtoken2)
    assert times.ms_per_decode == pytest.approx(n * preset.ms_per_decode)
    assert times.ms_per_mtoken_context == pytest.approx(n * n * preset.ms_per_mtoken_context)
