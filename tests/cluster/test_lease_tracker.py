"""router.cluster.peers: what another router has open, whatever happens to its notes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.cluster.peers import LeaseTracker


def tracker_of(*numbers: int) -> LeaseTracker[int]:
    made: LeaseTracker[int] = LeaseTracker()
    for number in numbers:
        begin(made, number)
    return made


def begin(made: LeaseTracker[int], number: int) -> bool:
    can = made.can_begin(number)
    if can:
        made.begin(number, number)
    return can


def join(made: LeaseTracker[int], numbers: set[int], last: int) -> list[int]:
    for number in sorted(numbers):
        begin(made, number)
    return made.joined(numbers, last)


def test_a_begin_received_twice_is_one_lease() -> None:
    """Nor does it begin again once it has ended."""
    made = tracker_of(1)

    assert not begin(made, 1)
    assert made.end(1) == 1
    assert not begin(made, 1)
    assert made.open == {}


def test_an_end_without_a_begin_is_ignored() -> None:
    """And a begin that comes after it is an old one."""
    made = tracker_of()

    assert made.end(7) is None
    assert not begin(made, 7)


def test_what_was_lost_is_missing_until_it_is_received() -> None:
    """A listed lease that is unknown here; other old ones stay over."""
    made = tracker_of(1)
    made.keep({1, 3}, 4)
    assert made.missing == {3}

    assert not begin(made, 2)
    assert begin(made, 3)
    assert (made.missing, set(made.open)) == (set(), {1, 3})


def test_a_heartbeat_received_again_brings_nothing_back() -> None:
    """Neither what ended since, nor an older list of what is missing."""
    made = tracker_of(1, 2)
    made.keep({1, 2}, 2)
    made.end(1)
    assert made.keep({1, 2}, 2) == []
    assert (made.missing, set(made.open)) == (set(), {2})

    begin(made, 3)
    made.keep({3}, 3)
    assert made.keep({1, 2}, 2) == []
    assert (made.missing, set(made.open)) == (set(), {3})


def test_an_old_load_brings_back_nothing() -> None:
    """What ended since it was made stays ended, whether by a note or by a heartbeat."""
    made = tracker_of(1, 2, 3)
    made.end(1)
    made.keep({3}, 3)

    assert join(made, {1, 2}, 2) == []
    assert set(made.open) == {3}


Action = tuple[str, int]


@given(st.lists(st.tuples(st.sampled_from("bbbeah"), st.integers(0, 9)), max_size=60), st.data())
def test_in_the_end_all_agree(actions: list[Action], data: st.DataObject) -> None:
    """Notes lost, received again, loads at any moment: a last load repairs all.

    And at no time is a lease open here that the other had ended before the last heartbeat received.
    """
    truth: set[int] = set()
    last = 0
    log: list[tuple[str, object]] = []
    loads: list[tuple[set[int], int]] = [(set(), 0)]
    for kind, which in actions:
        if kind == "b":
            last += 1
            truth.add(last)
            log.append(("begin", last))
        elif kind == "e" and truth:
            number = sorted(truth)[which % len(truth)]
            truth.discard(number)
            log.append(("end", number))
        elif kind == "a":
            log.append(("alive", (frozenset(truth), last)))
        else:
            loads.append((set(truth), last))
    made = tracker_of()
    position = 0
    while position < len(log):
        step = data.draw(st.sampled_from(["note", "note", "note", "lose", "again", "load"]))
        if step == "again":
            position = data.draw(st.integers(0, position))
        elif step == "load":
            join(made, *data.draw(st.sampled_from(loads)))
            if data.draw(st.booleans()):
                position += 1
        else:
            kind, what = log[position]
            position += 1
            if step == "lose":
                continue
            if kind == "begin":
                begin(made, what)  # type: ignore[arg-type]
            elif kind == "end":
                made.end(what)  # type: ignore[arg-type]
            else:
                listed, up_to = what  # type: ignore[misc]
                made.keep(listed, up_to)
                assert not {n for n in made.open if n <= up_to} - listed

    made.keep(truth, last)
    assert set(made.open) | made.missing == truth
    assert not set(made.open) & made.missing
    join(made, truth, last)
    assert set(made.open) == truth
    assert not made.missing
