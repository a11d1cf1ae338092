"""What becomes of predictions where an engine's cache is not what its events say by the rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from msgspec import structs

from loadtest.emulator import replica
from loadtest.emulator.emulator import Emulator
from loadtest.emulator.events import EventPublisher
from router.base.contracts import ExtraKeys
from router.kv_events.wire import BlockRemoved, BlockStored, KvEvent
from tests.faults.stage import Engines, Reply, Stage, chat, on_stage, words

_publish = EventPublisher.publish


@contextmanager
def events_become(change: Callable[[list[KvEvent]], list[KvEvent]]) -> Iterator[None]:
    """Let engines publish other events than those of their caches."""

    def publish(publisher: EventPublisher, events: list[KvEvent], ts: float) -> None:
        _publish(publisher, change(events), ts)

    with mock.patch.object(EventPublisher, "publish", publish):
        yield


async def asked(stage: Stage, engine: Emulator, *texts: str, **fields: object) -> Reply:
    """Ask, and let all claims end before the next."""
    reply = await stage.ask(chat(*texts, **fields))
    assert reply.status == 200, reply.body
    await stage.settled(engine)
    stage.router.caches.expire_claims(math.inf)
    return reply


def num_wrong(replies: list[Reply]) -> int:
    return sum(reply.predicted != reply.reported for reply in replies)


# -- the cpu tier --------------------------------------------------------------------------------


def announced(events: list[KvEvent]) -> list[KvEvent]:
    """Announce all blocks as written to the CPU's memory, where they stay."""
    return [
        *events,
        *(structs.replace(e, medium="CPU") for e in events if isinstance(e, BlockStored)),
    ]


async def test_a_cpu_tier_that_gives_nothing_loses_its_credit_alone() -> None:
    """The GPU's part stays EXACT, and history is not read again for it."""
    with events_become(announced):
        async with Engines(1, num_gpu_blocks=24) as (engine,), on_stage(engine) as stage:
            num_replays = stage.metric("warmroute_kv_events_total", kind="replays")
            replies = [await asked(stage, engine, words(number % 4)) for number in range(84)]

            assert replies[0].reported == replies[9].reported == 0 < replies[9].predicted
            assert num_wrong(replies) == 10
            assert num_wrong(replies[20:]) == 0
            assert stage.state("r1") == "exact"
            assert stage.metric("warmroute_trust_ratio") == 1.0
            assert stage.metric("warmroute_cpu_trust_ratio") < 0.6
            assert stage.metric("warmroute_kv_events_total", kind="replays") <= num_replays + 1
            assert "history is read again" not in stage.log
            assert stage.log.count("its cpu tier does not count any more") == 2  # in both forms
            rank = (await stage.admin("/admin/replicas")).json()["replicas"][0]["ranks"][0]
            assert (rank["trust"], rank["cpu_trust"] < 0.6) == (1.0, True)
            first, second = [await asked(stage, engine, words(9)) for _ in range(2)]
            assert (first.predicted, second.predicted) == (0, second.reported)
            assert second.reported > 0


async def test_what_comes_back_from_a_cpu_tier_is_predicted_to_the_token() -> None:
    """Four prompts take turns in a cache of less than two; the tier has them all."""
    async with (
        Engines(1, num_gpu_blocks=24, cpu_blocks=400) as (engine,),
        on_stage(engine) as stage,
    ):
        replies = [await asked(stage, engine, words(number % 4)) for number in range(24)]

        assert num_wrong(replies) == 0
        assert all(reply.reported > 0 for reply in replies[4:])
        assert stage.metric("warmroute_cpu_trust_ratio") == 1.0


# -- copies --------------------------------------------------------------------------------------


class CountedCopies:
    """Reports each removal, with how many copies are left (vllm-project/vllm#48933)."""

    def __init__(self) -> None:
        self._copies: dict[object, int] = {}

    def __call__(self, events: list[KvEvent]) -> list[KvEvent]:
        for event in events:
            if isinstance(event, BlockStored):
                for name in event.block_hashes:
                    self._copies[name] = self._copies.get(name, 0) + 1
            elif isinstance(event, BlockRemoved):
                event.remaining_copy_counts = [self._left(name) for name in event.block_hashes]
        return events

    def _left(self, name: object) -> int:
        self._copies[name] -= 1
        return self._copies[name]


async def complete(stage: Stage, engine: Emulator, tokens: list[int]) -> Reply:
    """Complete a prompt of token ids."""
    reply = await stage.ask({"model": "tiny", "prompt": tokens, "max_tokens": 1}, "/v1/completions")
    assert reply.status == 200, reply.body
    await stage.settled(engine)
    stage.router.caches.expire_claims(math.inf)
    return reply


