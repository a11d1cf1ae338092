"""router.request.story in a whole router: who gets a request, what was predicted."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from aiohttp import web

from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import (
    SECRET,
    SLOW,
    STUCK,
    Engines,
    Json,
    Reply,
    chat,
    num_running,
    on_stage,
    records_in,
    streamed,
    words,
)


async def test_the_second_turn_goes_to_the_holder() -> None:
    """And what was predicted is what the engine reports, streaming and not."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        first = await stage.ask(chat(words(1)))
        await stage.settled(*engines)
        second = await stage.ask(streamed(chat(words(1), first.text, words(2))))

        assert second.replica == first.replica
        assert second.predicted == second.reported > 0
        assert stage.metric("warmroute_audited_total", result="exact") == 2
        assert stage.state(first.replica) == "exact"


async def test_nothing_is_predicted_where_the_cache_is_not_read() -> None:
    """A prompt whose likelihood is asked for is computed whole; what it leaves is found again."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        for _ in range(2):
            reply = await stage.ask({**chat(words(1)), "prompt_logprobs": 0})
            await stage.settled(*engines)

            assert reply.predicted == 0
        reply = await stage.ask(chat(words(1)))

        assert reply.predicted == reply.reported > 0


WINDOWS: Json = {"num_gpu_blocks": 500, "sliding_window": 100, "num_window_groups": 2}


@pytest.mark.parametrize(("seed", "options"), [(1, {}), (4, WINDOWS)])
async def test_predictions_are_right_to_the_token_through_evictions(
    seed: int, options: Json
) -> None:
    """Every one of many turns, in caches that hold a third of what is asked."""
    dice = random.Random(seed)
    texts: dict[int, list[str]] = {number: [words(number)] for number in range(6)}
    async with (
        Engines(2, **{"num_gpu_blocks": 160, "max_model_len": 2400} | options) as engines,
        on_stage(*engines) as stage,
    ):
        for turn in range(60):
            number = dice.choice(list(texts))
            body = chat(*texts[number], max_tokens=dice.choice([1, 5, 40]))
            reply = await stage.ask(streamed(body) if dice.random() < 0.3 else body)
            assert reply.predicted == reply.reported, (turn, number)
            texts[number] += ["ok", words(1000 + turn, dice.choice([3, 30, 60]))]
            if len(texts[number]) > 14:
                texts[number] = [words(2000 + turn)]
            await stage.settled(*engines)

        assert stage.metric("warmroute_audited_total", result="exact") == 60
        assert stage.metric("warmroute_kv_events_total", kind="removed") > 100


@pytest.mark.parametrize("first_rank", [0, 6])
async def test_every_rank_is_a_candidate(first_rank: int) -> None:
    """The one that holds a prompt is named in X-data-parallel-rank, by its number at its server."""
    ranks = {"data_parallel_size": 3, "first_rank": first_rank}
    async with Engines(1, **ranks) as engines, on_stage(*engines) as stage:
        firsts: list[Reply] = []
        while len({reply.replica for reply in firsts}) < 3:  # equals are drawn from
            assert len(firsts) < 60
            firsts.append(await stage.ask(chat(words(len(firsts)))))
        await stage.settled(*engines)
        seconds = [
            await stage.ask(chat(words(number), "ok", words(100 + number)))
            for number in range(len(firsts))
        ]

        assert {reply.replica for reply in firsts} == {"r1#0", "r1#1", "r1#2"}
        assert [reply.replica for reply in seconds] == [reply.replica for reply in firsts]
        assert all(reply.predicted == reply.reported > 0 for reply in seconds)


async def test_replicas_of_different_lengths_and_caches_share_a_model() -> None:
    """A long prompt goes where it fits; predicted = reported at every block size."""
    async with (
        Engines(1, block_size=32, num_gpu_blocks=12, max_model_len=300) as small,
        Engines(1, block_size=16, num_gpu_blocks=400, max_model_len=2_000) as large,
        on_stage(*small, *large, policy__name="round_robin") as stage,
    ):
        for number in range(4):
            for _ in range(2):
                reply = await stage.ask(chat(words(number, 40), max_tokens=4))
                await stage.settled(*small, *large)
                assert reply.predicted == reply.reported
        for num_words, max_tokens in ((300, 4), (300, 4), (40, 250), (40, 250)):
            reply = await stage.ask(chat(words(9, num_words), max_tokens=max_tokens))
            await stage.settled(*small, *large)
            assert (reply.status, reply.replica) == (200, "r2")
            assert reply.predicted == reply.reported
        reply = await stage.ask(chat(words(9, 5_000)))

        assert (reply.status, "2000" in reply.error["message"]) == (400, True)


@pytest.mark.parametrize(
    "own", [{"model": "sql"}, {"cache_salt": f"{SECRET}1"}, {"model": "sql", "cache_salt": "b"}]
)
async def test_adapters_and_salts_have_blocks_of_their_own(own: Json) -> None:
    """The same text under another name is not cached, and under the same one it is."""
    async with Engines(1, loras=(("sql", "/loras/sql"),)) as engines, on_stage(*engines) as stage:
        replies = []
        for fields in ({}, own, {}, own):
            replies.append(await stage.ask(chat(words(1), **fields)))
            await stage.settled(*engines)

        plain, first, again, second = replies
        assert (plain.predicted, first.predicted) == (0, 0)
        assert again.predicted == second.predicted > 0
        assert all(reply.predicted == reply.reported for reply in replies)


BATCH = [words(1), words(2)]


@pytest.mark.parametrize(
    "prompt", [words(1), list(range(100, 400)), [words(2)], [list(range(99))], BATCH]
)
async def test_completions_are_found_by_text_and_by_ids(prompt: object) -> None:
    """A batch is found by its first; its usage, a sum, is not held against the prediction."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    async with Engines(2) as engines, on_stage(*engines) as stage:
        first = await stage.ask(body, "/v1/completions")
        await stage.settled(*engines)
        second = await stage.ask(body, "/v1/completions")

        assert second.replica == first.replica
        assert 0 < second.predicted <= second.reported
        assert (second.predicted < second.reported) == (prompt is BATCH)
        assert stage.metric("warmroute_audited_total") == (0 if prompt is BATCH else 2)


