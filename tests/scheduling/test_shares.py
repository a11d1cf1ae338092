from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.order import Shares

BOTH = ("a", "b")


def spent(shares: Shares) -> set[str]:
    return {caller for caller in BOTH if shares.is_spent(caller)}


def test_a_caller_that_used_its_share_is_spent_until_the_others_have_used_theirs() -> None:
    shares = Shares(100.0)

    assert shares.charge("a", 1.0, 150.0, BOTH)
    assert spent(shares) == {"a"}
    assert not shares.charge("b", 1.0, 60.0, BOTH)
    assert shares.charge("b", 1.0, 60.0, BOTH)  # the next round begins
    assert spent(shares) == set()
    assert shares.charge("a", 1.0, 50.0, BOTH)  # it used 50 of this round before
    assert spent(shares) == {"a"}


def test_a_caller_alone_is_never_spent() -> None:
    shares = Shares(100.0)

    assert not any(shares.charge("a", 1.0, 1e6, ("a",)) for _ in range(5))
    assert spent(shares) == set()


def test_a_caller_that_was_away_saved_nothing() -> None:
    shares = Shares(100.0)
    shares.charge("b", 1.0, 10.0, ("a",))
    for _ in range(50):
        shares.charge("a", 1.0, 100.0, ("a",))
    shares.charge("b", 1.0, 100.0, BOTH)

    assert spent(shares) == {"b"}


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=5),
    sizes=st.lists(st.floats(1.0, 400.0), min_size=5, max_size=5),
)
def test_callers_that_always_wait_compute_by_weight(
    weights: list[float], sizes: list[float]
) -> None:
    """The length of their prompts changes nothing over many rounds."""
    shares = Shares(100.0)
    names = [str(index) for index in range(len(weights))]
    done = dict.fromkeys(names, 0.0)
    for _ in range(400 * len(weights)):
        index = next(i for i, name in enumerate(names) if not shares.is_spent(name))
        done[names[index]] += sizes[index]
        before = [shares.is_spent(name) for name in names]
        has_changed = shares.charge(names[index], weights[index], sizes[index], names)
        after = [shares.is_spent(name) for name in names]
        assert has_changed is (before != after)
        assert not all(after)

    rates = [done[name] / weight for name, weight in zip(names, weights, strict=True)]
    assert max(rates) - min(rates) <= 100.0 + max(sizes) / min(weights)
