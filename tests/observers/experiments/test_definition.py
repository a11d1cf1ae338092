"""router.config.experiments: what is wrong with an experiment is said with the key's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router import config
from router.base.errors import ConfigError
from router.config.experiments import Experiment, VariantQueue

A = {"name": "a", "policy": "kv_aware"}
B = {"name": "b", "policy": "kv_aware:alpha=0"}


def load(**fields: Any) -> Experiment:
    """Read a definition as the configuration does."""
    flags = {("experiment",): {"name": "e", "variants": [A, B]} | fields}
    found = config.load(flags=flags).experiment
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"variants": [A]}, "variants: must have at least 2 entries"),
        ({"variants": [A, A]}, "variants[1].name: 'a' is used twice"),
        ({"variants": [A, B | {"name": "a b"}]}, "variants[1].name: must consist of letters"),
        ({"variants": [A, B | {"policy": "kv_awar"}]}, "variants[1].policy: unknown policy"),
        ({"variants": [A, B | {"policy": "kv_aware:alpha=-1"}]}, "variants[1].policy: policy 'kv"),
        ({"variants": [A, {"name": "b"}]}, "variants[1].policy: is missing"),
        ({"variants": [A, B | {"share": 0.5}]}, "variants[0].share: give all variants a share"),
        ({"variants": [A | {"share": 0.6}, B | {"share": 0.5}]}, "shares sum to 1.1"),
        ({"variants": [A | {"share": 0}, B | {"share": 0}]}, "shares sum to 0; above 0"),
        ({"variants": [A | {"share": 1.5}, B]}, "variants[0].share: must be at most 1, not 1.5"),
        (
            {"variants": [A, B | {"policy": "kv_aware:queue.mode=off"}]},
            "variants[1].policy: only design switchback has a queue",
        ),
        (
            {"variants": [A, B | {"policy": "kv_aware:queue.fil=1"}], "design": "switchback"},
            "variants[1].policy: unknown parameter 'queue.fil'; did you mean 'queue.fill'?",
        ),
        (
            {"variants": [A, B | {"policy": "kv_aware:queue.fill=99"}], "design": "switchback"},
            "variants[1].policy: queue: ",
        ),
        ({"desing": "split"}, "did you mean 'design'? (allowed: name, variants"),
        ({"design": "partition"}, "must be split or switchback, not 'partition'"),
        ({"design": "switchback", "slot_s": 5, "wash_out_s": 5}, "must be less than slot_s, 5"),
        ({"slot_s": 0}, "slot_s: must be at least 0.1, not 0"),
        ({"guardrails": {"max_error_rate": 0.1}}, "was removed: use the alert VariantWorse"),
        ({"variants": [A, B | {"params": {}}]}, "was removed: write them into the policy"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**fields)

    assert said in caught.value.message
    assert "experiment." in caught.value.message
    assert "\n" not in caught.value.message


def test_definitions_in_a_list_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="was removed: there is one experiment; write its keys"):
        config.load(flags={("experiment",): {"definitions": [{"name": "e", "variants": [A, B]}]}})


def test_shares_are_equal_by_default() -> None:
    third = [A, B, {"name": "c", "policy": "random"}]

    assert load().shares() == {"a": 0.5, "b": 0.5}
    assert sum(load(variants=third).shares().values()) <= 1
    assert load(design="switchback", slot_s=50).wash_out == 5.0


def test_a_policy_in_text_has_its_queue() -> None:
    """As in `warmroute compare`: any of its keys switches the queue on."""
    policies = ("kv_aware:queue.mode=off", "kv_aware:queue.fill=0.5:alpha=2", "random")
    variants = [{"name": f"v{i}", "policy": policy} for i, policy in enumerate(policies)]
    made = [each.made() for each in load(design="switchback", variants=variants).variants]

    assert [queue for _, queue in made] == [
        VariantQueue(mode="off"),
        VariantQueue(mode="on", fill=0.5),
        None,
    ]
    assert getattr(made[1][0], "alpha") == 2  # noqa: B009  (a parameter of this policy alone)


def test_an_error_in_a_variant_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "warmroute.yaml"
    file.write_text(
        "experiment:\n  name: e\n  variants:\n  - {name: a, policy: random}\n  - {name: b}\n"
    )

    with pytest.raises(ConfigError) as caught:
        config.load(file)

    assert caught.value.message == f"{file}:5: experiment.variants[1].policy: is missing"
