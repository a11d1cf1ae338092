"""How long fuzzing takes: a moment by default, WARMROUTE_FUZZ_SECONDS of each target if set.

Hypothesis counts examples, not time. So a long run is many short ones, each with a seed of its own;
a failure prints the example, and `@reproduce_failure` where it has to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from hypothesis import HealthCheck, given, seed, settings

from tests.effort import FUZZ_SECONDS as SECONDS

_EXAMPLES: Final = 40  # of a short run
_EXAMPLES_A_ROUND: Final = 500


def fuzz(*given_args: Any, **given_kwargs: Any) -> Callable[[Callable[..., None]], Any]:
    """Fuzz a target, which takes one example: `@fuzz(payloads)` above a test."""

    def decorate(target: Callable[..., None]) -> Any:
        def prepared(num_examples: int) -> Any:
            return settings(
                max_examples=num_examples,
                database=None,
                suppress_health_check=list(HealthCheck),
            )(given(*given_args, **given_kwargs)(target))

        def run() -> None:
            if not SECONDS:
                seed(0)(prepared(_EXAMPLES))()
                return
            until_s = time.monotonic() + SECONDS
            while time.monotonic() < until_s:
                seed(time.monotonic_ns())(prepared(_EXAMPLES_A_ROUND))()

        run.__name__, run.__doc__ = target.__name__, target.__doc__
        run.__module__, run.__qualname__ = target.__module__, target.__qualname__
        return run

    return decorate