async def after_copies(stage: Stage, engine: Emulator, num_rounds: int) -> list[Reply]:
    """Leave copies of a block, overwrite them, and ask for what begins with it; again.

    An engine computes the last block of a full hit again, beside the one it has.
    """
    replies = []
    for number in range(num_rounds):
        head = list(range(100, 116))
        for _ in range(3):
            await complete(stage, engine, head)
        for other in range(4):
            await asked(stage, engine, words(100 + 4 * number + other))
        replies.append(await complete(stage, engine, [*head, 7]))
    return replies


@pytest.mark.parametrize("change", [list, CountedCopies()])
async def test_copies_of_blocks_are_counted_as_the_engine_does(
    change: Callable[[list[KvEvent]], list[KvEvent]],
) -> None:
    """A removal for each, or with what is left."""
    with events_become(change):
        async with Engines(1, num_gpu_blocks=40) as (engine,), on_stage(engine) as stage:
            replies = await after_copies(stage, engine, 20)

            assert {reply.reported for reply in replies} == {0}
            assert num_wrong(replies) == 0
            assert stage.state("r1") == "exact"
            assert stage.metric("warmroute_trust_ratio") == 1.0
            await stage.knows(engine)


# -- adapters ------------------------------------------------------------------------------------


ExtraKeysOf = Callable[[str, int], list[object]]
"""The extra keys in an event of an adapter's block: of the adapter's name, and the block's number
in its event."""


@contextmanager
def new_keys(write: ExtraKeysOf) -> Iterator[None]:
    """Have adapters' blocks named with a key more, which no release that is known has."""

    def change(events: list[KvEvent]) -> list[KvEvent]:
        for event in events:
            if isinstance(event, BlockStored) and event.lora_name is not None:
                numbers = range(len(event.block_hashes))
                event.extra_keys = [write(event.lora_name, number) for number in numbers]
        return events

    def named(lora: tuple[str, str] | None, **more: object) -> ExtraKeys:
        return ExtraKeys(lora=None if lora is None else (lora[0], "3"))

    with events_become(change), mock.patch.object(replica, "ExtraKeys", named):
        yield


@pytest.mark.parametrize(
    ("write", "form"),
    [
        (lambda name, _: [["lora_v2", name, 3]], "('lora_v2', 'sql', int)"),
        (lambda name, number: [name, ["block", number]], "'sql', (str, int)"),
    ],
    ids=["new_form", "as_an_image"],
)
async def test_an_adapter_whose_keys_are_not_understood_is_unknown_and_base_exact(
    write: ExtraKeysOf, form: str
) -> None:
    """One line names the key; the base model is predicted as ever, and the replica DEGRADED."""
    with new_keys(write):
        async with (
            Engines(1, loras=(("sql", "/l/1"),)) as (engine,),
            on_stage(engine) as stage,
        ):
            await asked(stage, engine, words(0))
            base, adapter = [], []
            for number in range(42):
                base += [await asked(stage, engine, words(number // 2))]
                adapter += [await asked(stage, engine, words(number // 2), model="sql")]

            assert num_wrong(base) == 0
            assert {reply.predicted for reply in adapter} == {0}
            assert max(reply.reported for reply in adapter) > 0
            assert stage.metric("warmroute_trust_ratio") == 1.0
            assert stage.metric("warmroute_audited_total", result="partial") >= 20
            assert stage.log.count(form) == 2  # as text and as JSON
            rank = (await stage.admin("/admin/replicas")).json()["replicas"][0]["ranks"][0]
            assert rank["not_understood"] == ["adapter sql"]
            why = "an extra key of their blocks is not understood, so these are not predicted"
            assert (rank["cache"], rank["cache_reason"]) == ("degraded", f"{why}: adapter sql")
            await is_known_for(stage, base="exact", adapter="degraded")


async def is_known_for(stage: Stage, *, base: str, adapter: str) -> None:
    """Assert how exactly a decision for each knows the replica; a metric and a request have it."""
    for model, state in (("tiny", base), ("sql", adapter)):
        body = chat(words(99), model=model)
        explained = (await stage.admin("/admin/explain", body)).json()
        assert [each["state"] for each in explained["candidates"]] == [state]
        num_decisions = stage.metric("warmroute_decisions_total", state=state)
        assert (await stage.ask(body)).status == 200
        assert stage.metric("warmroute_decisions_total", state=state) == num_decisions + 1
    worst = "exact" if base == adapter == "exact" else "degraded"
    assert stage.metric("warmroute_replica_state", replica="r1", state=worst) == 1


async def test_an_adapter_that_is_understood_stays_exact() -> None:
    """However often it is asked; a prompt that is new says nothing for it or against it."""
    async with (
        Engines(1, loras=(("sql", "/l/1"),)) as (engine,),
        on_stage(engine) as stage,
    ):
        replies = [await asked(stage, engine, words(n // 2), model="sql") for n in range(30)]

        assert num_wrong(replies) == 0
        assert stage.state("r1") == "exact"
        await is_known_for(stage, base="exact", adapter="exact")