async def test_siblings_that_start_together_join_the_first() -> None:
    """What it is computing counts as held there (and so a policy that follows caches follows)."""
    shared = words(1, 400)
    policy = {"policy__name": "longest_prefix"}
    async with Engines(3, time_model=SLOW) as engines, on_stage(*engines, **policy) as stage:
        async with asyncio.TaskGroup() as tg:
            tasks = [
                tg.create_task(stage.ask(streamed(chat(shared, "ok", words(10 + i, 5)))))
                for i in range(4)
            ]
        replies = [task.result() for task in tasks]

        assert len({reply.replica for reply in replies}) == 1
        assert sorted(reply.predicted > 0 for reply in replies) == [False, True, True, True]


async def test_what_was_never_computed_is_not_held() -> None:
    """A claim ends with its request: hung up on before its first token, refused, moved on."""
    shared = words(1, 400)
    async with Engines(2, time_model=STUCK) as engines, on_stage(*engines) as stage:
        async with stage.hanging_up(streamed(chat(shared))):
            await stage.until(lambda: any(map(num_running, engines)))
        await stage.until(lambda: not stage.leftovers())
        explained = (await stage.admin("/admin/explain", chat(shared))).json()

        assert [c["view"]["num_gpu_tokens"] for c in explained["candidates"]] == [0, 0]


# -- what is left --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "decided"),
    [
        (chat(words(1)), 200, "ok"),
        (streamed(chat(words(1))), 200, "ok"),
        (chat(words(1), temperature=-1), 400, "client_error"),
        (chat(words(1), messages="x"), 400, None),
        (None, 404, "client_error"),
    ],
    ids=["whole", "stream", "refused by the engine", "refused here", "passed through"],
)
async def test_every_outcome_gives_back_what_it_took(
    body: Json | None, status: int, decided: str | None, tmp_path: Path
) -> None:
    """No lease, no claim, no open answer, gauges at zero (the stage looks); and one record."""
    file = tmp_path / "decisions.jsonl"
    settings = {"peer_name": "a", "log__decisions": file}
    async with Engines(2) as engines, on_stage(*engines, **settings) as stage:  # type: ignore[arg-type]
        if body is None:
            reply = await stage.ask(None, "/v1/responses/r1", method="GET")
        else:
            reply = await stage.ask(body)

        assert reply.status == status
        if decided is not None:
            assert stage.metric("warmroute_requests_total", outcome=decided) >= 1
    if decided is not None:
        record = records_in(file)[-1]
        assert (record.outcome, record.status) == (decided, status)


async def test_an_answer_of_unknown_shape_is_passed_on() -> None:
    """An engine that tells no usage, or nonsense, is not audited."""
    bodies = [b"{}", b"plain", b'{"usage":"none"}', b'{"usage":{"prompt_tokens":null}}', b"\xff"]

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=bodies.pop(0))

    async with FakeEngine(answer) as engine, on_stage(engine) as stage:
        for expected in bodies.copy():
            assert (await stage.ask(chat(words(1)))).body == expected

        assert stage.metric("warmroute_audited_total") == 0
        assert stage.metric("warmroute_requests_total", outcome="ok") == 5


async def test_an_engine_that_reports_no_cached_tokens_is_served() -> None:
    """Its counts of prompt tokens are compared all the same."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"usage": {"prompt_tokens": 3, "completion_tokens": 1}})

    async with FakeEngine(answer) as engine, on_stage(engine) as stage:
        reply = await stage.ask(chat(words(1)))

        assert reply.status == 200
        assert stage.metric("warmroute_audited_total") == 0
        assert stage.metric("warmroute_token_mismatches_total", against="usage") == 1
