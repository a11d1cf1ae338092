"""router.index.eviction: the order of last use, against a cache that evicts by it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.engine_model.blocks import Blocks, KvSequence
from router.base.contracts import BlockKey
from router.index.eviction import EvictionOrder, FirstLost, Use
from router.index.prefix import num_leading
from tests.effort import examples

SIZE = 4


def chain(*names: int) -> list[BlockKey]:
    """Name the blocks of a prompt: equal names behind equal names are one block."""
    return [BlockKey(hash(names[: i + 1]) & 0xFFFFFFFF) for i in range(len(names))]


A, B = chain(1, 2, 3), chain(1, 2, 4, 5)


def used(order: EvictionOrder, keys: Sequence[BlockKey], held: Sequence[BlockKey] = ()) -> Use:
    """Have a request begin and end."""
    use = order.begin(keys, held)
    order.end(use, 0.0)
    return use


def test_blocks_removed_twice_are_published_once() -> None:
    """Of a chain that has lost its tail the next block goes; one that lost all is forgotten."""
    order, other = EvictionOrder(), chain(7, 8)
    used(order, A)
    used(order, other, A)

    assert order.lost(1, [A[0], A[1], *other]) == (FirstLost(1, A[1]),)
    assert order.lost(1, other) == (FirstLost(1, other[1]),)
    order.begin(chain(9), other)
    assert len(order) == 1


def test_a_reply_goes_before_its_prompt() -> None:
    """Its blocks come while it runs and later; the next turn takes them, others' are not its."""
    order, held, other = EvictionOrder(), chain(1, 2, 3, 4), chain(7, 8)
    use = order.begin(held[:2], ())
    order.stored(held[1], held[2:3])
    order.end(use, 0.0)
    order.stored(held[2], held[3:])
    used(order, other, held)

    assert order.lost(2, [*held, *other]) == (FirstLost(2, held[2]),)
    used(order, held, [*held, *other])
    assert order.lost(1, [*held, *other]) == (FirstLost(1, other[1]),)
    order.stored(held[1], held[2:3])
    assert order.lost(3, [*held, *other])[-1] == FirstLost(3, held[3])


def test_a_reply_without_end_is_not_followed_for_ever() -> None:
    """An engine may say anything."""
    order, held = EvictionOrder(max_reply=3), chain(*range(9))
    use = used(order, held[:1], held)
    for parent, key in pairwise(held):
        order.stored(parent, [key])

    assert (len(use.keys), use.num_reply) == (5, 4)


def test_who_has_lost_everything_is_forgotten_behind_whom_never_goes() -> None:
    """Another router's requests keep blocks in use that are the oldest here; it was a leak."""
    order = EvictionOrder()
    held = [key for name in range(5) for key in chain(name, 0)]
    for name in range(5_000):
        used(order, chain(name, 0), held)

    assert 5 <= len(order) <= 300
    assert order.lost(1, held) == (FirstLost(1, held[1]),)


def test_a_text_that_many_ask_about_is_kept_once() -> None:
    """Each question had the keys of all of the text: 230 MiB of a cache of a million tokens."""
    order, text = EvictionOrder(), tuple(range(1000))
    held: list[BlockKey] = []
    uses: list[Use] = []
    for number in range(50):
        question = chain(*text, 1000 + number)
        held += question[1000:] if held else question
        uses.append(used(order, question, held))

    assert len(order) == 50
    assert sum(len(use.keys) for use in uses) <= len(text) + 50
    assert order.lost(2, held) == (FirstLost(1000, held[1000]), FirstLost(1000, held[1001]))
    assert order.lost(51, held)[-1] == FirstLost(999, held[999])


def test_of_those_that_ended_at_once_the_one_that_lost_its_tail_is_first() -> None:
    """The engine has begun with it."""
    order, other = EvictionOrder(), chain(7, 8, 9)
    used(order, A)
    used(order, other, A)

    assert order.lost(1, [*A, *other[:2]]) == (FirstLost(1, other[1]),)


def test_a_second_end_has_no_effect() -> None:
    """An empty prompt leaves nothing."""
    order = EvictionOrder()
    use = used(order, A)
    order.end(use, 0.0)
    used(order, [], A)

    assert (order.num_running, len(order)) == (0, 1)


