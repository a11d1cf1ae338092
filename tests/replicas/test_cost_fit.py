"""

router.replicas.cost_fit: the time between tokens, from what engines report.

router.replicas.cost_fit: replicas of one label share a fit, and each has a factor of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from random import Random
from statistics import median

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, astuple, replace

from policies import CostModel
from router.replicas.cost_fit import NUM_RECENT, PRIOR, CostFit, Speed, StepFit, Work, mtoken2
from tests.effort import examples

ENGINES = {
    "datacenter": CostModel(
        base_ms=8.0,
        ms_per_token=0.02,
        ms_per_mtoken2=0.05,
        ms_per_running=0.3,
        ms_per_fetched_token=0.0005,
        ms_per_cpu_token=0.0004,
        ms_per_fetch=3.0,
        ms_per_disk_token=0.003,
    ),
    "desktop": CostModel(
        base_ms=60.0,
        ms_per_token=2.0,
        ms_per_mtoken2=20.0,
        ms_per_running=5.0,
        ms_per_fetched_token=0.05,
        ms_per_cpu_token=0.02,
        ms_per_fetch=20.0,
        ms_per_disk_token=0.2,
    ),
    "tiny": CostModel(
        base_ms=3.0,
        ms_per_token=0.001,
        ms_per_mtoken2=0.0,
        ms_per_fetched_token=0.0,
        ms_per_cpu_token=0.0,
        ms_per_fetch=0.0,
        ms_per_disk_token=0.0,
    ),
}


def draw_work(random: Random) -> Work:
    """Draw a request as agents send them: long contexts, short additions, some queue."""
    own = int(random.lognormvariate(7.0, 1.5))
    cached = random.choice([0, 0, 5000, 50_000])
    ahead = random.choice([0, 0, random.randint(0, 20_000)])
    fetched = random.choice([0, 0, random.randint(0, 20_000)])
    is_from_pool = random.random() < 0.5
    return Work(
        num_tokens=own + ahead,
        num_mtoken2=mtoken2(own, cached) + mtoken2(ahead, 0),
        num_running=random.randint(0, 20),
        num_fetched_tokens=fetched,
        is_from_pool=is_from_pool,
        num_disk_tokens=random.choice([0, fetched // 2, fetched]) if is_from_pool else 0,
    )


def teach(
    fit: CostFit, engine: CostModel, random: Random, number: int, hiccup: float = 1.0
) -> None:
    """Let an engine answer `number` requests, 10 % off each; one in twenty by `hiccup` too."""
    for _ in range(number):
        work = draw_work(random)
        ttft_ms = work.predict_ms(engine) * random.lognormvariate(0.0, 0.1)
        if random.random() < 0.05:
            ttft_ms *= hiccup
        fit.observe(work, ttft_ms, work.predict_ms(fit.model))


def mean_error(model: CostModel, engine: CostModel) -> float:
    """Compare predictions with the engine's truth on requests not seen: mean relative error."""
    random = Random(99)
    works = [draw_work(random) for _ in range(200)]
    return sum(abs(w.predict_ms(model) / w.predict_ms(engine) - 1.0) for w in works) / 200


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("hiccup", [1.0, 20.0, 0.1], ids=["none", "slow", "fast"])
def test_converges_within_a_hundred_observations(engine: CostModel, hiccup: float) -> None:
    fit = CostFit()

    teach(fit, engine, Random(1), 100, hiccup)

    assert mean_error(fit.model, engine) < 0.15


def test_keeps_the_prior_until_there_is_enough_to_trust() -> None:
    fit, engine = CostFit(trusted_after=16), ENGINES["tiny"]
    random = Random(2)
    teach(fit, engine, random, 15)
    before = fit.model
    teach(fit, engine, random, 1)

    assert before == PRIOR
    assert fit.num_observations == 16
    assert fit.model != PRIOR


def test_carries_its_own_error() -> None:
    fit, engine = CostFit(), ENGINES["desktop"]
    random = Random(3)
    teach(fit, engine, random, 16)
    early = fit.model.error_ms
    teach(fit, engine, random, 200)

    assert early > 0.0
    assert fit.model.error_ms < early


def test_follows_an_engine_that_changes() -> None:
    fit = CostFit()
    random = Random(4)
    teach(fit, ENGINES["desktop"], random, 200)
    teach(fit, ENGINES["datacenter"], random, 256)

    assert mean_error(fit.model, ENGINES["datacenter"]) < 0.1


def test_is_stable_when_all_requests_are_alike() -> None:
    fit, engine, random = CostFit(), ENGINES["datacenter"], Random(5)
    work = Work(
        num_tokens=2000, num_mtoken2=mtoken2(2000, 50_000), num_running=3, num_fetched_tokens=0
    )
    truth_ms = work.predict_ms(engine)
    for _ in range(1000):
        fit.observe(work, truth_ms * random.lognormvariate(0.0, 0.1), work.predict_ms(fit.model))

    assert work.predict_ms(fit.model) == pytest.approx(truth_ms, rel=0.05)
    other = Work(num_tokens=500, num_mtoken2=0.1, num_running=0, num_fetched_tokens=0)
    assert 0.0 < other.predict_ms(fit.model) < truth_ms


