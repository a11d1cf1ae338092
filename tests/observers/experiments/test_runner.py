"""router.observers.experiments.runner: who gets which arm, on all routers; all routers' orders."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from router.base.errors import ConfigError, ExperimentConflict, UnknownExperiment
from router.base.messages import encode
from router.config.experiments import Arm, ArmQueue, Experiment, Guardrails
from router.observers.experiments.metrics import ExperimentMetrics
from router.observers.experiments.runner import MAX_EXPERIMENTS, ExperimentRunner, refused
from router.observers.experiments.state import State, decode_state
from router.observers.experiments.trial import Trial
from router.records.record import AssignmentRecord
from tests.observers.experiments.samples import NOW_S, arms, experiment, step

DIGESTS = [random.Random(number).getrandbits(63) for number in range(4000)]


def runner() -> ExperimentRunner:
    return ExperimentRunner(ExperimentMetrics())


def started(definition: Experiment | None = None, at_s: float = NOW_S) -> ExperimentRunner:
    experiments = runner()
    experiments.start(definition or experiment(), at_s)
    return experiments


def assign(
    experiments: ExperimentRunner, model: str, digest: int | None, at_s: float
) -> AssignmentRecord | None:
    variant = experiments.assign(model, digest, at_s)
    return variant.record if variant is not None else None


def arm_of(experiments: ExperimentRunner, digest: int | None, at_s: float = NOW_S) -> str | None:
    assignment = assign(experiments, "m", digest, at_s)
    return assignment.arm if assignment is not None else None


def counts(experiments: ExperimentRunner, at_s: float = NOW_S) -> Counter[str | None]:
    return Counter(arm_of(experiments, digest, at_s) for digest in DIGESTS)


def shared(*routers: ExperimentRunner) -> None:
    """Let all routers know of all, over the wire, until nothing is new."""
    store: dict[str, State] = {}
    for _ in range(4):
        for router in routers:
            states = {name: decode_state(encode(s)) for name, s in store.items()}
            router.apply(states, NOW_S)
            for name, state in list(router.unsaved.items()):
                store[name] = state
                router.saved(name, state)


# -- who gets which arm --------------------------------------------------------------------------


def test_sessions_are_split_by_their_shares() -> None:
    """Each session in one arm, whenever it comes; what is left and the holdout in none."""
    experiments = started(experiment(arms=arms(a=0.3, b=0.2), holdout=0.25))
    found = counts(experiments)

    assert abs(found["a"] - 1200) < 100
    assert abs(found["b"] - 800) < 100
    assert found == counts(experiments, NOW_S + 1e6)


def test_experiments_do_not_share_their_draws() -> None:
    """Another name or seed is another split, independent of the first."""
    first = started()
    for other in (started(experiment(name="f")), started(experiment(seed=1))):
        same = sum(arm_of(first, digest) == arm_of(other, digest) for digest in DIGESTS)

        assert 1800 < same < 2200


def test_a_ramp_moves_only_who_must_move() -> None:
    """By the definition's steps and by order; no session changes from one arm to the other."""
    ramp = (step(100, a=0.1, b=0.1), step(200, a=0.25, b=0.25))
    experiments = started(experiment(arms=arms(a=0.01, b=0.01), ramp=ramp))
    before = {digest: arm_of(experiments, digest) for digest in DIGESTS}
    for at_s in (NOW_S + 150, NOW_S + 250, NOW_S + 400):
        if at_s > NOW_S + 300:
            experiments.ramp("e", {"b": 0.75}, NOW_S + 300)
        now = {digest: arm_of(experiments, digest, at_s) for digest in DIGESTS}
        assert all(now[digest] == arm for digest, arm in before.items() if arm is not None)
        before = now

    assert abs(Counter(before.values())["b"] - 3000) < 100


def test_what_is_not_in_scope_is_in_no_arm() -> None:
    """Other models, before the start, after the end, without anything that stays."""
    experiments = started(experiment(models=("m",), start_at=NOW_S + 10))
    (digest,) = DIGESTS[:1]

    assert assign(experiments, "m", digest, NOW_S) is None
    assert assign(experiments, "n", digest, NOW_S + 10) is None
    assert assign(experiments, "m", None, NOW_S + 10) is None
    assert assign(experiments, "m", digest, NOW_S + 10) is not None
    assert trial_of(experiments).shares(NOW_S) == {"a": 0.5, "b": 0.5}
    experiments.stop("e", NOW_S + 20, "enough")
    assert trial_of(experiments).assign(digest, NOW_S + 20) is None
    assert assign(experiments, "m", digest, NOW_S + 20) is None
    assert experiments.is_empty


