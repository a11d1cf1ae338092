"""router.observers.experiments.assignment: who gets which variant, the same on all routers."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from router.config.experiments import Experiment, VariantConfig
from router.observers.experiments.assignment import Trial
from router.records.record import AssignmentRecord

NOW_S = 1_800_000_000.0
DIGESTS = [random.Random(number).getrandbits(63) for number in range(4000)]
Shares = dict[str, float | None]
POLICIES = ("kv_aware", "least_loaded", "random")


def trial(at_s: float = NOW_S, shares: Shares | None = None, **fields: Any) -> Trial:
    variants = tuple(
        VariantConfig(name=name, policy=policy, share=share)
        for (name, share), policy in zip(
            (shares or {"a": None, "b": None}).items(), POLICIES, strict=False
        )
    )
    return Trial(Experiment(**{"name": "e", "variants": variants} | fields), at_s)


def switchback(at_s: float = NOW_S, **fields: Any) -> Trial:
    return trial(at_s, **{"design": "switchback", "slot_s": 60.0, "wash_out_s": 6.0} | fields)


def assign(
    given: Trial, digest: int | None, at_s: float = NOW_S, model: str = "m"
) -> AssignmentRecord | None:
    variant = given.assign(model, digest, at_s)
    return variant.record if variant is not None else None


def name_of(given: Trial, digest: int | None, at_s: float = NOW_S) -> str | None:
    assigned = assign(given, digest, at_s)
    return assigned.arm if assigned is not None else None


@pytest.mark.parametrize("shares", [{"a": 0.3, "b": 0.2}, {"a": 0.05, "b": 0.95}, {"a": 0, "b": 1}])
def test_sessions_are_split_by_their_shares(shares: Shares) -> None:
    """Each session has one variant, whenever it comes; what is left has none."""
    given = trial(shares=shares)
    found = Counter(name_of(given, digest) for digest in DIGESTS)

    for name, share in shares.items():
        assert abs(found[name] - 4000 * (share or 0)) < 100
    assert found == Counter(name_of(given, digest, NOW_S + 1e6) for digest in DIGESTS)


def test_experiments_do_not_share_their_draws() -> None:
    """Another name is another split, independent of the first."""
    first, other = trial(), trial(name="f")
    same = sum(name_of(first, digest) == name_of(other, digest) for digest in DIGESTS)

    assert 1800 < same < 2200


def test_what_is_not_in_scope_has_no_variant() -> None:
    """Other models, requests before the start, and what has no session."""
    given = trial(NOW_S + 10, models=("m",))

    assert assign(given, DIGESTS[0], NOW_S) is None
    assert assign(given, DIGESTS[0], NOW_S + 10, model="n") is None
    assert assign(given, None, NOW_S + 10) is None
    assert assign(given, DIGESTS[0], NOW_S + 10) is not None


def test_the_id_is_that_of_the_definition() -> None:
    assert trial().id == trial(NOW_S + 5).id
    assert len({trial().id, trial(start_at=5.0).id, trial(shares={"a": 0.5, "b": 0.5}).id}) == 3


def test_all_requests_of_a_slot_have_one_variant() -> None:
    """Sessions or not; the unit is the slot; half of the slots each."""
    given = switchback()
    first = int(NOW_S // 60) + 1
    found: Counter[str | None] = Counter()
    for slot in range(first, first + 1000):
        (assigned, *others) = [
            assign(given, digest, slot * 60.0 + at_s)
            for digest, at_s in ((None, 10.0), (DIGESTS[0], 20.0), (DIGESTS[1], 59.9))
        ]
        assert others == [assigned] * 2
        assert assigned is not None
        assert (assigned.unit, assigned.slot) == (str(slot), slot)
        assert assigned.arm == given.variant_of_slot(slot)
        found[assigned.arm] += 1

    assert abs(found["a"] - 500) < 60


def test_equal_variants_have_their_slots_in_blocks() -> None:
    """Each pair of slots has both variants, each three of three all; whenever it began."""
    first = int(NOW_S // 60) + 6 - int(NOW_S // 60) % 6
    for shares in ({"a": 0.5, "b": 0.5}, {"a": None, "b": None, "c": None}):
        one, other = switchback(shares=shares), switchback(NOW_S + 9, shares=shares)
        size = len(shares)
        drawn = [one.variant_of_slot(slot) for slot in range(first, first + 300)]

        blocks = [drawn[start : start + size] for start in range(0, 300, size)]
        assert all(set(block) == set(shares) for block in blocks)
        assert len({tuple(block) for block in blocks}) > 1
        assert drawn == [other.variant_of_slot(slot) for slot in range(first, first + 300)]


def test_unequal_variants_have_slots_drawn_apart() -> None:
    """By their shares; what is left belongs to none."""
    given = switchback(shares={"a": 0.6, "b": 0.1})
    found = Counter(given.variant_of_slot(slot) for slot in range(4000))
    later = range(30_000_001, 30_001_000)
    unowned = next(slot for slot in later if not given.variant_of_slot(slot))

    assert abs(found["a"] / 4000 - 0.6) < 0.05
    assert abs(found[None] / 4000 - 0.3) < 0.05
    assert assign(given, None, unowned * 60.0) is None


def test_the_beginning_of_a_slot_is_washed_out_if_the_variant_changes() -> None:
    """And the experiment's own beginning; not where a variant goes on."""
    given = switchback()
    first = int(NOW_S // 60)
    for slot in range(first + 1, first + 60):
        changes = given.variant_of_slot(slot) != given.variant_of_slot(slot - 1)
        early = assign(given, None, slot * 60.0 + 5.9)
        late = assign(given, None, slot * 60.0 + 6.1)
        assert early is not None
        assert late is not None
        assert early.not_counted == ("wash_out" if changes else None)
        assert late.not_counted is None
    begun = assign(given, None, NOW_S + 1)
    assert begun is not None
    assert begun.not_counted == "wash_out"