@pytest.mark.parametrize("ttft_ms", [math.nan, math.inf, -math.inf, 0.0, -3.0])
def test_impossible_times_are_ignored(ttft_ms: float) -> None:
    fit = CostFit()
    fit.observe(draw_work(Random(6)), ttft_ms, 1.0)

    assert fit.num_observations == 0


_POSITIVE = st.floats(1e-3, 1e7)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(
    seen=st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.integers(0, 10**6),
            st.integers(0, 1000),
            st.integers(0, 10**6),
            st.sampled_from([None, 0.0, 0.3, 1.0]),
            _POSITIVE,
        ),
        min_size=1,
        max_size=40,
    )
)
def test_never_yields_nonsense(seen: list[tuple[int, int, int, int, float | None, float]]) -> None:
    fit = CostFit(trusted_after=1)
    for own, cached, running, fetched, on_disk, ttft_ms in seen:  # None: from its own cpu tier
        work = Work(
            num_tokens=own,
            num_mtoken2=mtoken2(own, cached),
            num_running=running,
            num_fetched_tokens=fetched,
            is_from_pool=on_disk is not None,
            num_disk_tokens=int(fetched * (on_disk or 0.0)),
        )
        fit.observe(work, ttft_ms, work.predict_ms(fit.model))

    for value in astuple(fit.model):
        assert math.isfinite(value)
        assert value >= 0.0


@settings(max_examples=examples(20))
@given(scale=st.floats(0.01, 100.0))
def test_a_wrong_scale_of_the_prior_is_unlearned(scale: float) -> None:
    engine = CostModel(**{name: scale * ms for name, ms in asdict(PRIOR).items()})
    fit = CostFit()

    teach(fit, engine, Random(7), 100)

    assert mean_error(fit.model, engine) < 0.15


OVER_TCP = CostModel(
    base_ms=60.0,
    ms_per_token=0.5,
    ms_per_mtoken2=5.0,
    ms_per_fetched_token=0.15,
    ms_per_cpu_token=0.02,
    ms_per_fetch=40.0,
)
"""Two engines on one host's CPU whose pool is read over TCP, about as they were measured."""


def draw_turn(random: Random, *, reads: bool) -> Work:
    """Draw an agent's turn; one that reads finds no queue, for that is why it was sent there."""
    own = random.randint(50, 800)
    ahead = 0 if reads else random.choice([0, 0, random.randint(0, 3_000)])
    return Work(
        num_tokens=own + ahead,
        num_mtoken2=mtoken2(own, 5_000) + mtoken2(ahead, 0),
        num_running=random.randint(0, 3),
        num_fetched_tokens=random.randint(1_000, 6_000) if reads else 0,
        is_from_pool=reads,
    )


def test_a_read_is_never_fitted_to_nothing() -> None:
    fit, random = CostFit(), Random(8)
    for _ in range(300):
        work = draw_turn(random, reads=random.random() < 0.25)
        ttft_ms = work.predict_ms(OVER_TCP) * random.lognormvariate(0.0, 0.3)
        if work.reads_pool:
            ttft_ms = 30.0
        fit.observe(work, ttft_ms, work.predict_ms(fit.model))

    assert fit.model.ms_per_fetched_token >= 0.02 * fit.model.ms_per_token > 0.0
    assert fit.model.fetch_ms(5_000, from_pool=True) > 10.0


@pytest.mark.parametrize("seed", range(3))
def test_a_read_costs_what_reads_take_in_the_mean(seed: int) -> None:
    fit, random = CostFit(), Random(seed)
    for number in range(400):
        work = draw_turn(random, reads=number % 4 == 0)
        per_token_ms = 0.5 if number % 20 == 0 else 0.05  # 0.14 in the mean
        engine = replace(OVER_TCP, ms_per_fetched_token=per_token_ms)
        ttft_ms = work.predict_ms(engine) * random.lognormvariate(0.0, 0.1)
        fit.observe(work, ttft_ms, work.predict_ms(fit.model))

    mean_ms = 0.14 * 3_500 + OVER_TCP.ms_per_fetch
    assert fit.model.fetch_ms(3_500, from_pool=True) == pytest.approx(mean_ms, rel=0.35)


def test_tiers_have_prices_of_their_own() -> None:
    fit, random = CostFit(), Random(9)
    for _ in range(300):
        reads = random.random() < 0.5
        work = replace(draw_turn(random, reads=reads), is_from_pool=random.random() < 0.5)
        ttft_ms = work.predict_ms(OVER_TCP) * random.lognormvariate(0.0, 0.1)
        fit.observe(work, ttft_ms, work.predict_ms(fit.model))

    for from_pool in (False, True):
        truth_ms = OVER_TCP.fetch_ms(4_000, from_pool=from_pool)
        found_ms = fit.model.fetch_ms(4_000, from_pool=from_pool)
        assert found_ms == pytest.approx(truth_ms, rel=0.25)