def test_of_ends_that_come_at_once_the_one_that_brings_least_was_first() -> None:
    """Whichever comes first here; a stream that came as a whole says nothing, nor what is later."""
    order, chains = EvictionOrder(), [chain(name) for name in range(4)]
    held = [key for keys in chains for key in keys]
    uses = [order.begin(keys, held) for keys in chains]
    for use, parts in zip(uses, ((2, 1, 9), (2, 4), (5,), (2, 3)), strict=True):
        for num_events in parts:
            use.answered(num_events)
    for use, end_s in zip(uses, (1.0, 1.004, 1.004, 1.006), strict=True):
        order.end(use, end_s)

    lost = [order.lost(num_blocks, held)[-1].key for num_blocks in range(1, 5)]
    assert lost == [chains[number][0] for number in (1, 0, 2, 3)]


def test_one_that_nothing_is_left_of_keeps_no_other_from_its_place() -> None:
    """A sibling that runs has its blocks."""
    order, held = EvictionOrder(), [*A, *chain(7)]
    uses = order.begin(A, held), order.begin(A, held), order.begin(chain(7), held)
    for use, num_events in ((uses[0], 9), (uses[2], 3)):
        use.answered(1)
        use.answered(num_events)
        order.end(use, 1.0)

    assert order.lost(9, held) == (FirstLost(0, chain(7)[0]),)


@pytest.mark.parametrize(("num_events", "num_blocks"), [(0, 1), (2, 1), (3, 2), (90, 2)])
def test_an_answer_that_comes_to_the_next_block_takes_two(num_events: int, num_blocks: int) -> None:
    """Five tokens of prompt leave room for three; after two the engine is at the fourth.

    However many there seem to be it is two, for an event may be no token.
    """
    order, keys = EvictionOrder(), chain(1)
    other = order.begin(chain(2), keys)
    order.stored(chain(2)[0], chain(2, 3)[1:])
    order.end(other, 0.0)
    use = order.begin(keys, keys, 5)
    use.answered(num_events)

    assert order.num_open(SIZE) == num_blocks


def test_where_no_reply_is_seen_an_answer_takes_one() -> None:
    """Another router follows the engine: the blocks come, not whose they are."""
    order = EvictionOrder()
    order.begin(A, (), 14).answered(40)
    order.begin(B, ()).answered(40)

    assert order.num_open(SIZE) == 2


@settings(max_examples=examples(150))
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6, unique=True),
    dice=st.randoms(use_true_random=False),
    num_before=st.integers(0, 5),
)
def test_however_ends_come_at_once_the_order_is_the_engines(
    lengths: list[int], dice: Random, num_before: int
) -> None:
    """Answers that run together go on by a token a step, and are read after some steps."""
    order = EvictionOrder()
    held = [chain(length)[0] for length in lengths]
    uses = {length: order.begin(chain(length), held) for length in lengths}
    for length, use in uses.items():
        for _ in range(1 + num_before):
            use.answered(1)
        use.answered(length)
    for length in dice.sample(lengths, len(lengths)):
        order.end(uses[length], 1.0)

    lost = order.lost(len(lengths), held)
    assert [found.key for found in lost] == [chain(length)[0] for length in sorted(lengths)]


@settings(max_examples=examples(150))
@given(
    num_blocks=st.integers(8, 24),
    made=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=40),
    asked=st.lists(st.integers(3, 4), min_size=1, max_size=6),
)
def test_the_cache_evicts_what_was_expected(
    num_blocks: int, made: list[list[int]], asked: list[int]
) -> None:
    """One request after the other, whatever they share: the next one takes the blocks foretold."""
    cache = Blocks(num_blocks, SIZE)
    order = EvictionOrder()
    for names in made:
        keys = chain(*names)
        use = order.begin(keys, cache.cached_keys())
        held = KvSequence(list(keys), SIZE * len(keys) + 1)
        assert cache.allocate(held, held.num_tokens, cache.match(held))
        cache.free(held)
        order.end(use, 0.0)
    before = cache.cached_keys()
    new = KvSequence(chain(*asked), SIZE * len(asked) + 1)
    num_lost = len(before) + len(asked) + 1 - cache.num_usable_blocks
    lost = order.lost(num_lost, before) if num_lost > 0 else ()

    assert cache.allocate(new, new.num_tokens, cache.match(new))

    after = cache.cached_keys()
    for names in made:
        keys = chain(*names)
        num_left = num_leading(keys, before)
        for num_before, key in lost:
            if num_before < num_left and keys[num_before] == key:
                num_left = num_before
        assert num_leading(keys, after) == num_left


