"""Prefill and decode peer to peer, in front of emulated engines that enforce the protocols."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import Struct

from loadtest.emulator.emulator import Emulator
from tests.faults.stage import (
    STUCK,
    Engines,
    Json,
    Stage,
    arm,
    chat,
    num_running,
    on_stage,
    streamed,
    words,
)

LONG = 400
TRANSFERS = ["mooncake", "nixl", "nixl_push"]


class Peers(Struct):
    """A router, and one replica of each half."""

    stage: Stage
    p: Emulator
    d: Emulator

    @property
    def wrong(self) -> list[str]:
        """What no engine should have been sent."""
        return self.p.replica.transfers.wrong + self.d.replica.transfers.wrong

    def prefills(self, **labels: str) -> float:
        return self.stage.metric("warmroute_prefills_total", **labels)


@asynccontextmanager
async def peers(
    transfer: str,
    *,
    prefill: Json | None = None,
    bootstrap: str | None = None,
    **settings: Any,
) -> AsyncIterator[Peers]:
    """Run such a fleet; at its end nothing is pinned, and no parameter was wrong."""
    async with (
        Engines(1, kv_role="producer", connector=transfer, **(prefill or {})) as (p,),
        Engines(1, kv_role="consumer", connector=transfer) as (d,),
    ):
        first: Json = {"url": p.url, "name": "p", "role": "prefill"}
        if transfer == "mooncake":
            first["bootstrap"] = bootstrap or p.url
        flags = {
            "replicas": [first, {"url": d.url, "name": "d", "role": "decode"}],
            "prefill__transfer": transfer.removesuffix("_push"),
        } | settings
        async with on_stage(p, d, **flags) as stage:
            it = Peers(stage, p, d)
            yield it
            assert it.wrong == []
            assert p.replica.transfers.pinned == []


def long_chat(number: int, **fields: Any) -> Json:
    return chat(words(number, LONG), **fields)


BODIES: list[tuple[str, Json]] = [
    ("/v1/chat/completions", streamed(long_chat(1))),
    ("/v1/completions", {"model": "tiny", "prompt": words(1, LONG), "max_tokens": 4}),
    ("/v1/messages", long_chat(1)),
    ("/v1/responses", {"model": "tiny", "input": words(1, LONG), "max_output_tokens": 4}),
]


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_prompt_goes_from_one_to_the_other(transfer: str, path: str, body: Json) -> None:
    """On every API; the decode replica computes nothing of it."""
    async with peers(transfer) as it:
        reply = await it.stage.ask(body, path)

        if (transfer, path) == ("nixl_push", "/v1/responses"):  # its halves have no id in common
            assert it.prefills(result="failed", why="push") == 1
            it.p.replica.transfers.done.clear()  # its lease ends, no one has come for it
            return
        assert reply.status == 200
        assert reply.headers["x-warmroute-prefill"] == "p"
        assert it.prefills(result="remote") == 1
        scheduler = it.d.replica.ranks[0].engine.scheduler.stats
        assert scheduler.num_cache_hits > 1000


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("kind", ["status", "die_after", "hang"])
async def test_a_prefill_replica_that_fails_leaves_no_one_waiting(transfer: str, kind: str) -> None:
    """The try that waits for it is cut, and the decode replica computes the prompt."""
    async with peers(transfer, prefill__timeout_s=0.5) as it:
        arm(it.p, kind, count=2)
        replies = [await it.stage.ask(long_chat(number)) for number in range(2)]

        assert [reply.status for reply in replies] == [200, 200]
        assert {reply.headers["x-warmroute-prefill"] for reply in replies} == {"local"}
        assert it.prefills(result="failed") >= 1


@pytest.mark.parametrize("transfer", TRANSFERS)
async def test_a_client_that_leaves_ends_both(transfer: str) -> None:
    """Neither engine goes on with it."""
    async with peers(transfer, prefill={"time_model": STUCK}) as it:
        async with it.stage.hanging_up(long_chat(1)):
            await it.stage.until(lambda: num_running(it.p) == 1)
        await it.stage.until(lambda: num_running(it.p) == num_running(it.d) == 0)
        await it.stage.until(lambda: not it.stage.leftovers())


@pytest.mark.parametrize("transfer", TRANSFERS)
async def test_what_cannot_be_read_is_computed(transfer: str) -> None:
    """By the same decode replica: there is no other. The prefill replica died late, twice."""
    async with peers(transfer) as it:
        it.p.replica.transfers.loses = True
        replies = [await it.stage.ask(long_chat(number)) for number in range(2)]

        assert [reply.status for reply in replies] == [200, 200]
        assert {reply.headers["x-warmroute-prefill"] for reply in replies} == {"local"}
        assert it.prefills(result="failed") == 2


async def test_the_name_of_an_engine_is_asked_again_after_a_failure() -> None:
    """It is another one after a restart; one request finds that out, and is answered."""
    async with peers("mooncake") as it:
        transfers = it.p.replica.transfers
        await it.stage.ask(long_chat(1))
        transfers.engine_ids[0] = "reborn"
        second = await it.stage.ask(long_chat(2))
        assert transfers.wrong.pop().startswith("remote_engine_id")
        transfers.done.clear()  # what no one knows how to read
        third = await it.stage.ask(long_chat(3))

        assert second.headers["x-warmroute-prefill"] == "local"
        assert third.headers["x-warmroute-prefill"] == "p"
        assert (second.status, third.status) == (200, 200)


async def test_without_a_bootstrap_server_prompts_are_computed_where_they_are_decoded() -> None:
    """Nothing is sent to the prefill replica."""
    async with peers("mooncake", bootstrap="http://127.0.0.1:9") as it:
        replies = [await it.stage.ask(long_chat(number)) for number in range(2)]

        assert [reply.status for reply in replies] == [200, 200]
        assert it.prefills(result="failed", why="bootstrap") == 2
        assert sum(it.p.replica.ranks[0].stats.finished.values()) == 0


async def test_parameters_of_clients_stay_withheld() -> None:
    """What a client sends reaches neither engine."""
    async with peers("mooncake") as it:
        reply = await it.stage.ask(long_chat(1, kv_transfer_params={"do_remote_decode": True}))

        assert reply.status == 200
        assert it.prefills(result="remote") == 1


async def test_halves_that_are_matched_by_an_id_have_one_of_their_own() -> None:
    """Of two requests that a client gave one id, each is decoded with its own prompt's KV."""
    async with peers("nixl_push") as it:
        headers = {"X-Request-Id": "mine"}
        async with asyncio.TaskGroup() as tg:
            tasks = [
                tg.create_task(it.stage.ask(long_chat(number), headers=headers))
                for number in range(4)
            ]

        assert [task.result().status for task in tasks] == [200] * 4
        assert it.prefills(result="remote") == 4
        assert {t.result().headers["x-warmroute-request-id"] for t in tasks} == {"mine"}


async def test_several_answers_to_a_prompt_are_not_pushed() -> None:
    """Each has an id of its own at the decode replica, which would wait for ever."""
    async with peers("nixl_push") as it:
        reply = await it.stage.ask(long_chat(1, n=2))

        assert reply.status == 200
        assert it.prefills(result="failed", why="push") == 1
        it.p.replica.transfers.done.clear()  # its lease ends, no one has come for it