def test_what_is_read_from_disk_has_a_price_of_its_own() -> None:
    fit, random = CostFit(), Random(12)
    engine = replace(OVER_TCP, ms_per_fetched_token=0.05, ms_per_disk_token=0.4)
    for number in range(400):
        work = draw_turn(random, reads=number % 2 == 0)
        on_disk = random.choice([0.0, 0.0, 0.5, 1.0])
        work = replace(work, num_disk_tokens=int(work.num_fetched_tokens * on_disk))
        ttft_ms = work.predict_ms(engine) * random.lognormvariate(0.0, 0.1)
        fit.observe(work, ttft_ms, work.predict_ms(fit.model))

    for num_on_disk in (0, 2_000, 4_000):
        truth_ms = engine.fetch_ms(4_000, from_pool=True, num_on_disk=num_on_disk)
        found_ms = fit.model.fetch_ms(4_000, from_pool=True, num_on_disk=num_on_disk)
        assert found_ms == pytest.approx(truth_ms, rel=0.25)
    assert fit.model.fetch_margin_ms(4_000, 4_000) >= fit.model.fetch_margin_ms(4_000)


def test_a_read_says_how_far_it_may_be_off() -> None:
    fit, random = CostFit(), Random(10)
    assert fit.model.fetch_margin_ms(1_000) == fit.model.ms_per_fetched_token * 1_000
    assert fit.model.fetch_margin_ms(0) == 0.0
    for number in range(400):
        work = draw_turn(random, reads=number % 4 == 0)
        off = random.lognormvariate(0.0, 0.6 if work.reads_pool else 0.05)
        fit.observe(work, work.predict_ms(OVER_TCP) * off, work.predict_ms(fit.model))
    unsure_ms = fit.model.fetch_error_ms
    for _ in range(400):
        work = draw_turn(random, reads=False)
        fit.observe(work, work.predict_ms(OVER_TCP), work.predict_ms(fit.model))

    assert unsure_ms > 4 * fit.model.error_ms
    assert fit.model.fetch_margin_ms(1_000) < unsure_ms / 2  # a bad hour is forgotten


def test_one_read_that_hangs_does_not_price_all_others_out() -> None:
    fit, random = CostFit(), Random(11)
    for number in range(120):
        work = draw_turn(random, reads=number % 4 == 0)
        hangs_ms = 60_000.0 if number == 116 else 0.0
        fit.observe(work, work.predict_ms(OVER_TCP) + hangs_ms, work.predict_ms(fit.model))

    assert fit.model.fetch_ms(3_500, from_pool=True) < 2_000.0
    assert fit.model.fetch_margin_ms(3_500) < 2_000.0


def test_others_teach_at_a_bounded_pace() -> None:
    """All of them until the window is full, then 20 a second."""
    fit = CostFit()
    work = Work(num_tokens=100.0, num_mtoken2=0.0, num_running=0, num_fetched_tokens=0)
    for _ in range(128):
        assert fit.takes_elsewhere(0.0)
        fit.observe(work, 50.0, 50.0)

    taken = [fit.takes_elsewhere(1.0 + millisecond / 1000.0) for millisecond in range(1000)]
    assert sum(taken) == pytest.approx(20, abs=1)


def test_base_requests_and_context_are_told_apart() -> None:
    rng, fit = random.Random(1), StepFit()

    for _ in range(200):
        running, tokens = rng.randrange(1, 60), rng.randrange(0, 400_000)
        tbt_ms = 8.0 + 0.1 * running + 50.0 * tokens / 1e6
        fit.observe(running, tokens, tbt_ms * rng.uniform(0.9, 1.1))

    assert fit.predict_ms(1, 0) == pytest.approx(8.1, rel=0.1)
    assert fit.predict_ms(50, 300_000) == pytest.approx(28.0, rel=0.1)


def test_little_is_no_prediction_and_nonsense_is_none() -> None:
    fit = StepFit()

    for tbt_ms in (float("nan"), float("inf"), 0.0, -1.0):
        for _ in range(10):
            fit.observe(1, 1, tbt_ms)
    for _ in range(10):
        fit.observe(0, 0, 5.0)
    for _ in range(7):
        fit.observe(2, 100, 5.0)
    assert fit.predict_ms(2, 100) is None
    fit.observe(2, 100, 5.0)
    assert fit.predict_ms(2, 100) == pytest.approx(5.0, rel=0.01)


def test_no_load_makes_tokens_come_sooner() -> None:
    fit = StepFit()

    for running in range(1, 40):
        fit.observe(running, 1_000 * running, 50.0 - running)
    assert (fit.predict_ms(60, 60_000) or 0.0) >= (fit.predict_ms(1, 1_000) or 0.0) > 0.0


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