@settings(max_examples=examples(150))
@given(
    num_blocks=st.integers(8, 24),
    made=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.booleans()), max_size=20
    ),
    asked=st.lists(st.integers(0, 4), min_size=1, max_size=9),
)
def test_what_is_in_use_says_whether_a_prompt_can_begin(
    num_blocks: int, made: list[tuple[list[int], bool]], asked: list[int]
) -> None:
    """As the cache does that is asked for blocks of it, some requests over and some not."""
    cache = Blocks(num_blocks, SIZE)
    order = EvictionOrder()
    for names, is_over in made:
        keys = chain(*names)
        held = KvSequence(list(keys), SIZE * len(keys) + 1)
        if not cache.allocate(held, held.num_tokens, cache.match(held), whole=True):
            continue
        use = order.begin(keys, cache.cached_keys())
        if is_over:
            cache.free(held)
            order.end(use, 0.0)
    new = KvSequence(chain(*asked), SIZE * len(asked) + 1)
    num_free = cache.num_usable_blocks - order.num_in_use() - order.num_open(SIZE)
    num_needed = len(asked) + 1 - order.num_shared(chain(*asked))

    can_begin = cache.allocate(new, new.num_tokens, cache.match(new), whole=True)

    assert can_begin is (num_needed <= num_free)


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(0, 5)),
        max_size=16,
    )
)
def test_requests_at_once_leave_their_blocks_in_the_order_of_their_ends(
    made: list[tuple[list[int], int]],
) -> None:
    """Against a queue of free blocks as the engine's; each runs until some more have begun."""
    order, running, free = EvictionOrder(), dict[int, Use](), list[BlockKey]()
    held = {key for names, _ in made for key in chain(*names)}
    for now in range(len(made) + 6):
        if now < len(made):
            keys = chain(*made[now][0])
            running[now] = order.begin(keys, held)
            free = [key for key in free if key not in keys]
        for number in [each for each in running if each + made[each][1] <= now]:
            use = running.pop(number)
            order.end(use, float(now))
            in_use = {key for each in running.values() for key in each.keys}
            free += [key for key in reversed(use.keys) if key not in in_use]

        assert len(free) == len(set(free))
        for num_blocks in range(1, len(free) + 1):
            lost, found = set(free[:num_blocks]), order.lost(num_blocks, held)
            for names, _ in made[: now + 1]:
                keys = chain(*names)
                ends = [num for num, key in found if num < len(keys) and keys[num] == key]
                left = next((i for i, key in enumerate(keys) if key in lost), len(keys))
                assert min(ends, default=len(keys)) == left


def test_what_another_router_sent_has_its_place_in_the_chain() -> None:
    """It names the blocks that are computed there, and how many stand before them."""
    order, keys = EvictionOrder(), chain(1, 2, 3, 4, 5)
    used(order, keys[:3])
    order.end(order.begin(keys[3:], keys, num_cut=3), 1.0)

    assert order.lost(4, keys) == (FirstLost(0, keys[0]), FirstLost(4, keys[4]))

    running = order.begin(keys, keys)

    assert order.num_in_use() == 5
    assert order.num_shared(keys) == 5
    order.end(running, 2.0)
    assert order.lost(1, keys) == (FirstLost(4, keys[4]),)


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=6),
            st.integers(0, 5),
            st.integers(0, 6),
            st.booleans(),
        ),
        max_size=16,
    )
)
def test_wherever_a_router_says_that_blocks_stand_nothing_fails(
    made: list[tuple[list[int], int, int, bool]],
) -> None:
    """What it says of how many stand before them need not be true."""
    order, running = EvictionOrder(), list[Use]()
    held = {key for names, *_ in made for key in chain(*names)}
    for names, num_left_out, num_cut, ends in made:
        keys = chain(*names)
        running.append(order.begin(keys[num_left_out:], held, num_cut=num_cut))
        if ends:
            order.end(running.pop(0), 0.0)
        order.lost(3, held)
        assert 0 <= order.num_shared(keys) <= len(keys)
    for use in running:
        order.end(use, 1.0)

    assert order.num_running == order.num_in_use() == 0
