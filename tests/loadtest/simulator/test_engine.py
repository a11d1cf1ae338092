"""The simulated engine against the emulator's own scheduler and block manager."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from loadtest.emulator import scheduler as emulated
from loadtest.emulator.block_manager import BlockManager, CachedSequence
from loadtest.emulator.time_model import PRESETS, TimeModel
from loadtest.simulator.blocks import Blocks
from loadtest.simulator.engine import Engine, Request
from router.contracts import NO_EXTRA, BlockKey, HashContract, block_key
from router.kv_events.wire import BlockRemoved, BlockStored
from tests.effort import examples

CONTRACT = HashContract(algorithm="xxhash_cbor", block_size=8)
SIZE = CONTRACT.block_size
TIME = TimeModel(
    base_ms=7.0,
    ms_per_prefill_token=0.3,
    ms_per_mtoken2=90.0,
    ms_per_decode=0.11,
    ms_per_mtoken_context=4000.0,
)


class Asked(Struct, frozen=True):
    """One request: when, what prefix groups of blocks, how many tokens more, how many out."""

    arrival_s: float
    groups: tuple[int, ...]
    num_more: int
    num_output_tokens: int


class Engines(Struct, frozen=True, kw_only=True):
    num_blocks: int = 60
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 6


class Outcome(Struct, frozen=True):
    """What happened, in the same words for both; `names` are what each calls its blocks."""

    first_token_s: list[float]
    end_s: list[float]
    num_cached_tokens: list[int]
    num_preemptions: list[int]
    order: list[tuple[str, int]]
    changes: list[tuple[bool, object]]
    num_free_blocks: int
    num_steps: int
    num_between_tokens: int
    between_tokens_s: float
    keys: list[list[object]]


def tokens_of(index: int, asked: Asked) -> tuple[list[int], list[int]]:
    """Spell a request: prompt tokens, with equal groups of blocks equal, and reply tokens."""
    prompt: list[int] = []
    for depth, group in enumerate(asked.groups):
        prompt += [1_000 + 97 * depth + 1009 * group + i for i in range(2 * SIZE)]
    own = 1_000_000 * (index + 1)
    prompt += [own + i for i in range(asked.num_more)]
    return prompt, [own + 500_000 + i for i in range(asked.num_output_tokens)]


def emulate(requests: list[Asked], engines: Engines, time_model: TimeModel) -> Outcome:
    """Step the emulator's own classes through the requests."""
    blocks = BlockManager(engines.num_blocks, SIZE)
    scheduler = emulated.Scheduler(
        blocks,
        CONTRACT,
        max_num_batched_tokens=engines.max_num_batched_tokens,
        max_num_seqs=engines.max_num_seqs,
    )
    made: list[emulated.Request] = []
    order: list[tuple[str, int]] = []
    end_s = [0.0] * len(requests)
    for index, asked in enumerate(requests):
        prompt, reply = tokens_of(index, asked)
        parent, digests = None, []
        for start in range(0, len(prompt) - SIZE + 1, SIZE):
            _, parent = CONTRACT.extend(parent, prompt[start : start + SIZE], NO_EXTRA)
            assert parent is not None
            digests.append(parent)
        request = emulated.Request(
            CachedSequence(prompt, digests), reply, extra=NO_EXTRA, arrival_s=asked.arrival_s
        )
        made.append(request)
        scheduler.add(request)
    now_s, changes = 0.0, []
    first_s: dict[int, float] = {}
    while True:
        step = scheduler.schedule(now_s)
        if step is None:
            arrival_s = scheduler.next_arrival_s()
            if arrival_s is None:
                break
            assert arrival_s > now_s
            now_s = arrival_s
            continue
        now_s += time_model.step_s(step.work)
        for request in scheduler.complete(step, now_s):
            index = made.index(request)
            if index not in first_s:
                first_s[index] = now_s
                order.append(("first", index))
            if request.finished:
                end_s[index] = now_s
                order.append(("end", index))
        changes += blocks.take_events()
    named: list[tuple[bool, object]] = []
    for event in changes:
        assert isinstance(event, BlockStored | BlockRemoved)
        named += [(isinstance(event, BlockStored), block_key(name)) for name in event.block_hashes]
    return Outcome(
        first_token_s=[first_s[index] for index in range(len(requests))],
        end_s=end_s,
        num_cached_tokens=[request.num_cached_tokens for request in made],
        num_preemptions=[request.num_preemptions for request in made],
        order=order,
        changes=named,
        num_free_blocks=blocks.num_free_blocks,
        num_steps=scheduler.stats.num_steps,
        num_between_tokens=sum(scheduler.stats.between_tokens_s.num_in),
        between_tokens_s=scheduler.stats.between_tokens_s.sum,
        keys=[[block_key(digest) for digest in r.sequence.digests] for r in made],
    )


