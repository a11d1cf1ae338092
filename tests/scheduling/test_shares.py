from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.shares import Shares


def test_a_tenant_that_has_taken_its_part_is_spent_until_the_others_have() -> None:
    """Who takes more than its part waits for those who have some left; then all begin anew."""
    shares = Shares(100.0)
    both = ("a", "b")

    assert shares.charge("a", 1.0, 150.0, both) == ["a"]
    assert shares.is_spent("a")
    assert shares.charge("b", 1.0, 60.0, both) == []
    assert sorted(shares.charge("b", 1.0, 60.0, both)) == ["a"]  # b is spent, and not any more
    assert not shares.is_spent("a")
    assert not shares.is_spent("b")
    assert shares.charge("a", 1.0, 50.0, both) == ["a"]  # 50 of this round were taken before


def test_a_tenant_alone_is_never_spent() -> None:
    """There is no other to go behind."""
    shares = Shares(100.0)

    assert [shares.charge("a", 1.0, 1e6, ("a",)) for _ in range(5)] == [[]] * 5
    assert not shares.is_spent("a")


def test_who_was_away_has_one_part_and_no_more() -> None:
    """What was not taken while it did not wait is gone."""
    shares = Shares(100.0)
    shares.charge("b", 1.0, 10.0, ("a",))
    for _ in range(50):
        shares.charge("a", 1.0, 100.0, ("a",))

    assert shares.charge("b", 1.0, 100.0, ("a", "b")) == ["b"]


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=5),
    sizes=st.lists(st.floats(1.0, 400.0), min_size=5, max_size=5),
)
def test_all_who_always_wait_get_their_parts(weights: list[float], sizes: list[float]) -> None:
    """However long their prompts are, over many rounds each computes as its weight says."""
    shares = Shares(100.0)
    names = [str(index) for index in range(len(weights))]
    done = dict.fromkeys(names, 0.0)
    spent = dict.fromkeys(names, False)
    for _ in range(400 * len(weights)):
        index = min(range(len(names)), key=lambda i: (spent[names[i]], i))
        name = names[index]
        done[name] += sizes[index]
        for other in shares.charge(name, weights[index], sizes[index], names):
            spent[other] = not spent[other]
        assert all(spent[each] is shares.is_spent(each) for each in names)
        assert not all(spent.values())

    rates = [done[name] / weight for name, weight in zip(names, weights, strict=True)]
    assert max(rates) - min(rates) <= 100.0 + max(sizes) / min(weights)
