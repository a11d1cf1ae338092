"""Steps are filled as vLLM fills them, one by one or many at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from loadtest.engine_model.blocks import Blocks
from loadtest.engine_model.scheduler import Request, Scheduler, Step
from loadtest.engine_model.time_model import TimeModel
from loadtest.simulator import Setup
from loadtest.simulator import engine as simulated
from tests.effort import examples

SIZE = 4


def make(num_blocks: int = 64, *, budget: int = 16, seats: int = 8) -> tuple[Scheduler, Blocks]:
    blocks = Blocks(num_blocks, SIZE)
    return Scheduler(blocks, max_num_batched_tokens=budget, max_num_seqs=seats), blocks


def keys(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[:stop]) for stop in range(SIZE, len(tokens) + 1, SIZE)]


def request(
    tokens: list[int], num_reply: int = 3, *, arrival_s: float = 0.0, caching: bool = True
) -> Request:
    names = keys([*tokens, *range(100, 100 + num_reply)]) if caching else []
    return Request(names, len(tokens), num_reply, arrival_s=arrival_s)


def shape(step: Step | None) -> list[int]:
    return [] if step is None else [num_tokens for _, num_tokens in step.chunks]


def run(scheduler: Scheduler) -> list[list[int]]:
    shapes = []
    while (step := scheduler.schedule(1e9)) is not None:
        shapes.append(shape(step))
        scheduler.complete(step, 0.0)
    return shapes


def begin(scheduler: Scheduler) -> None:
    step = scheduler.schedule(0.0)
    assert step is not None
    scheduler.complete(step, 0.0)


def test_a_long_prompt_is_computed_in_chunks_while_others_decode_first() -> None:
    """Decodes take their token from the budget before the next chunk of a prompt."""
    scheduler, _ = make(budget=10)
    scheduler.add(request([1, 2, 3], num_reply=4))
    begin(scheduler)
    scheduler.add(request(list(range(25)), num_reply=1))

    assert run(scheduler) == [[1, 9], [1, 9], [1, 7]]


def test_the_work_of_a_step_counts_tokens_pairs_and_decodes() -> None:
    """A chunk of 9 behind 16 computed tokens costs 9 * (16 + 4.5) pairs; a decode its context."""
    scheduler, _ = make(budget=10)
    scheduler.add(request([1, 2, 3], num_reply=9))
    scheduler.add(request(list(range(25)), num_reply=1))
    for _ in range(2):
        begin(scheduler)

    step = scheduler.schedule(0.0)

    assert step is not None
    assert (step.work.num_decodes, step.work.num_decode_context_tokens) == (1, 4)
    assert (step.work.num_prefill_tokens, step.work.num_prefill_pairs) == (9, 9 * (16 + 4.5))


def test_a_request_is_not_seen_before_it_arrives() -> None:
    """A step has only the requests that had arrived when it started."""
    scheduler, _ = make()
    scheduler.add(request([1], arrival_s=5.0))

    assert scheduler.schedule(4.9) is None
    assert scheduler.next_arrival_s() == 5.0
    assert shape(scheduler.schedule(5.0)) == [1]
    assert scheduler.next_arrival_s() is None


def test_a_known_prefix_is_not_computed_again_but_for_the_last_token() -> None:
    """The second request with the same 8 tokens computes 4: the last block has the last token."""
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
    scheduler.add(request([1, 2, 3, 4, 5], num_reply=4))
    run(scheduler)

    follow_up = request([1, 2, 3, 4, 5, 100, 101, 102, 103, 7], num_reply=1)
    scheduler.add(follow_up)
    run(scheduler)

    assert follow_up.num_cached_tokens == 8
    assert blocks.usage == 0.0


def test_without_caching_everything_is_computed() -> None:
    """A request without keys finds nothing and stores nothing."""
    scheduler, blocks = make()
    for _ in range(2):
        scheduler.add(request(list(range(8)), num_reply=9, caching=False))
        assert run(scheduler)[0] == [8]

    assert blocks.take_changes() == []


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
    """If blocks run out, the later request loses its own, and is computed again."""
    scheduler, blocks = make(num_blocks=6)
    first, second = request([1] * 7, num_reply=9), request([2] * 7, num_reply=9)
    scheduler.add(first)
    scheduler.add(second)

    run(scheduler)

    assert (first.num_preemptions, second.num_preemptions) == (0, scheduler.stats.num_preemptions)
    assert second.num_preemptions > 0
    assert first.finished
    assert second.finished
    assert blocks.num_free_blocks == blocks.num_usable_blocks


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
    assert scheduler.running == []
    assert not scheduler.waiting
    assert blocks.usage == 0.0


def test_reset_is_refused_while_running_unless_it_may_preempt() -> None:
    """With preemption the cache goes, running requests start over, the step in flight is void."""
    scheduler, blocks = make()
    scheduler.add(request([1] * 9, num_reply=2))
    step = scheduler.schedule(0.0)
    assert step is not None

    assert not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(preempt=True)

    assert blocks.cached_keys() == {}
    assert scheduler.complete(step, 0.0) == []
    assert run(scheduler) == [[9], [1]]


# -- many steps at once ----------------------------------------------------------------------------


class Asked(Struct, frozen=True):
    """One request: when, its tokens, and how many tokens it says."""

    arrival_s: float
    tokens: list[int]
    num_reply: int


class Outcome(Struct, frozen=True):
    """What happened to requests, in the order of their arrival."""

    first_token_s: list[float | None]
    end_s: list[float]
    num_cached_tokens: list[int]
    num_preemptions: list[int]
    cache: dict[object, int]
    num_evicted: int
    num_steps: int
    between_tokens_s: float


TIME = TimeModel(
    base_ms=7.0,
    ms_per_prefill_token=0.3,
    ms_per_mtoken2=90.0,
    ms_per_decode=0.11,
    ms_per_mtoken_context=4000.0,
)


def requests_of(asked: Sequence[Asked]) -> list[simulated.Request]:
    made = []
    for number, one in enumerate(asked):
        reply = [1000 * (number + 1) + position for position in range(one.num_reply)]
        names = keys([*one.tokens, *reply])
        made.append(simulated.Request(names, len(one.tokens), one.num_reply))  # type: ignore[arg-type]
    return made


def stepped(asked: Sequence[Asked], num_blocks: int, budget: int, seats: int) -> Outcome:
    """Step by step, as the emulator does; a step has what had arrived when it began."""
    scheduler, blocks = make(num_blocks, budget=budget, seats=seats)
    requests = requests_of(asked)
    for one, made in zip(asked, requests, strict=True):
        made.arrival_s = one.arrival_s
        scheduler.add(made)
    now_s = 0.0
    end_s = dict.fromkeys(requests, 0.0)
    while scheduler.running or scheduler.waiting:
        step = scheduler.schedule(now_s)
        if step is None:
            now_s = scheduler.next_arrival_s() or now_s
            continue
        now_s += TIME.step_s(step.work)
        for answered in scheduler.complete(step, now_s):
            assert isinstance(answered, simulated.Request)
            end_s[answered] = now_s
    return outcome(requests, list(end_s.values()), blocks, scheduler)


def leapt(asked: Sequence[Asked], num_blocks: int, budget: int, seats: int) -> Outcome:
    """As many steps at once as possible, as the simulator does."""
    setup = Setup(
        num_replicas=1,
        num_blocks=num_blocks - 1,
        time_model=TIME,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
    )
    requests = requests_of(asked)
    end_s = dict.fromkeys(requests, 0.0)
    engine = simulated.Engine(
        setup, 0, SIZE, None, None, lambda made, now_s: None, end_s.__setitem__
    )
    arrivals = [(one.arrival_s, made) for one, made in zip(asked, requests, strict=True)][::-1]
    while arrivals or engine.end_s is not None:
        if arrivals and (engine.end_s is None or arrivals[-1][0] <= engine.end_s):
            now_s, made = arrivals.pop()
            engine.arrive(made, now_s)
            if not (arrivals and arrivals[-1][0] == now_s):
                engine.wake(now_s)
        else:
            assert engine.end_s is not None
            engine.complete(engine.end_s)
    assert engine.is_empty
    return outcome(requests, list(end_s.values()), engine.blocks, engine)


def outcome(
    requests: Sequence[Request],
    end_s: list[float],
    blocks: Blocks,
    engine: Scheduler | simulated.Engine,
) -> Outcome:
    assert blocks.num_free_blocks == blocks.num_usable_blocks
    assert all(made.finished for made in requests)
    return Outcome(
        first_token_s=[made.first_token_s for made in requests],
        end_s=end_s,
        num_cached_tokens=[made.num_cached_tokens for made in requests],
        num_preemptions=[made.num_preemptions for made in requests],
        cache=blocks.cached_keys(),
        num_evicted=blocks.num_evicted,
        num_steps=engine.stats.num_steps,
        between_tokens_s=engine.stats.between_tokens_s,
    )


@st.composite
def workloads(draw: st.DrawFn) -> list[Asked]:
    arrival_s = 0.0
    asked = []
    for number in range(draw(st.integers(1, 14))):
        # Never quite at the end of a step: there, the last bit of a sum decides who is in it.
        arrival_s += draw(st.sampled_from([0.0, 0.00137, 0.0213, 0.3171, 2.7183]))
        groups = draw(st.lists(st.integers(0, 1), max_size=3))
        tokens = [token for group in groups for token in [group] * (2 * SIZE)]
        tokens += [50 + number] * draw(st.integers(1, 45))
        asked.append(Asked(arrival_s, tokens, draw(st.integers(1, 40))))
    return asked


@given(
    asked=workloads(),
    num_blocks=st.sampled_from([30, 45, 60, 200]),
    budget=st.sampled_from([8, 33, 64, 500]),
    seats=st.integers(1, 8),
)
@settings(max_examples=examples(120), deadline=None)
def test_many_steps_at_once_are_what_single_steps_are(
    asked: list[Asked], num_blocks: int, budget: int, seats: int
) -> None:
    """Any requests on any small engine, preemption included; times are equal to a billionth."""
    expected = stepped(asked, num_blocks, budget, seats)
    found = leapt(asked, num_blocks, budget, seats)

    for name in Outcome.__struct_fields__:
        one, other = getattr(found, name), getattr(expected, name)
        if name.endswith("_s"):
            assert one == pytest.approx(other, rel=1e-9), name
        else:
            assert one == other, name
