"""Steps are filled as vLLM fills them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.emulator.block_manager import BlockManager, CachedSequence
from loadtest.emulator.scheduler import Request, Scheduler, Step
from router.contracts import NO_EXTRA, HashContract
from tests.effort import examples

CONTRACT = HashContract(algorithm="xxhash", block_size=4)


def make(
    num_blocks: int = 64, *, budget: int = 16, seats: int = 8, caching: bool = True
) -> tuple[Scheduler, BlockManager]:
    blocks = BlockManager(num_blocks, 4)
    scheduler = Scheduler(
        blocks, CONTRACT, max_num_batched_tokens=budget, max_num_seqs=seats, caching=caching
    )
    return scheduler, blocks


def request(
    token_ids: list[int], num_reply: int = 3, *, arrival_s: float = 0.0, caching: bool = True
) -> Request:
    digests: list[bytes] = []
    parent: bytes | None = None
    for start in range(0, len(token_ids) - 3, 4):
        _, parent = CONTRACT.extend(parent, token_ids[start : start + 4])
        assert parent is not None
        digests.append(parent)
    sequence = CachedSequence(list(token_ids), digests if caching else [])
    reply = list(range(100, 100 + num_reply))
    return Request(sequence, reply, extra=NO_EXTRA, arrival_s=arrival_s)


def shape(step: Step | None) -> list[int]:
    return [] if step is None else [num_tokens for _, num_tokens in step.chunks]


def run(scheduler: Scheduler, *, limit: int = 10_000) -> list[list[int]]:
    shapes = []
    while scheduler.has_requests() and len(shapes) < limit:
        step = scheduler.schedule(1e9)
        assert step is not None
        shapes.append(shape(step))
        scheduler.complete(step, 0.0)
    return shapes


def test_a_long_prompt_is_computed_in_chunks_while_others_decode_first() -> None:
    """Decodes take their token from the budget before the next chunk of a prompt."""
    scheduler, _ = make(budget=10)
    scheduler.add(request([1, 2, 3], num_reply=9))
    step = scheduler.schedule(0.0)
    assert step is not None
    assert shape(step) == [3]
    scheduler.complete(step, 0.0)
    scheduler.add(request(list(range(25)), num_reply=1))

    shapes = [shape(step := scheduler.schedule(0.0))]
    assert step is not None
    for _ in range(2):
        scheduler.complete(step, 0.0)
        shapes.append(shape(step := scheduler.schedule(0.0)))
        assert step is not None

    assert shapes == [[1, 9], [1, 9], [1, 7]]


def test_the_work_of_a_step_counts_tokens_pairs_and_decodes() -> None:
    """A chunk of 9 behind 9 computed tokens costs 9 * (9 + 4.5) pairs; a decode its context."""
    scheduler, _ = make(budget=10)
    scheduler.add(request([1, 2, 3], num_reply=9))
    scheduler.add(request(list(range(25)), num_reply=1))
    for _ in range(2):
        step = scheduler.schedule(0.0)
        assert step is not None
        scheduler.complete(step, 0.0)

    step = scheduler.schedule(0.0)

    assert step is not None
    assert (step.work.num_decodes, step.work.num_decode_context_tokens) == (1, 4)
    assert (step.work.num_prefill_tokens, step.work.num_prefill_pairs) == (9, 9 * (16 + 4.5))


def test_a_request_is_not_seen_before_it_arrives() -> None:
    """A step holds only what had arrived when it started."""
    scheduler, _ = make()
    scheduler.add(request([1], arrival_s=5.0))

    assert scheduler.schedule(4.9) is None
    assert scheduler.next_arrival_s() == 5.0
    assert shape(scheduler.schedule(5.0)) == [1]
    assert scheduler.next_arrival_s() is None


def test_a_known_prefix_is_not_computed_again_but_for_the_last_token() -> None:
    """The second request with the same 8 tokens computes 4: the last block holds the last one."""
    scheduler, _ = make()
    for _ in range(2):
        scheduler.add(request(list(range(8)), num_reply=1))
        run(scheduler)

    again = request(list(range(8)), num_reply=1)
    scheduler.add(again)

    assert run(scheduler) == [[4]]
    assert again.num_cached_tokens == 4
    assert again.num_created_tokens == 4
    assert scheduler.stats.num_cache_queries == 24
    assert scheduler.stats.num_cache_hits == 8


def test_generated_tokens_can_be_hit_but_for_the_last_one() -> None:
    """After 5 + 4 tokens, 8 are in the cache: the ninth was said but never computed."""
    scheduler, blocks = make()
    first = request([1, 2, 3, 4, 5], num_reply=4)
    scheduler.add(first)
    run(scheduler)

    follow_up = request([*first.sequence.token_ids, 7], num_reply=1)
    scheduler.add(follow_up)
    run(scheduler)

    assert follow_up.num_cached_tokens == 8
    assert blocks.usage == 0.0


def test_without_caching_everything_is_computed() -> None:
    """A scheduler that is not to cache finds nothing and stores nothing."""
    scheduler, blocks = make(caching=False)
    for _ in range(2):
        scheduler.add(request(list(range(8)), num_reply=9, caching=False))
        assert run(scheduler)[0] == [8]

    assert blocks.take_events() == []


def test_a_request_waits_until_its_whole_prompt_fits() -> None:
    """Admission counts the whole prompt, not its first chunk."""
    scheduler, _ = make(num_blocks=5, budget=4)
    scheduler.add(request([1] * 8, num_reply=1))
    scheduler.add(request([2] * 12, num_reply=1))

    assert run(scheduler) == [[4], [4], [4], [4], [4]]


def test_seats_are_limited() -> None:
    """No more than max_num_seqs requests run at once."""
    scheduler, _ = make(seats=1)
    scheduler.add(request([1], num_reply=2))
    scheduler.add(request([2], num_reply=1))

    assert run(scheduler) == [[1], [1], [1]]


def test_the_last_admitted_request_is_preempted_and_recomputed() -> None:
    """Where blocks run out, the later request loses its own, and says the same in the end."""
    scheduler, blocks = make(num_blocks=6)
    first, second = request([1] * 7, num_reply=9), request([2] * 7, num_reply=9)
    scheduler.add(first)
    scheduler.add(second)

    run(scheduler)

    assert scheduler.stats.num_preemptions > 0
    assert first.num_preemptions == 0
    for done in (first, second):
        assert done.sequence.token_ids[7:] == done.reply_ids
    assert blocks.num_free_blocks == blocks.num_usable_blocks


def test_a_request_can_preempt_itself() -> None:
    """The only running request that finds no block goes back to the queue."""
    scheduler, _ = make(num_blocks=3)
    alone = request([1] * 7, num_reply=2)
    scheduler.add(alone)
    step = scheduler.schedule(0.0)
    assert step is not None
    scheduler.complete(step, 0.0)
    thief = CachedSequence([1], [])
    alone.num_computed_tokens = 8  # as if a draft had filled the block
    alone.sequence.token_ids.append(5)

    assert scheduler.schedule(0.0) is None
    assert list(scheduler.waiting) == [alone]
    assert thief.blocks == []


def test_aborted_requests_leave_nothing() -> None:
    """Abort frees blocks of a running and drops a waiting request; a second one does nothing."""
    scheduler, blocks = make(seats=1)
    running, waiting = request([1] * 9), request([2] * 9)
    scheduler.add(running)
    scheduler.add(waiting)
    step = scheduler.schedule(0.0)
    assert step is not None

    for victim in (running, waiting, running):
        scheduler.abort(victim)

    assert scheduler.complete(step, 0.0) == []
    assert not scheduler.has_requests()
    assert blocks.usage == 0.0


def test_reset_is_refused_while_running_unless_it_may_preempt() -> None:
    """With preemption the cache goes, running requests start over, the step in flight is void."""
    scheduler, blocks = make()
    scheduler.add(request([1] * 9, num_reply=2))
    step = scheduler.schedule(0.0)
    assert step is not None

    assert not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(preempt=True)

    assert blocks.cached_digests() == {}
    assert scheduler.complete(step, 0.0) == []
    assert run(scheduler) == [[9], [1]]


@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 10)),
        min_size=1,
        max_size=12,
    ),
    budget=st.integers(1, 20),
    seats=st.integers(1, 6),
    num_blocks=st.integers(10, 30),
)
@settings(max_examples=examples(60))
def test_every_request_says_all_it_has_to_say(
    prompts: list[tuple[list[int], int]], budget: int, seats: int, num_blocks: int
) -> None:
    """Whatever the limits: all replies complete, no step over budget or seats, no block lost."""
    scheduler, blocks = make(num_blocks, budget=budget, seats=seats)
    requests = [request(tokens, num_reply) for tokens, num_reply in prompts]
    for each in requests:
        scheduler.add(each)

    shapes = run(scheduler)

    assert all(sum(step) <= budget and len(step) <= seats for step in shapes)
    for each in requests:
        assert each.finished
        assert each.sequence.token_ids[each.num_prompt_tokens :] == each.reply_ids
    assert blocks.num_free_blocks == blocks.num_usable_blocks
    assert scheduler.stats.num_generation_tokens == sum(n for _, n in prompts)
