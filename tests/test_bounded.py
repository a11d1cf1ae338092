from __future__ import annotations

from msgspec import Struct

from router.base.bounded import Backlog, Bounded, BoundedBytes


class Sized(Struct):
    size_bytes: int


def test_the_oldest_entry_makes_room() -> None:
    """An entry is as old as its last `put` or `use`; a look at it changes nothing."""
    kept: Bounded[str, int] = Bounded(3)
    for number, key in enumerate("abc"):
        assert kept.put(key, number) == ()
    assert kept.put("a", 10) == ()
    assert kept.use("b") == 1
    assert kept.get("c") == 2

    assert list(kept.put("d", 4)) == [2]
    assert list(kept.items()) == [("a", 10), ("b", 1), ("d", 4)]
    assert kept.use("c") is None
    assert kept.num_evicted == 1


def test_entries_are_kept_up_to_so_many_bytes() -> None:
    """A replaced, removed or evicted entry counts no more."""
    kept: BoundedBytes[str, Sized] = BoundedBytes(100)
    old = Sized(60)
    kept.put("a", old)
    kept.put("b", Sized(30))
    kept.put("a", Sized(50))
    assert kept.size_bytes == 80
    kept.remove("b")
    kept.remove("b")
    assert kept.size_bytes == 50

    kept.put("c", Sized(20))
    evicted = kept.put("d", Sized(90))
    assert [each.size_bytes for each in evicted] == [50, 20]
    assert (kept.size_bytes, kept.num_evicted) == (90, 2)
    kept.clear()
    assert (len(kept), kept.size_bytes) == (0, 0)


def test_an_entry_that_grew_is_evicted_in_time() -> None:
    kept: BoundedBytes[str, Sized] = BoundedBytes(100)
    first = Sized(60)
    kept.put("a", first)
    kept.put("b", Sized(30))
    first.size_bytes += 30
    kept.size_bytes += 30

    assert list(kept.trim()) == [first]
    assert kept.size_bytes == 30


def test_an_entry_that_is_larger_than_the_bound_is_not_kept() -> None:
    """It evicts all others before: they were older."""
    kept: BoundedBytes[str, Sized] = BoundedBytes(100)
    kept.put("a", Sized(1))

    assert [each.size_bytes for each in kept.put("b", Sized(101))] == [1, 101]
    assert (len(kept), kept.size_bytes) == (0, 0)


def test_a_full_backlog_drops_what_is_offered() -> None:
    """What waits stays, in its order."""
    waiting: Backlog[int] = Backlog(3)

    assert [waiting.offer(number) for number in range(5)] == [True, True, True, False, False]
    assert waiting.num_dropped == 2
    assert waiting.take(2) == [0, 1]
    assert waiting.offer(5)
    assert waiting.take() == [2, 5]
    assert waiting.take() == []


def test_the_oldest_item_makes_room_for_one_that_is_pushed() -> None:
    waiting: Backlog[int] = Backlog(3)
    for number in range(5):
        waiting.push(number)

    assert waiting.num_dropped == 2
    assert waiting.take() == [2, 3, 4]
