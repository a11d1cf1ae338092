"""router.replicas.speed: replicas of one label share a fit, and each has a factor of its own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from statistics import median

import pytest

from router.replicas.cost_fit import CostFit, Work
from router.replicas.speed import NUM_RECENT, Speed

BASE_MS, TOKEN_MS = 20.0, 0.2


class Hardware:
    """Replicas of one label, each so many times as slow as the first kind."""

    def __init__(self, factors: Mapping[str, float], *, noise: float = 0.2) -> None:
        fit = CostFit()
        self.factors = dict(factors)
        self.speeds = {name: Speed(fit) for name in factors}
        self.lengths = (50, 300, 2000, 9000)
        self._noise = noise
        self._random = random.Random(7)

    def run(self, num_each: int = 200) -> None:
        """Let each have so many first tokens, in a random order."""
        names = [name for name in self.speeds for _ in range(num_each)]
        self._random.shuffle(names)
        for name in names:
            work = self._work()
            took_ms = self.took_ms(name, work) * self._random.lognormvariate(0.0, self._noise)
            speed = self.speeds[name]
            speed.observe(work, took_ms, work.predict_ms(speed.model))

    def took_ms(self, name: str, work: Work) -> float:
        return self.factors[name] * (BASE_MS + TOKEN_MS * work.num_tokens)

    def error(self, name: str) -> float:
        """Return by which part predictions of a replica are off, in the median."""
        works = [self._work() for _ in range(50)]
        model = self.speeds[name].model
        return median(abs(w.predict_ms(model) / self.took_ms(name, w) - 1.0) for w in works)

    def _work(self) -> Work:
        num_tokens = self._random.choice(self.lengths)
        return Work(num_tokens=num_tokens, num_mtoken2=0.0, num_running=0, num_fetched_tokens=0)


@pytest.mark.parametrize(
    "factors",
    [
        {"a": 1.0, "b": 1.0, "c": 1.0, "wrong": 2.5},
        {f"r{number}": (1.0, 2.0, 5.0)[number % 3] for number in range(9)},
        {"alone": 20.0},
    ],
    ids=["mislabelled", "three_kinds", "alone"],
)
def test_each_kind_of_hardware_is_predicted(factors: Mapping[str, float]) -> None:
    fleet = Hardware(factors)
    fleet.run()

    assert max(map(fleet.error, fleet.speeds)) < 0.15


def test_a_factor_is_known_after_few_first_tokens() -> None:
    fleet = Hardware({"a": 1.0, "slow": 3.0})
    fleet.run(NUM_RECENT + 16)

    assert max(map(fleet.error, fleet.speeds)) < 0.15


def test_a_replica_that_gets_slow_and_recovers_spoils_no_other() -> None:
    fleet = Hardware({"a": 1.0, "b": 1.0, "hot": 1.0})
    for factor in (1.0, 2.5, 1.0):
        fleet.factors["hot"] = factor
        fleet.run()
        assert max(map(fleet.error, fleet.speeds)) < 0.15


def test_short_first_tokens_show_no_hardware() -> None:
    fleet = Hardware({"a": 0.1, "far": 2.0})
    fleet.lengths = (0,)
    fleet.run()

    assert {speed.factor for speed in fleet.speeds.values()} == {1.0}


def test_a_factor_is_bounded() -> None:
    fleet = Hardware({**{f"r{number}": 1.0 for number in range(8)}, "absurd": 100.0})
    fleet.run()

    assert fleet.speeds["absurd"].factor == 3.0
    assert max(fleet.error(name) for name in fleet.speeds if name != "absurd") < 0.15
