"""router.index.trails: a session's chain, from the events and the usage of its requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from policies.view import CandidateId
from router.contracts import BlockKey
from router.index.trails import Trails

R1, SIZE = CandidateId("r1"), 16


def stored(trails: Trails, parent: int | None, *keys: int, size: int = SIZE) -> None:
    """Have the session `s` store blocks behind another."""
    before = None if parent is None else BlockKey(parent)
    trails.stored(R1, "s", before, [BlockKey(key) for key in keys], size)


def answered(
    trails: Trails, num_prompt_tokens: int, *, reply: int = 1, cached: int | None = 0
) -> None:
    """Have an engine say what a request of `s` was."""
    trails.answered(
        "s",
        num_prompt_tokens=num_prompt_tokens,
        num_guessed_tokens=0,
        num_reply_tokens=reply,
        num_cached_tokens=cached,
    )


def expected(trails: Trails) -> Sequence[int]:
    """Return the blocks that the next prompt of `s` is expected to begin with."""
    trail = trails.get("s")
    assert trail is not None
    return list(trail.expected())


def followed() -> Trails:
    """Follow `s`."""
    trails = Trails()
    trails.follow("s")
    return trails


def test_blocks_join_behind_one_another() -> None:
    """A chunked prefill, a reply, and the next turn."""
    trails = followed()
    stored(trails, None, 1, 2)
    stored(trails, 2, 3)
    stored(trails, 3, 4)
    answered(trails, 50, reply=16)
    trails.follow("s")
    stored(trails, 4, 5, 6)

    assert expected(trails) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("parent", "keys"), [(2, (3, 4)), (None, (1, 2, 3, 4))])
def test_what_was_evicted_is_computed_again(parent: int | None, keys: Sequence[int]) -> None:
    """From where the hit ended, and from the beginning."""
    trails = followed()
    stored(trails, None, 1, 2, 3)
    stored(trails, parent, *keys)

    assert expected(trails) == [1, 2, 3, 4]


def test_what_another_session_stored_is_counted_by_usage() -> None:
    """The event's parent is the last of the blocks that were reused."""
    trails = followed()
    stored(trails, 7, 8, 9)
    before = expected(trails)
    answered(trails, 100, cached=64)
    trail = trails.get("s")

    assert before == []
    assert expected(trails) == [7, 8, 9]
    assert trail is not None
    assert trail.num_before == 3


def test_usage_may_come_before_the_events() -> None:
    """They are two connections: what was answered first is as well known."""
    trails = followed()
    answered(trails, 100, cached=64)
    stored(trails, 7, 8, 9)

    assert expected(trails) == [7, 8, 9]


def test_without_usage_nothing_is_known_of_such_a_beginning() -> None:
    """Nor after the next turn, whose usage is about another beginning."""
    trails = followed()
    stored(trails, 7, 8, 9)
    answered(trails, 100, cached=None)
    trails.follow("s")
    answered(trails, 120, cached=96)

    assert expected(trails) == []


@pytest.mark.parametrize("is_early", [False, True])
def test_a_reply_that_turns_do_not_go_on_with_is_left_out(is_early: bool) -> None:
    """As where reasoning is left out of what comes back."""
    trails = followed()
    stored(trails, None, 1, 2)
    stored(trails, 2, 3, 4)
    answered(trails, 40, reply=30)
    kept = expected(trails)
    trails.follow("s")
    if is_early:
        answered(trails, 50, reply=20)
    stored(trails, 2, 5)
    stored(trails, 5, 6)
    if not is_early:
        answered(trails, 50, reply=20)

    assert kept == [1, 2, 3, 4]
    assert expected(trails) == [1, 2, 5]


def test_a_prompt_that_is_written_anew_is_no_such_reply() -> None:
    """A compaction: the chain goes on from where they part."""
    trails = followed()
    stored(trails, None, 1, 2, 3)
    answered(trails, 50)
    trails.follow("s")
    stored(trails, 1, 4, 5, 6)
    answered(trails, 50, reply=16)

    assert expected(trails) == [1, 4, 5, 6]


@pytest.mark.parametrize("num_prompt_tokens", [20, 200])
def test_what_usage_contradicts_is_not_believed(num_prompt_tokens: int) -> None:
    """A request of the same session that was fully cached, or whose events did not come."""
    trails = followed()
    stored(trails, None, 1, 2, 3)
    answered(trails, num_prompt_tokens)

    assert expected(trails) == []


def test_a_number_of_cached_tokens_that_cannot_be_is_none() -> None:
    """Less than the block that was reused has."""
    trails = followed()
    stored(trails, 7, 8, 9)
    answered(trails, 100, cached=8)

    assert expected(trails) == []


def test_another_block_size_begins_anew() -> None:
    """Of the replica that the session moved to."""
    trails = followed()
    stored(trails, None, 1, 2, 3)
    stored(trails, None, 11, 12, size=32)

    assert expected(trails) == [11, 12]


def test_only_what_is_followed_is_kept() -> None:
    """Events name sessions that this router has not sent, and such as clients name."""
    trails = Trails()
    stored(trails, None, 1, 2)
    answered(trails, 40)
    none = trails.get("s")
    trails.follow("s").is_foreign = True
    stored(trails, None, 1, 2)

    assert none is None
    assert expected(trails) == []


def test_the_least_recent_session_goes_first() -> None:
    """Where there are too many, and where they have too many blocks."""
    trails = Trails(max_sessions=2, max_blocks=4)
    for name in ("s", "b", "s", "c"):
        trails.follow(name)
    kept = [name for name in ("s", "b", "c") if trails.get(name) is not None]
    stored(trails, None, 1, 2, 3, 4, 5)

    assert kept == ["s", "c"]
    assert [name for name in ("s", "c") if trails.get(name) is not None] == ["c"]


def test_one_session_cannot_keep_more_than_all_may() -> None:
    """It goes itself, and its blocks no longer count."""
    trails = Trails(max_blocks=4)
    trails.follow("s")
    stored(trails, None, *range(1, 6))
    gone = trails.get("s")
    trails.follow("s")
    stored(trails, None, 1, 2, 3, 4)

    assert gone is None
    assert expected(trails) == [1, 2, 3, 4]


def test_a_request_with_a_number_of_its_own_stores_for_its_session() -> None:
    """While names of images are learned from it, events name it so; the chain is its session's."""
    trails = followed()

    trails.stored(R1, "s-1f2e", None, [BlockKey(1)], SIZE)
    trails.stored(R1, "s-77aa", BlockKey(1), [BlockKey(2)], SIZE)
    trails.stored(R1, "t-77aa", BlockKey(2), [BlockKey(3)], SIZE)
    answered(trails, 2 * SIZE)

    assert expected(trails) == [1, 2]
