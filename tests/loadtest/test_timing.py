"""Spreading, scaling and drawing of arrivals."""

from __future__ import annotations

import math
import random
from itertools import islice

import pytest

from loadtest.timing import poisson, scaled, service_s, tool_waits
from loadtest.workload import Turn, Workload


def test_poisson_arrivals_have_the_rate() -> None:
    """The first one at the start, then as many a second as asked; infinitely many at once."""
    arrivals = list(islice(poisson(4.0, random.Random(1), start_s=2.0), 4001))

    assert arrivals[0] == 2.0
    assert arrivals == sorted(arrivals)
    assert (arrivals[-1] - 2.0) / 4000 == pytest.approx(0.25, rel=0.06)
    assert list(islice(poisson(math.inf, random.Random(1)), 3)) == [0.0, 0.0, 0.0]


def test_tools_take_as_long_as_those_of_agents() -> None:
    """Median 5.2 s, as in the published statistics."""
    waits = sorted(islice(tool_waits(random.Random(1)), 4001))

    assert waits[2000] == pytest.approx(5.2, rel=0.1)


def test_scaling_stretches_arrivals_and_waits() -> None:
    """Half the factor, twice as fast; a factor of one changes nothing."""
    turn = Turn(
        session_id="s", number=0, arrival_s=3.0, num_input_tokens=1, num_output_tokens=1,
        hash_ids=(1,), wait_s=2.0,
    )  # fmt: skip
    workload = Workload(name="w", block_size=16, turns=(turn,))

    fast = scaled(workload, 0.5).turns[0]

    assert (fast.arrival_s, fast.wait_s) == (1.5, 1.0)
    assert scaled(workload, 1.0) is workload


def test_service_is_prefill_and_decode() -> None:
    """At 10,000 and 40 tokens a second."""
    assert service_s(5000, 80) == 2.5
