"""Where runs happen: what is changed between rounds, and what is not; targets that die."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.compare.arms import Arm
from loadtest.compare.places import Emulated, Engines, Simulated, Targets, reset_caches, varied
from loadtest.compare.report import make_report
from loadtest.compare.setting import Setting
from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from loadtest.engine_model.time_model import PRESETS
from loadtest.generated import Agents
from loadtest.results import TurnResult
from loadtest.runner import ReplayOptions
from loadtest.simulator import Setup

pytestmark = pytest.mark.usefixtures("forked_children")

WORKLOAD = Agents(num_sessions=6, num_turns=2, scale_tokens=0.05).workload()
OPTIONS = ReplayOptions(loop="closed", scale_time=0.001, session_header="x-session-id", seed=3)
INSTANT = EmulatorOptions(time_model=PRESETS["instant"])


class Ignore:
    """A run that is not shown."""

    def add(self, turn: TurnResult) -> None:
        return None

    def advance(self, num_turns: int) -> None:
        return None


ignore = Ignore()


def test_a_varied_workload_is_the_same_but_for_bytes_and_a_millisecond() -> None:
    """Same turns, same repeats, at most 1 ms later; the first round is the workload itself."""
    other = varied(WORKLOAD, 2, seed=1)

    assert varied(WORKLOAD, 1, seed=1) is WORKLOAD
    assert other == varied(WORKLOAD, 2, seed=1)
    before = {turn.key: turn for turn in WORKLOAD.turns}
    renamed: dict[int, int] = {}
    for turn in other.turns:
        was = before.pop(turn.key)
        assert (turn.num_input_tokens, turn.after) == (was.num_input_tokens, was.after)
        assert 0.0 <= turn.arrival_s - was.arrival_s <= 1e-3
        for old, new in zip(was.hash_ids, turn.hash_ids, strict=True):
            assert renamed.setdefault(old, new) == new
    assert not before
    assert len(set(renamed.values())) == len(renamed)
    assert renamed.keys().isdisjoint(renamed.values())


def test_a_varied_workload_keeps_turns_behind_those_they_wait_for() -> None:
    """Every key in an `after` is one of an earlier turn, as workloads promise."""
    seen = set()
    for turn in varied(WORKLOAD, 5, seed=9).turns:
        assert seen >= set(turn.after)
        seen.add(turn.key)


async def test_simulated_rounds_differ_a_little_and_repeat_exactly() -> None:
    """Seeded: the same round is the same run; another one is another."""
    place = Simulated(WORKLOAD, Setup(num_replicas=2, load=2.0))
    arm = Arm(label="least", policy="least_loaded")

    one = (await place.run(arm, 1, ignore)).run
    again = (await place.run(arm, 1, ignore)).run
    two = (await place.run(arm, 2, ignore)).run

    assert one == again
    assert one.turns != two.turns
    assert (one.info.label, two.info.round, two.info.workload) == ("least", 2, WORKLOAD.name)


def targets(*urls: str) -> tuple[tuple[Arm, ...], Setting]:
    arms = tuple(Arm(label=name, url=url) for name, url in zip("ab", urls, strict=True))
    setting = Setting(place="targets", arms=arms, baseline="a", order=(("a", "b"), ("b", "a")),
                      workload=WORKLOAD.name, num_turns=len(WORKLOAD.turns))  # fmt: skip
    return arms, setting


@pytest.mark.timeout(120)
async def test_targets_get_bytes_of_their_own_and_the_same_structure() -> None:
    """Two targets on one engine: no run finds what another left; all turns are paired."""
    async with Emulator(INSTANT) as engine:
        arms, setting = targets(engine.url, engine.url)
        place = Targets(WORKLOAD, OPTIONS)
        runs = [(await place.run(arm, number, ignore)).run for number in (1, 2) for arm in arms]

    report = make_report(setting, runs)
    found = {check.name: check for check in report.checks}
    assert report.is_complete
    assert report.num_errors == 0
    for name in ("same tokens", "cold caches", "unseen bytes", "turns in common"):
        assert found[name].outcome == "passed", found[name]
    computed = next(c for c in report.comparisons if c.measure == "computed tokens")
    assert computed.effect == pytest.approx(1.0, abs=0.02)


@pytest.mark.timeout(120)
async def test_a_target_that_dies_midway_leaves_what_it_did() -> None:
    """Its part is compared, and later rounds say that nothing answers."""
    async with Emulator(INSTANT) as alive:
        doomed = Emulator(INSTANT)
        await doomed.__aenter__()
        arms, setting = targets(alive.url, doomed.url)
        place = Targets(WORKLOAD, OPTIONS)
        one = (await place.run(arms[0], 1, ignore)).run
        part = (await place.run(arms[1], 1, ignore)).run
        await doomed.__aexit__(None, None, None)
        none = (await place.run(arms[1], 2, ignore)).run
        last = (await place.run(arms[0], 2, ignore)).run

    report = make_report(setting, [one, part, none, last])
    assert not none.info.is_complete
    assert none.turns == ()
    assert "nothing answers" in report.note
    assert not report.is_complete
    assert report.comparisons[0].num_turns == len(WORKLOAD.turns)
    assert report.comparisons[0].num_left_out == len(WORKLOAD.turns)


@pytest.mark.timeout(60)
async def test_caches_are_reset_where_engines_offer_it() -> None:
    """The emulator does; a finding names each that does not."""
    async with Emulator(INSTANT) as engine:
        assert await reset_caches([engine.url]) == "/reset_prefix_cache on every engine"
        said = await reset_caches([engine.url, "http://127.0.0.1:1"])

    assert said == "/reset_prefix_cache on 1 of 2 engines, the others do not offer it"


@pytest.mark.timeout(240)
async def test_policies_run_on_fresh_processes(tmp_path: Path) -> None:
    """One run on an emulated replica behind a real router, with a pool; logs are kept."""
    place = Emulated(
        WORKLOAD,
        OPTIONS,
        flags=lambda arm: ["--preset", "instant", "--num-gpu-blocks", "4096"],
        num_replicas=2,
        has_pool=True,
        logs=tmp_path,
    )

    ran = await place.run(Arm(label="rr", policy="round_robin"), 1, ignore)

    assert ran.run.info.is_complete, ran.run.info.note
    assert {turn.policy for turn in ran.run.turns} == {"round_robin"}
    assert {turn.replica for turn in ran.run.turns} == {"r1", "r2"}
    assert all(turn.error is None for turn in ran.run.turns)
    assert (tmp_path / "01-rr" / "router.log").stat().st_size > 0


@pytest.mark.timeout(240)
async def test_policies_run_in_front_of_given_engines(tmp_path: Path) -> None:
    """Behind a router of their own; engines forget, and get bytes of each run's own."""
    async with Emulator(INSTANT) as engine:
        place = Engines(
            WORKLOAD, OPTIONS, urls=[engine.url], router_flags=["--log-level", "error"],
            logs=tmp_path,
        )  # fmt: skip
        ran = await place.run(Arm(label="rr", policy="round_robin"), 1, ignore)

    assert place.shares_caches
    assert ran.run.info.is_complete, ran.run.info.note
    assert {turn.policy for turn in ran.run.turns} == {"round_robin"}
    assert ran.run.info.settings["salt"] == "3.1.rr"
    assert "/reset_prefix_cache on every engine" in ran.cold


@pytest.mark.timeout(120)
async def test_processes_that_do_not_start_are_noted_in_an_empty_run(tmp_path: Path) -> None:
    """With the end of the log: that is where it says why."""
    place = Emulated(
        WORKLOAD,
        OPTIONS,
        flags=lambda arm: ["--block-size", "0"],
        num_replicas=1,
        has_pool=False,
        logs=tmp_path,
    )

    ran = await place.run(Arm(label="rr", policy="round_robin"), 1, ignore)

    assert not ran.run.info.is_complete
    assert "replica r1 ended" in ran.run.info.note