def leap(requests: list[Asked], engines: Engines, time_model: TimeModel) -> Outcome:
    """Put the same requests through the simulator's engine."""
    names = iter(range(10**9))
    blocks = Blocks(engines.num_blocks, SIZE, lambda: BlockKey(-2 - next(names)))
    order: list[tuple[str, int]] = []
    end_s = [0.0] * len(requests)
    made: list[Request] = []

    def first(request: Request, now_s: float) -> None:
        order.append(("first", made.index(request)))

    def end(request: Request, now_s: float) -> None:
        order.append(("end", made.index(request)))
        end_s[made.index(request)] = now_s

    engine = Engine(
        blocks,
        time_model,
        max_num_batched_tokens=engines.max_num_batched_tokens,
        max_num_seqs=engines.max_num_seqs,
        on_first_token=first,
        on_finish=end,
    )
    ids: dict[tuple[int, ...], BlockKey] = {}
    for index, asked in enumerate(requests):
        prompt, _ = tokens_of(index, asked)
        keys = [
            ids.setdefault(tuple(prompt[:stop]), BlockKey(len(ids)))
            for stop in range(SIZE, len(prompt) + 1, SIZE)
        ]
        made.append(Request(keys, len(prompt), asked.num_output_tokens))
    arrivals = [(asked.arrival_s, index) for index, asked in enumerate(requests)][::-1]
    changes = []
    while arrivals or engine.end_s is not None:
        if arrivals and (engine.end_s is None or arrivals[-1][0] <= engine.end_s):
            now_s, index = arrivals.pop()
            engine.arrive(made[index], now_s)
            if not (arrivals and arrivals[-1][0] == now_s):
                engine.wake(now_s)
        else:
            assert engine.end_s is not None
            engine.complete(engine.end_s)
        changes += blocks.take_changes()
    assert not engine.running
    assert not engine.waiting
    return Outcome(
        first_token_s=[request.first_token_s or 0.0 for request in made],
        end_s=end_s,
        num_cached_tokens=[request.num_cached_tokens for request in made],
        num_preemptions=[request.num_preemptions for request in made],
        order=order,
        changes=[(change.is_stored, key) for change in changes for key in change.keys],
        num_free_blocks=blocks.num_free_blocks,
        num_steps=engine.stats.num_steps,
        num_between_tokens=engine.stats.num_between_tokens,
        between_tokens_s=engine.stats.between_tokens_s,
        keys=[list(request.keys) for request in made],
    )


def assert_same(requests: list[Asked], engines: Engines, time_model: TimeModel = TIME) -> Outcome:
    """Hits, evictions, order, preemptions are equal; times are to a billionth."""
    expected, found = emulate(requests, engines, time_model), leap(requests, engines, time_model)
    assert found.num_cached_tokens == expected.num_cached_tokens
    assert found.num_preemptions == expected.num_preemptions
    assert found.order == expected.order
    assert found.num_steps == expected.num_steps
    assert found.num_between_tokens == expected.num_between_tokens
    assert found.between_tokens_s == pytest.approx(expected.between_tokens_s, rel=1e-9)
    assert found.first_token_s == pytest.approx(expected.first_token_s, rel=1e-9)
    assert found.end_s == pytest.approx(expected.end_s, rel=1e-9)
    assert found.num_free_blocks == expected.num_free_blocks
    called = {
        name: digest
        for keys, digests in zip(found.keys, expected.keys, strict=True)
        for name, digest in zip(keys, digests, strict=False)
    }
    assert [(stored, called[key]) for stored, key in found.changes] == expected.changes
    return found


@st.composite
def workloads(draw: st.DrawFn) -> list[Asked]:
    arrival_s = 0.0
    asked = []
    for _ in range(draw(st.integers(1, 14))):
        # Never quite at the end of a step: there, the last bit of a sum decides who is in it.
        arrival_s += draw(st.sampled_from([0.0, 0.00137, 0.0213, 0.3171, 2.7183]))
        asked.append(
            Asked(
                arrival_s=arrival_s,
                groups=tuple(draw(st.lists(st.integers(0, 1), max_size=3))),
                num_more=draw(st.integers(1, 90)),
                num_output_tokens=draw(st.integers(1, 70)),
            )
        )
    return asked


patient = settings(max_examples=examples(120), suppress_health_check=[HealthCheck.too_slow])


@patient
@given(
    requests=workloads(),
    num_blocks=st.sampled_from([30, 45, 60, 200]),
    budget=st.sampled_from([8, 33, 64, 500]),
    num_seqs=st.integers(1, 8),
)
def test_leaps_are_what_steps_are(
    requests: list[Asked], num_blocks: int, budget: int, num_seqs: int
) -> None:
    """Any requests on any small engine, preemption included: step by step as the emulator."""
    assert_same(
        requests,
        Engines(num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=num_seqs),
    )


def test_long_run_evicts_and_preempts_alike() -> None:
    """Three hundred requests under pressure: the same hits, evictions, order and times."""
    dice = random.Random(7)
    requests, arrival_s = [], 0.0
    for _ in range(300):
        arrival_s += dice.expovariate(3.0)
        groups = tuple(dice.choices(range(3), k=dice.randrange(4)))
        requests.append(Asked(arrival_s, groups, dice.randrange(1, 80), dice.randrange(1, 90)))

    found = assert_same(requests, Engines(num_blocks=50))

    assert sum(found.num_preemptions) > 20
    assert sum(not stored for stored, _ in found.changes) > 1000
    assert sum(found.num_cached_tokens) > 1000


def test_presets_leap_alike() -> None:
    """The time models of real GPUs, with replies much longer than a block."""
    requests = [Asked(0.37 * i, (i % 2,), 20 + i, 300) for i in range(12)]

    assert_same(requests, Engines(num_blocks=400, max_num_batched_tokens=2048), PRESETS["h100-8b"])
