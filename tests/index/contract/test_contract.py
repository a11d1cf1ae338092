"""Random lives of engines, and what each index says of them when it has settled."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.index.contract.conftest import Subject
from tests.index.contract.machine import machine


@pytest.mark.timeout(300)
@pytest.mark.hypothesis
def test_an_index_settles_on_what_the_engines_hold(subject: Subject) -> None:
    """Whatever was lost, repeated, restarted, taken over in between."""
    run_state_machine_as_test(
        machine(subject.make),
        settings=settings(
            max_examples=subject.num_examples,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
