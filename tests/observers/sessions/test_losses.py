"""What losing each replica would cost, through a whole router; and the bound of the work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from loadtest.emulator.emulator import Emulator
from policies import CandidateId
from router.base.contracts import BlockKey
from router.index.block_index import BlockIndex
from router.index.cache_view import CacheView
from router.kv_events.stream import RankStream
from router.observers.sessions.losses import Losses
from router.observers.sessions.session_ledger import SessionLedger
from router.observers.sessions.threads import Thread
from tests.faults.stage import SECRET, Engines, Reply, Stage, chat, on_stage, streamed, words
from tests.replicas.work import fleet_of
from tests.request.pooled import ask, listed, named, pooled

BLOCK = 16


def losses_of(stage: Stage) -> Losses:
    """Return what computes the losses of a router's candidates."""
    losses = stage.router.status.losses.__self__  # type: ignore[attr-defined]
    assert isinstance(losses, Losses)
    return losses


async def said(stage: Stage) -> dict[str, dict[str, Any]]:
    """The rows of the replicas in the router's state, by name."""
    await stage.until(lambda: True)
    shown = (await stage.admin("/admin/state")).json()["replicas"]["shown"]
    return {row["name"]: row for row in shown}


def tokens(stage: Stage, replica: str) -> float:
    return stage.metric("warmroute_replica_loss_tokens", replica=replica)


async def converse(stage: Stage, engines: Sequence[Emulator], *texts: str) -> Reply:
    reply = await stage.ask(streamed(chat(*texts)))
    await stage.settled(*engines)
    return reply


async def test_what_is_only_there_is_lost_with_a_replica() -> None:
    """The conversation's whole blocks, and the time to compute them again."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        await stage.settled(*engines)
        reply = await converse(stage, engines, words(1))
        (other,) = {"r1", "r2"} - {reply.replica}
        num_tokens = reply.usage["prompt_tokens"]
        rows = await said(stage)
        seconds = stage.metric("warmroute_replica_loss_seconds", replica=reply.replica)
        lost, nothing = tokens(stage, reply.replica), tokens(stage, other)
        listed_ = (await stage.admin("/admin/replicas")).json()["replicas"]

    assert num_tokens - BLOCK <= lost <= num_tokens
    assert nothing == 0
    assert seconds > 0
    assert (rows[reply.replica]["loss_tokens"], rows[other]["loss_tokens"]) == (lost, 0)
    ranks = {each["name"]: each["ranks"][0] for each in listed_}
    assert ranks[reply.replica]["loss"] == {"tokens": lost, "seconds": seconds}
    assert ranks[reply.replica]["num_sessions"] == 1


async def test_what_another_replica_has_is_not_lost() -> None:
    """Only if that one may be used."""
    async with Engines(2) as engines, on_stage(*engines, policy__name="round_robin") as stage:
        await stage.settled(*engines)
        homes = [(await converse(stage, engines, words(1))).replica for _ in range(2)]
        shared = tokens(stage, homes[1])
        await stage.admin(f"/admin/replicas/{homes[0]}/drain", {"draining": True})
        losses_of(stage).drop()
        alone = tokens(stage, homes[1])

    assert set(homes) == {"r1", "r2"}
    assert shared == 0
    assert alone > 4 * BLOCK


async def test_what_the_pool_has_is_not_lost() -> None:
    async with pooled() as (stage, master, engines):
        reply = await ask(stage, engines, words(1))
        await named(stage)
        losses_of(stage).drop()
        kept = tokens(stage, reply.replica)
        master.pool.remove(master.pool.keys())
        await listed(stage)
        losses_of(stage).drop()
        lost = tokens(stage, reply.replica)

    assert kept < BLOCK
    assert lost > 4 * BLOCK


async def test_what_was_evicted_is_not_lost_again() -> None:
    """Another conversation has taken its room."""
    async with Engines(1, num_gpu_blocks=48) as engines, on_stage(*engines) as stage:
        first = await converse(stage, engines, words(1))
        other = streamed(chat(words(2, 140)))
        second = await stage.ask(other, headers={"X-Session-ID": f"other-{SECRET}"})
        await stage.settled(*engines)
        lost = tokens(stage, "r1")

    num_tokens = first.usage["prompt_tokens"] + second.usage["prompt_tokens"]
    assert 0 < lost <= 47 * BLOCK < num_tokens


class Counting(CacheView):
    """Counts the prompts that are looked up."""

    __slots__ = ("num_matched",)

    def __init__(self) -> None:
        super().__init__(BlockIndex())
        self.num_matched = 0

    def match(self, *args: Any, **named: Any) -> Any:
        self.num_matched += 1
        return super().match(*args, **named)


def test_of_many_conversations_a_sample_is_examined() -> None:
    """Each has the same share of tokens elsewhere, so the sample is right."""
    fleet, caches, ledger = fleet_of("r1", "r2"), Counting(), SessionLedger()
    for name in ("r1", "r2"):
        stream = RankStream(
            CandidateId(name), caches.index, block_size=BLOCK, capacity_blocks=10_000
        )
        caches.add(CandidateId(name), stream)
    contract = stream.contract
    for number in range(1, 1_001):
        keys = [BlockKey(number * 100 + block) for block in range(10)]
        home = CandidateId("r1" if number % 2 else "r2")
        other = CandidateId("r2" if number % 2 else "r1")
        caches.index.store(home, keys)
        caches.index.store(other, keys[:4])
        fleet.conversations.begin(number, home, 10 * BLOCK, 0, time.monotonic())
        thread = replace(THREAD, contract=contract, keys=keys, candidate=home)
        ledger.remember(number, None, thread, routing=number)
    losses = Losses(fleet=fleet, caches=caches, ledger=ledger, fetches=None, max_looks=101)
    found = losses.by_candidate()

    assert caches.num_matched <= 101
    assert {name: each.num_tokens for name, each in found.items()} == {
        "r1": 500 * 6 * BLOCK,
        "r2": 500 * 6 * BLOCK,
    }


THREAD = Thread(
    space=0,
    contract=None,
    keys=(),
    num_tokens=10 * BLOCK,
    parts=None,
    candidate=CandidateId(""),
    num_emptied=0,
    at_s=0.0,
)
