"""router.index.running: what requests have in use, against a cache that has them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.engine_model.blocks import Blocks, KvSequence
from router.base.contracts import BlockKey
from router.index.running import Running, Use
from tests.effort import examples

SIZE = 4


def chain(*names: int) -> list[BlockKey]:
    """Name the blocks of a prompt: equal names behind equal names are one block."""
    return [BlockKey(hash(names[: i + 1]) & 0xFFFFFFFF) for i in range(len(names))]


def test_a_second_end_has_no_effect() -> None:
    """Nor has the end of a request that another one has replaced."""
    running = Running()
    use, other = running.begin(chain(1, 2, 3)), running.begin([])
    running.end(use)
    running.end(use)

    assert (len(running), running.num_in_use()) == (1, 1)
    running.end(other)
    assert (len(running), running.num_in_use()) == (0, 0)


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(0, 5)),
        max_size=16,
    )
)
def test_each_block_counts_once_however_requests_begin_and_end(
    made: list[tuple[list[int], int]],
) -> None:
    """Each runs until some more have begun, and all then use the union of their chains."""
    running, uses = Running(), dict[int, Use]()
    for now in range(len(made) + 6):
        if now < len(made):
            uses[now] = running.begin(chain(*made[now][0]))
        for number in [each for each in uses if each + made[each][1] <= now]:
            running.end(uses.pop(number))
        in_use = {key for use in uses.values() for key in use.keys}

        assert running.num_in_use() == len(in_use) + len(uses)
        for names, _ in made:
            keys = chain(*names)
            num_shared = next((i for i, key in enumerate(keys) if key not in in_use), len(keys))
            assert running.num_shared(keys) == num_shared


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
    running = Running()
    for names, is_over in made:
        keys = chain(*names)
        held = KvSequence(list(keys), SIZE * len(keys) + 1)
        if not cache.allocate(held, held.num_tokens, cache.match(held), whole=True):
            continue
        use = running.begin(keys)
        if is_over:
            cache.free(held)
            running.end(use)
    new = KvSequence(chain(*asked), SIZE * len(asked) + 1)
    num_free = cache.num_usable_blocks - running.num_in_use()
    num_needed = len(asked) + 1 - running.num_shared(chain(*asked))

    can_begin = cache.allocate(new, new.num_tokens, cache.match(new), whole=True)

    assert can_begin is (num_needed <= num_free)