def test_two_experiments_divide_the_models() -> None:
    """Each has its own."""
    experiments = started(experiment(models=("m",)))
    experiments.start(experiment(name="f", models=("n",)), NOW_S)

    for model, name in (("m", "e"), ("n", "f")):
        assignment = assign(experiments, model, DIGESTS[0], NOW_S)
        assert assignment is not None
        assert assignment.experiment == name


# -- switchback ----------------------------------------------------------------------------------


def switchback(**fields: object) -> ExperimentRunner:
    return started(experiment(design="switchback", slot_s=60.0, wash_out_s=6.0, **fields))


def test_all_requests_of_a_slot_have_one_arm() -> None:
    """Sessions or not; the unit is the slot; half of the slots each."""
    experiments = switchback()
    trial = experiments.find("e")
    first = int(NOW_S // 60) + 1
    found: Counter[str | None] = Counter()
    for slot in range(first, first + 1000):
        (assignment, *others) = [
            assign(experiments, "m", digest, slot * 60.0 + at_s)
            for digest, at_s in ((None, 10.0), (DIGESTS[0], 20.0), (DIGESTS[1], 59.9))
        ]
        assert others == [assignment] * 2
        assert assignment is not None
        assert (assignment.unit, assignment.slot) == (str(slot), slot)
        assert assignment.arm == trial.arm_of_slot(slot)
        found[assignment.arm] += 1

    assert abs(found["a"] - 500) < 60


def test_equal_arms_have_their_slots_in_blocks() -> None:
    """Each pair of slots has both arms, each three of three all; from the definition alone."""
    first = int(NOW_S // 60) + 6 - int(NOW_S // 60) % 6
    for shares in ({"a": 0.5, "b": 0.5}, {"a": None, "b": None, "c": None}):
        given_arms = arms(**shares)  # type: ignore[arg-type]
        one, other = switchback(arms=given_arms), switchback(arms=given_arms, start_at=NOW_S + 9)
        size = len(shares)
        drawn = [one.find("e").arm_of_slot(slot) for slot in range(first, first + 300)]

        blocks = [drawn[start : start + size] for start in range(0, 300, size)]
        assert all(set(block) == set(shares) for block in blocks)
        assert len({tuple(block) for block in blocks}) > 1
        assert drawn == [other.find("e").arm_of_slot(s) for s in range(first, first + 300)]


def test_unequal_arms_have_slots_drawn_apart() -> None:
    """By their shares, which a ramp may make equal, or equal ones unequal."""
    experiments = switchback(arms=arms(a=0.8, b=0.2))
    trial = experiments.find("e")
    first = (int(NOW_S // 60) // 2 + 1) * 2
    before = [trial.arm_of_slot(slot) for slot in range(first, first + 1001)]
    equal_s = (first + 1000) * 60.0 + 1  # from slot first + 1001 on, in the midst of a pair
    experiments.ramp("e", {"a": 0.5, "b": 0.5}, equal_s)
    experiments.ramp("e", {"a": 0.2}, equal_s + 60_000)
    trial = experiments.find("e")
    after = [trial.arm_of_slot(slot) for slot in range(first, first + 4000)]

    assert abs(Counter(before)["a"] - 800) < 60
    assert after[:1001] == before  # what was drawn stays
    assert all(set(after[i : i + 2]) == {"a", "b"} for i in range(1002, 2000, 2))
    late = Counter(after[2002:])
    assert abs(late["a"] / 1998 - 0.2) < 0.05
    assert abs(late[None] / 1998 - 0.3) < 0.05


def test_the_beginning_of_a_slot_is_washed_out_where_the_arm_changes() -> None:
    """And the experiment's own beginning; not where an arm goes on."""
    experiments = switchback()
    trial = experiments.find("e")
    first = int(NOW_S // 60)
    for slot in range(first + 1, first + 60):
        changes = trial.arm_of_slot(slot) != trial.arm_of_slot(slot - 1)
        early = assign(experiments, "m", None, slot * 60.0 + 5.9)
        late = assign(experiments, "m", None, slot * 60.0 + 6.1)
        assert early is not None
        assert late is not None
        assert early.not_counted == ("wash_out" if changes else None)
        assert late.not_counted is None
    begun = assign(experiments, "m", None, NOW_S + 1)
    assert begun is not None
    assert begun.not_counted == "wash_out"


def test_a_ramp_takes_effect_with_the_next_slot() -> None:
    """The slot it came in keeps its arm."""
    experiments = switchback(arms=arms(a=1.0, b=0.0))
    slot = int(NOW_S // 60) + 5
    experiments.ramp("e", {"a": 0.0, "b": 1.0}, slot * 60.0 + 30)

    assert arm_of(experiments, None, slot * 60.0 + 40) == "a"
    assert arm_of(experiments, None, slot * 60.0 + 60) == "b"


def test_slots_of_a_stopped_arm_do_not_count() -> None:
    """Whenever in the slot; the control arm's policy has them."""
    experiments = switchback(arms=arms(a=0.3, b=0.3, c=0.3))
    trial = experiments.find("e")
    first = int(NOW_S // 60) + 1
    slot = next(s for s in range(first, first + 50) if trial.arm_of_slot(s) == "b")
    experiments.stop("e", NOW_S, "slow", arm="b")
    for at_s in (0.1, 30.0):
        variant = experiments.assign("m", None, slot * 60.0 + at_s)
        assert variant is not None
        assert (variant.record.arm, variant.record.not_counted) == ("b", "stopped")
        assert variant.policy == arms(a=1.0)[0].made()
    unowned = next(s for s in range(first, first + 200) if trial.arm_of_slot(s) is None)
    assert assign(experiments, "m", None, unowned * 60.0) is None


def test_slots_may_be_unowned_and_sessions_held_out() -> None:
    """Shares below 1 leave slots to the default policy; the holdout is by session."""
    experiments = switchback(arms=arms(a=0.3, b=0.3), holdout=0.2)
    trial = experiments.find("e")
    first = int(NOW_S // 60) + 1
    owners = Counter(trial.arm_of_slot(slot) for slot in range(first, first + 2000))
    slot = next(s for s in range(first, first + 20) if trial.arm_of_slot(s) == "a")
    inside = [arm_of(experiments, digest, slot * 60.0 + 30) for digest in DIGESTS]

    assert abs(owners[None] - 2000 * 0.25) < 100  # 0.2 of the 0.8 that is not held out
    assert abs(inside.count(None) - 800) < 100
    assert set(inside) == {None, "a"}


def trial_of(experiments: ExperimentRunner) -> Trial:
    (trial,) = experiments.trials
    return trial


# -- orders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (experiment(), "'e' is running; stop it first"),
        (experiment(name="f"), "'e' claims all requests already"),
        (experiment(name="f", models=("m",)), "'e' claims requests for m already"),
    ],
)
def test_claimed_traffic_is_refused(other: Experiment, said: str) -> None:
    """The message names who claims what."""
    with pytest.raises(ExperimentConflict, match=said):
        started().start(other, NOW_S)


def test_only_so_many_experiments_are_kept() -> None:
    """Their names are labels; ended ones count until they are removed."""
    experiments = runner()
    for number in range(MAX_EXPERIMENTS):
        experiments.start(experiment(name=f"e{number}", models=(f"m{number}",)), NOW_S)
    with pytest.raises(ExperimentConflict, match="remove one"):
        experiments.start(experiment(name="f", models=("f",)), NOW_S)
    experiments.remove("e0", NOW_S)

    assert experiments.start(experiment(name="f", models=("f",)), NOW_S).is_running
    assert len(experiments.trials) == MAX_EXPERIMENTS


def test_what_ended_may_be_started_again() -> None:
    """As another start, without what was stopped before."""
    experiments = started()
    first = experiments.find("e").state
    experiments.stop("e", NOW_S + 1, "enough")
    second = experiments.start(experiment(), NOW_S + 2)

    assert second.id != first.id
    assert second.is_running


def test_a_stopped_arms_requests_wait_as_the_control_arms_do() -> None:
    """Its own queue, like its policy, is no longer tried."""
    a, b, c = arms(a=0.0, b=1.0, c=0.0)
    b = replace(b, queue=ArmQueue(mode="on"))
    experiments = started(experiment(arms=(a, b, c), design="switchback"))
    before = experiments.assign("m", DIGESTS[0], NOW_S)
    experiments.stop("e", NOW_S, "slow", arm="b")
    after = experiments.assign("m", DIGESTS[0], NOW_S)

    assert before is not None
    assert before.waits is True
    assert after is not None
    assert after.waits is None


def test_a_stopped_arm_leaves_its_traffic_to_the_control_policy() -> None:
    """Counted for no arm; with two others left the experiment goes on."""
    experiments = started(experiment(arms=arms(a=0.3, b=0.3, c=0.3)))
    before = {digest: arm_of(experiments, digest) for digest in DIGESTS[:100]}
    state = experiments.stop("e", NOW_S, "slow", arm="b")
    assert state.is_running
    for digest, arm in before.items():
        variant = experiments.assign("m", digest, NOW_S)
        if arm is None:
            assert variant is None
            continue
        assert variant is not None
        assignment = variant.record
        assert assignment.arm == arm
        assert assignment.not_counted == ("stopped" if arm == "b" else None)
        assert assignment.stop_reason == ("slow" if arm == "b" else None)
        assert assignment.control == "a"
        assert experiments.judge(assignment, NOW_S, is_error=True, ttft_s=9.0) is None
        assert variant.policy.name == ("kv_aware" if arm in "ab" else "random")
    assert experiments.stop("e", NOW_S + 9, "again", arm="b") == state  # said once
    with pytest.raises(ExperimentConflict, match="variant 'b' is stopped"):
        experiments.ramp("e", {"b": 0.1}, NOW_S)


@pytest.mark.parametrize("arm", ["a", "b"])
def test_an_experiment_with_one_arm_left_has_ended(arm: str) -> None:
    """Or without its control arm; the reason names the arm."""
    state = started().stop("e", NOW_S, "slow", arm=arm)

    assert state.ended is not None
    assert state.ended.reason == f"variant {arm}: slow"


def test_a_guardrail_stops_its_arm() -> None:
    """By what was observed; what other starts assigned is left out."""
    definition = experiment(guardrails=Guardrails(max_error_rate=0.1, min_samples=5))
    experiments = started(definition)
    digest = next(d for d in DIGESTS if arm_of(experiments, d) == "b")
    assignment = assign(experiments, "m", digest, NOW_S)
    assert assignment is not None
    stranger = replace(assignment, trial="another")
    for _ in range(50):
        assert experiments.judge(stranger, NOW_S, is_error=True, ttft_s=None) is None
        assert experiments.judge(assignment, NOW_S, is_error=None, ttft_s=None) is None
    found = [experiments.judge(assignment, NOW_S, is_error=True, ttft_s=None) for _ in range(9)]
    verdict = next(each for each in found if each is not None)

    state = experiments.find("e").state
    assert (verdict.arm, verdict.guardrail) == ("b", "errors")
    assert state.stopped["b"].guardrail == "errors"
    assert not state.is_running
    assert sum(each is not None for each in found) == 1


def test_evidence_outlives_a_ramp() -> None:
    """But not another start."""
    definition = experiment(guardrails=Guardrails(max_error_rate=0.1))
    experiments = started(definition)
    assignment = assign(experiments, "m", DIGESTS[0], NOW_S)
    assert assignment is not None
    experiments.judge(assignment, NOW_S, is_error=True, ttft_s=None)
    experiments.ramp("e", {"a": 0.4}, NOW_S)
    assert sum(r.num_samples for r in experiments.find("e").readings()) == 1
    experiments.stop("e", NOW_S, "enough")
    experiments.start(definition, NOW_S + 1)

    assert sum(r.num_samples for r in experiments.find("e").readings()) == 0


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"c": 0.1}, "no such variant; variants: a, b"),
        ({"a": 0.6}, "sum to 1.1"),
        ({"a": -0.1}, "not a share"),
        ({"a": float("nan")}, "not a share"),
    ],
)
def test_wrong_shares_are_refused(shares: dict[str, float], said: str) -> None:
    """And change nothing."""
    experiments = started()
    before = experiments.find("e").state
    with pytest.raises(ConfigError, match=said):
        experiments.ramp("e", shares, NOW_S)

    assert experiments.find("e").state == before


def test_orders_about_what_is_not_there_are_refused() -> None:
    """Unknown, removed, ended, and an arm that is none."""
    experiments = started()
    with pytest.raises(ConfigError, match="no such variant"):
        experiments.stop("e", NOW_S, "x", arm="c")
    with pytest.raises(UnknownExperiment, match="known: e"):
        experiments.ramp("f", {"a": 0.1}, NOW_S)
    experiments.stop("e", NOW_S, "enough")
    with pytest.raises(ExperimentConflict, match="has ended"):
        experiments.ramp("e", {"a": 0.1}, NOW_S)
    experiments.remove("e", NOW_S)
    with pytest.raises(UnknownExperiment, match="known: none"):
        experiments.find("e")


# -- other routers -------------------------------------------------------------------------------


def test_a_stop_on_one_router_stops_all() -> None:
    """Also on one that comes later, and on one that has ordered something else meanwhile."""
    one, other, late = started(), runner(), runner()
    shared(one, other)
    assert other.find("e").state == one.find("e").state
    other.ramp("e", {"a": 0.1}, NOW_S + 1)
    one.stop("e", NOW_S + 2, "slow", arm="b", guardrail="ttft")
    shared(one, other, late)

    for router in (one, other, late):
        state = router.find("e").state
        assert state.stopped["b"].guardrail == "ttft"
        assert len(state.changes) == 1
        assert not state.is_running
        assert not router.unsaved


def test_a_configured_experiment_is_one_start_on_all_routers() -> None:
    """The earliest; and what was stopped stays stopped when a router restarts."""
    one, other, again = runner(), runner(), runner()
    one.start(experiment(), NOW_S, configured=True)
    other.start(experiment(), NOW_S + 5, configured=True)
    shared(one, other)
    assert {r.find("e").state.started_s for r in (one, other)} == {NOW_S}
    one.stop("e", NOW_S + 9, "slow", arm="b")
    again.start(experiment(), NOW_S + 20, configured=True)
    shared(one, other, again)

    assert not again.find("e").state.is_running


def test_of_two_that_claim_alike_the_first_has_the_traffic() -> None:
    """Started at two routers at once; both see it so."""
    one, other = started(at_s=NOW_S + 1), started(experiment(name="f"), NOW_S)
    shared(one, other)

    for router in (one, other):
        assignment = assign(router, "m", DIGESTS[0], NOW_S + 2)
        assert assignment is not None
        assert assignment.experiment == "f"
        assert router.overruled_by(router.find("e")) == "f"
        assert router.overruled_by(router.find("f")) is None


def test_a_store_that_lost_a_state_gets_it_again() -> None:
    """What it has less is written anew; what is no experiment is left alone."""
    experiments = started()
    (state,) = experiments.unsaved.values()
    experiments.saved("e", state)
    experiments.stop("e", NOW_S, "slow", arm="b")
    (stopped,) = experiments.unsaved.values()
    experiments.saved("e", state)  # an older one: the newer one still is not
    assert experiments.unsaved == {"e": stopped}
    experiments.saved("e", stopped)
    assert experiments.apply({"e": state}, NOW_S) == ()

    assert experiments.unsaved == {"e": stopped}


def test_nonsense_in_the_store_is_not_followed() -> None:
    """A policy that is not known here, shares beyond 1, a foreign name."""
    good = State(id="1", definition=experiment(), started_s=NOW_S)
    unknown = experiment(arms=(Arm(name="a", policy="ours"), Arm(name="b", policy="random")))
    states = {
        "e": State(id="1", definition=unknown, started_s=NOW_S),
        "x": good,
    }
    experiments = runner()

    assert experiments.apply(states, NOW_S) == ()
    assert "'ours'" in str(refused("e", states["e"]))
    assert "is not its name" in str(refused("x", good))
    assert refused("e", good) is None
