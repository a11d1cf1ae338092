"""router.replicas.cost_classes: replicas are of one class if their first tokens take as long."""

from __future__ import annotations

import random
from collections.abc import Mapping
from statistics import median

from router.replicas.cost_classes import NUM_RECENT, CostClass, Speed
from router.replicas.cost_fit import CostFit, Work

BASE_MS, TOKEN_MS = 20.0, 0.2


class Hardware:
    """Replicas of one label, each so many times as slow as the first kind."""

    def __init__(self, factors: Mapping[str, float], *, noise: float = 0.2) -> None:
        self.classes = [CostClass("h100", CostFit())]
        self.factors = dict(factors)
        self.speeds = {name: Speed(name, self.classes) for name in factors}
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
            speed.observe(work, took_ms, work.predict_ms(speed.fit.model))

    def took_ms(self, name: str, work: Work) -> float:
        return self.factors[name] * (BASE_MS + TOKEN_MS * work.num_tokens)

    def error(self, name: str) -> float:
        """Return by which part predictions of a replica are off, in the median."""
        works = [self._work() for _ in range(50)]
        model = self.speeds[name].fit.model
        return median(abs(w.predict_ms(model) / self.took_ms(name, w) - 1.0) for w in works)

    def classes_of(self) -> dict[str, str]:
        return {name: speed.cost_class.name for name, speed in self.speeds.items()}

    def _work(self) -> Work:
        num_tokens = self._random.choice(self.lengths)
        return Work(num_tokens=num_tokens, num_mtoken2=0.0, num_running=0, num_fetched_tokens=0)


def test_a_mislabelled_replica_does_not_spoil_its_class() -> None:
    fleet = Hardware({"a": 1.0, "b": 1.0, "c": 1.0, "wrong": 2.5})
    fleet.run()

    assert fleet.classes_of() == {"a": "h100", "b": "h100", "c": "h100", "wrong": "h100~2"}
    assert max(map(fleet.error, fleet.speeds)) < 0.1


def test_three_kinds_of_eight_replicas() -> None:
    factors = {f"r{number}": (1.0, 2.0, 5.0)[number % 3] for number in range(9)}
    fleet = Hardware(factors)
    fleet.run()
    of = fleet.classes_of()

    assert all((of[a] == of[b]) == (factors[a] == factors[b]) for a in of for b in of)


def test_equal_replicas_stay_in_one_class() -> None:
    fleet = Hardware({f"r{number}": 1.0 for number in range(8)}, noise=0.5)
    fleet.run(400)
    assert set(fleet.classes_of().values()) == {"h100"}

    fleet.factors = dict.fromkeys(fleet.factors, 2.0)
    fleet.run(NUM_RECENT // 4)
    assert set(fleet.classes_of().values()) == {"h100"}


def test_short_first_tokens_show_no_hardware() -> None:
    fleet = Hardware({"a": 0.1, "far": 2.0})
    fleet.lengths = (0,)
    fleet.run()
    assert set(fleet.classes_of().values()) == {"h100"}


def test_a_replica_that_recovers_its_speed_returns_to_its_class() -> None:
    fleet = Hardware({"a": 1.0, "b": 1.0, "hot": 2.0})
    fleet.run()
    assert fleet.classes_of()["hot"] == "h100~2"

    fleet.factors["hot"] = 1.0
    fleet.run(64)
    assert fleet.classes_of()["hot"] == "h100"
    assert len(fleet.classes) == 1


def test_a_removed_replica_leaves_its_class() -> None:
    fleet = Hardware({"a": 1.0, "b": 1.0, "slow": 2.0})
    fleet.run()
    for speed in fleet.speeds.values():
        speed.leave()

    assert [each.name for each in fleet.classes] == ["h100"]
    assert fleet.classes[0].members == []


def test_a_new_class_starts_from_recent_observations() -> None:
    fleet = Hardware({"a": 1.0, "slow": 4.0})
    while len(fleet.classes) == 1:
        fleet.run(1)

    (found,) = fleet.classes[1].members
    assert found.fit.num_observations == NUM_RECENT
    assert fleet.error(found.replica) < 0.25
