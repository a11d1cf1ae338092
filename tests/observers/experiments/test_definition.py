"""router.config.experiments: what is wrong with an experiment is said with the field's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from router import config
from router.base.errors import ConfigError
from router.config import experiment_file, experiment_of
from router.config.experiments import ArmQueue, Experiment, check_all, conflict
from tests.observers.experiments.samples import experiment

A = {"name": "a", "policy": "kv_aware"}
B = {"name": "b", "policy": "kv_aware", "params": {"alpha": 0}}


def load(**fields: Any) -> Experiment:
    """Read a definition as the configuration does."""
    tree = {"experiment": {"definitions": [{"name": "e", "arms": [A, B]} | fields]}}
    flags = {("experiment", "definitions"): tree["experiment"]["definitions"]}
    (found,) = config.load(flags=flags).experiment.definitions
    return found


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"arms": [A]}, "variants: must have at least 2 entries"),
        ({"arms": [A, A]}, "variants[1].name: 'a' is used twice"),
        ({"arms": [A, B | {"name": "a b"}]}, "variants[1].name: must consist of letters, digits"),
        ({"arms": [A, B | {"policy": "kv_awar"}]}, "variants[1].policy: unknown policy: 'kv_awar'"),
        ({"arms": [A, B | {"params": {"alpha": -1}}]}, "variants[1].policy: policy 'kv_aware'"),
        (
            {"arms": [A, B | {"share": 0.5}]},
            "variants[0].share: give all variants a share",
        ),
        ({"arms": [A | {"share": 0.6}, B | {"share": 0.5}]}, "variants[].share: shares sum to 1.1"),
        ({"arms": [A | {"share": 1.5}, B]}, "variants[0].share: must be at most 1, not 1.5"),
        ({"arms": [A | {"share": 0}, B | {"share": 0}]}, "no request takes part"),
        (
            {"arms": [A | {"replicas": ["r1"]}, B]},
            "was removed: use design switchback",
        ),
        ({"arms": [A | {"queue": {"mode": "on"}}, B]}, "variants[0].queue: only design switchback"),
        (
            {"arms": [A, B | {"queue": {"fill": -1}}]},
            "variants[1].queue.fill: must be at least 0.1",
        ),
        ({"control": "c"}, "control: 'c' is no variant: a, b"),
        ({"desing": "split"}, "did you mean 'design'? Allowed: name, variants"),
        ({"design": "partition"}, "must be split or switchback, not 'partition'"),
        ({"holdout": 1}, "holdout: must be at most 0.99, not 1"),
        ({"ramp": [{"after_s": 1, "shares": {"c": 1}}]}, "ramp[0].shares.c: no such variant"),
        ({"ramp": [{"after_s": 1, "shares": {"a": 0.9}}]}, "ramp[0].shares: shares sum to 1.4"),
        (
            {"ramp": [{"after_s": s, "shares": {"a": 0.1}} for s in (9, 3)]},
            "ramp[1].after_s: 3 comes before 9",
        ),
        ({"wash_out_s": 600}, "wash_out_s: must be less than slot_s, 600"),
        ({"slot_s": 0}, "slot_s: must be at least 0.1, not 0"),
        ({"guardrails": {"max_error_rate": 0}}, "max_error_rate: must be more than 0, not 0"),
        ({"guardrails": {"max_ttft_ratio": 0.5}}, "max_ttft_ratio: must be at least 1, not 0.5"),
        ({"guardrails": {"max_ttft": 3}}, "did you mean 'max_ttft_s'?"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], said: str) -> None:
    """Field and reason, in one line."""
    with pytest.raises(ConfigError) as caught:
        load(**fields)

    assert said in caught.value.message
    where, _, said = caught.value.message.partition(": ")
    assert where == "--experiment"
    assert said.startswith(("experiment.definitions", "unknown key 'experiment."))
    assert "\n" not in caught.value.message


def test_two_that_claim_the_same_are_refused() -> None:
    """The same name, all requests, or one model of several."""
    pairs = [
        ([experiment(), experiment(models=("m",))], "x[1].name: 'e' is x[0]'s name, too"),
        ([experiment(), experiment(name="f")], "'f' and 'e' (x[0]) both claim all requests"),
        (
            [experiment(models=("m", "n")), experiment(name="f", models=("n", "o"))],
            "both claim requests for n",
        ),
    ]
    for both, said in pairs:
        with pytest.raises(ConfigError) as caught:
            check_all(both, "x")
        assert said in caught.value.message
    check_all([experiment(models=("m",)), experiment(name="f", models=("n",))], "x")
    assert conflict(experiment(models=("m",)), experiment(models=("n",))) is None


def test_shares_are_equal_by_default() -> None:
    """Of what is not held out; they never sum to more."""
    third = [A, B, {"name": "c", "policy": "random"}]

    assert load().shares() == {"a": 0.5, "b": 0.5}
    assert load(holdout=0.1).shares() == {"a": 0.45, "b": 0.45}
    assert sum(load(arms=third).shares().values()) <= 1
    assert load(design="switchback", slot_s=50).wash_out == 5.0


def test_a_file_of_its_own_is_refused_with_what_to_do() -> None:
    """Where it is named: by a flag, or a variable."""
    with pytest.raises(ConfigError) as by_flag:
        config.load(flags={("experiment", "definitions"): ["greedy.yaml"]})
    with pytest.raises(ConfigError) as by_variable:
        config.load(environ={"WARMROUTE_EXPERIMENT_DEFINITIONS": "greedy.yaml"})

    for caught, where in (
        (by_flag, "--experiment: "),
        (by_variable, "WARMROUTE_EXPERIMENT_DEFINITIONS: "),
    ):
        said = caught.value.message
        assert said.startswith(f"{where}experiment.definitions[0]: 'greedy.yaml' must be a mapping")
        assert "run `warmroute experiments start FILE`" in said


def test_what_has_no_queue_is_written_as_before() -> None:
    """Routers of an older build refuse keys that they do not know."""
    plain = msgspec.to_builtins(load())
    queued = load(design="switchback", arms=[A, B | {"queue": {"fill": 0.5}}])

    assert all("queue" not in arm for arm in plain["arms"])
    assert queued.arms[1].queue == ArmQueue(fill=0.5)
    assert msgspec.convert(msgspec.to_builtins(queued), Experiment) == queued


@pytest.mark.parametrize("name", ["variants", "arms"])
def test_variants_are_read_under_both_names(name: str) -> None:
    """In a configuration and in a file of its own; records keep the earlier name."""
    definition = {"name": "e", name: [A, B]}

    (read,) = config.load(
        flags={("experiment", "definitions"): [definition]}
    ).experiment.definitions
    assert read == experiment_of(definition)
    assert [arm.name for arm in read.arms] == ["a", "b"]
    assert "arms" in msgspec.to_builtins(read)


def test_variants_under_both_names_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="variants: is there twice: remove arms"):
        experiment_of({"name": "e", "variants": [A, B], "arms": [A, B]})


@pytest.mark.parametrize("name", ["variants", "arms"])
def test_an_error_in_a_variant_has_its_line_under_both_names(tmp_path: Path, name: str) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(f"name: e\n{name}:\n- {{name: a, policy: random}}\n- {{name: b}}\n")

    with pytest.raises(ConfigError) as caught:
        experiment_file(file)

    assert caught.value.message == f"{file}:4: variants[1].policy: is missing"
