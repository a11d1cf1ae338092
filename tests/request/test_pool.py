"""A whole router in front of emulated replicas that share an emulated pool."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from loadtest.emulator.emulator import Emulator
from router.pool import follower
from tests.faults.stage import Reply, Stage, chat, on_stage, records_in, words
from tests.request.pooled import PER_BLOCK, ask, listed, named, parts, pooled


@pytest.fixture
def polled_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only requests notice what changes in the pool."""
    monkeypatch.setattr(follower, "POLL_S", 60.0)


async def test_the_other_replica_fetches_what_one_has_computed() -> None:
    """It says so beforehand, verified; and in metrics, records, explanations."""
    async with pooled() as (stage, _, engines):
        first = await ask(stage, engines, words(1))
        await named(stage)
        second = await ask(stage, engines, words(1), "ok", words(2))
        explained = await stage.admin("/admin/explain", chat(words(1), "ok", words(2)))

        assert second.replica != first.replica
        assert parts(second)["pool"] == second.predicted == second.reported > 0
        assert stage.metric("warmroute_pool_verifications_total", result="confirmed") == 2
        assert stage.metric("warmroute_tokens_total", kind="predicted_pool") == second.reported
        assert stage.metric("warmroute_pool_up") == 1
        assert stage.metric("warmroute_pool_blocks", model="tiny") > 0
        assert stage.metric("warmroute_pool_bytes_per_token") == PER_BLOCK / 16
        assert stage.metric("warmroute_pool_fetch_bytes_per_second", replica="r1") > 0
        assert stage.metric("warmroute_audited_total", result="exact") == 2
        assert explained.json()["num_pool_tokens"] >= second.reported
        status = stage.router.status.pools()[0]
        assert status is not None
        assert status["models"]["tiny"]["key_pattern"].startswith("tiny_model@tp_rank:0@")
        assert all(rank["reads_pool"] for rank in stage.router.status.candidates().values())


async def test_predictions_are_right_while_the_pool_evicts() -> None:
    """Every one of many turns, thrown to and fro, with caches and a pool that are too small."""
    dice = random.Random(1)
    texts: dict[int, list[str]] = {number: [words(number)] for number in range(6)}
    engine = {"num_gpu_blocks": 160, "max_model_len": 2400}
    async with pooled(num_blocks=300, engine=engine, policy__name="random") as (
        stage, master, engines,
    ):  # fmt: skip
        await ask(stage, engines, *texts[0])
        await named(stage)
        num_pooled = 0
        for turn in range(60):
            number = dice.choice(list(texts))
            reply = await ask(stage, engines, *texts[number])
            assert reply.predicted == reply.reported, (turn, parts(reply))
            num_pooled += parts(reply)["pool"] > 0
            texts[number] += ["ok", words(1000 + turn, dice.choice([3, 30, 60]))]
            if len(texts[number]) > 10:
                texts[number] = [words(2000 + turn)]

        assert num_pooled > 10
        assert master.pool.num_evicted > 300


@pytest.mark.usefixtures("polled_rarely")
async def test_holes_are_found_before_they_are_used() -> None:
    """No event reports the eviction."""
    async with pooled() as (stage, master, engines):
        await ask(stage, engines, words(1))
        await listed(stage)
        master.pool.remove(master.pool.keys()[5:6])
        reply = await ask(stage, engines, words(1))

        assert reply.predicted == reply.reported == 5 * 16
        assert stage.metric("warmroute_pool_verifications_total", result="less") == 1
        assert stage.metric("warmroute_pool_knowledge_total", kind="corrections") == 1


@pytest.mark.usefixtures("polled_rarely")
async def test_what_was_not_reported_is_found_behind_the_boundary() -> None:
    """An event that was lost, a router that joined late."""
    async with pooled() as (stage, _, engines):
        await ask(stage, engines, words(1))
        await listed(stage)
        directory = stage.pool.directory("tiny")
        num_known = len(directory)
        directory.removed(directory.keys()[8:])
        reply = await ask(stage, engines, words(1))

        assert reply.predicted == reply.reported > 8 * 16
        assert len(directory) >= num_known - 1
        assert stage.metric("warmroute_pool_verifications_total", result="more") == 1


@pytest.mark.usefixtures("polled_rarely")
@pytest.mark.parametrize("num_reported", [0, 8])
async def test_what_another_replica_holds_is_asked_for(num_reported: int) -> None:
    """What an idle engine stored last it has not reported yet: all of it is in the pool."""
    async with pooled() as (stage, _, engines):
        stage.router.pools[""].questions.max_objects = 80
        await ask(stage, engines, words(1, 400))
        await listed(stage)
        directory = stage.pool.directory("tiny")
        num_known = len(directory)
        assert num_known > 100
        directory.removed(directory.keys()[num_reported:])
        reply = await ask(stage, engines, words(1, 400))

        assert reply.predicted == reply.reported >= (num_known - 1) * 16
        assert parts(reply)["pool"] == reply.reported
        assert stage.metric("warmroute_pool_verifications_total", result="more") == 1


@pytest.mark.usefixtures("polled_rarely")
async def test_long_prompts_are_verified_by_samples() -> None:
    """A hole that a sample finds is looked at closely."""
    async with pooled() as (stage, master, engines):
        stage.router.pools[""].questions.max_objects = 40
        await ask(stage, engines, words(1, 1500))
        await listed(stage)
        keys = master.pool.keys()
        assert len(keys) > 150
        master.pool.remove(keys[30:90])
        reply = await ask(stage, engines, words(1, 1500))

        assert reply.predicted == reply.reported == 30 * 16


@pytest.mark.usefixtures("polled_rarely")
async def test_a_late_answer_leaves_the_directory_s_word() -> None:
    """And a master that goes on like that is not asked for a while; no request waits long."""
    async with pooled(mooncake__verify_timeout_s=0.01) as (stage, master, engines):
        for number in range(4):
            await ask(stage, engines, words(number), "ok", words(100))
        await listed(stage)
        master.fault = "hang"
        for number in (1, 0, 3, 2):  # in turn with the other replica
            reply = await ask(stage, engines, words(number), "ok", words(100))
            assert reply.predicted == reply.reported > 0

        # A slow machine's answers were late before, too: then fewer requests wait for one now.
        assert 1 <= stage.metric("warmroute_pool_verifications_total", result="late") <= 4
        assert stage.metric("warmroute_pool_failures_total", code="pool_late") >= 1


@pytest.mark.usefixtures("polled_rarely")
async def test_a_client_that_leaves_while_the_pool_is_asked_is_recorded(tmp_path: Path) -> None:
    """Though it was placed nowhere: its record says where it would have gone."""
    file = tmp_path / "decisions.jsonl"
    settings = {"mooncake__verify_timeout_s": 60, "log__decisions": file}
    async with pooled(**settings) as (stage, master, engines):
        await ask(stage, engines, words(1), "ok", words(100))
        await listed(stage)
        master.fault = "hang"
        questions = stage.router.pools[""].questions
        async with stage.hanging_up(chat(words(1), "ok", words(100))):
            await stage.until(lambda: questions._num_waiting)
        await stage.until(lambda: "client left before its request was sent" in stage.log)
    *_, gone = records_in(file)
    assert (gone.status, gone.outcome, gone.tries) == (499, "client_gone", ())


@pytest.mark.usefixtures("polled_rarely")
async def test_a_master_that_dies_takes_the_pool_with_it() -> None:
    """The first to notice reports it: no fetch is predicted that cannot come."""
    async with pooled() as (stage, master, engines):
        await ask(stage, engines, words(1))
        await listed(stage)
        await master.stop()
        reply = await ask(stage, engines, words(1))
        assert reply.predicted == reply.reported == 0
        assert stage.metric("warmroute_pool_up") == 0

        master.pool.restart()
        await master.start()
        await listed(stage)
        first = await ask(stage, engines, words(2))
        second = await ask(stage, engines, words(2))
        assert first.predicted == first.reported == 0
        assert second.predicted == second.reported > 0
        assert stage.metric("warmroute_pool_up") == 1


async def both(stage: Stage, engines: tuple[Emulator, Emulator], number: int) -> list[Reply]:
    """Ask the same of both replicas in turn; an odd request between, so that turns change."""
    replies = [await ask(stage, engines, words(number)) for _ in range(2)]
    await ask(stage, engines, words(5000 + number))
    return replies


async def test_who_does_not_fetch_is_found_out() -> None:
    """After several predictions that did not come true, until a fetch is seen."""
    async with pooled() as (stage, _, (one, two)):
        await ask(stage, (one, two), words(4999))
        await named(stage)  # the pool is listed once a second
        connector, two.replica.pool = two.replica.pool, None
        for number in range(20):
            await both(stage, (one, two), number)
            if "does not read the pool" in stage.log:
                break
        replies = await both(stage, (one, two), 50)
        assert all(reply.predicted == reply.reported for reply in replies)
        reads = {id_: c["reads_pool"] for id_, c in stage.router.status.candidates().items()}
        assert reads == {"r1": True, "r2": False}
        two.replica.pool = connector
        for number in range(60, 64):
            await both(stage, (one, two), number)

        assert "does read the pool" in stage.log
        assert stage.metric("warmroute_trust_ratio", replica="r2") > 0.9


async def test_the_configuration_says_who_fetches() -> None:
    """One that is said not to is never predicted to."""
    async with pooled() as (_, master, (one, two)):
        replicas = [{"url": one.url}, {"url": two.url, "pool": False}]
        two.replica.pool = two.replica.ranks[0].engine.pool = None
        settings = {"mooncake__master": master.url, "policy__name": "round_robin"}
        async with on_stage(replicas=replicas, **settings) as stage:
            await stage.until(lambda: stage.pool.is_up)
            for number in range(4):
                for reply in await both(stage, (one, two), number):
                    assert reply.predicted == reply.reported


async def test_replicas_of_two_layouts_are_each_credited_with_their_own() -> None:
    """In one decision: what the pool has in a candidate's own layout, and nothing of the other."""
    async with pooled() as (_, master, engines), AsyncExitStack() as stack:
        other = engines[1].replica.pool
        assert other is not None
        replicas = [
            {"url": engines[0].url, "pool_layout": other.head.rstrip("@")},
            {"url": engines[1].url, "pool_layout": "other"},
        ]
        other.head = f"other@{other.head}"
        settings = {"mooncake__master": master.url}
        stage = await stack.enter_async_context(
            on_stage(replicas=replicas, policy__name="round_robin", **settings)
        )

        async def in_pool(text: str) -> list[int | None]:
            explained = await stage.admin("/admin/explain", chat(text))
            return [each["view"]["num_pool_tokens"] for each in explained.json()["candidates"]]

        for number in (1, 2):  # one at each
            await ask(stage, engines, words(number))
        await stage.until(lambda: len(stage.pool.layouts) == 2)
        replies = [await ask(stage, engines, words(3)) for _ in range(2)]

        assert [reply.replica for reply in replies] == ["r1", "r2"]
        assert [reply.reported for reply in replies] == [0, 0]
        of_both, of_one = await in_pool(words(3)), await in_pool(words(1))
        assert of_both[0] == of_both[1]
        assert of_both[0]
        assert of_one[0]
        assert of_one[1] == 0


@pytest.mark.usefixtures("polled_rarely")
@pytest.mark.parametrize("max_objects", [512, 40])
async def test_what_is_on_disk_only_is_read_at_a_price_of_its_own(max_objects: int) -> None:
    """Asked about before the decision; of a long prompt by samples, what lies between is alike."""
    async with pooled() as (stage, master, engines):
        stage.router.pools[""].questions.max_objects = max_objects
        first = await ask(stage, engines, words(1, 1500))
        await listed(stage)
        objects = master.pool.keys()
        assert len(objects) > 150
        master.pool.on_disk.update(objects[:100])
        explained = (await stage.admin("/admin/explain", chat(words(1, 1500)))).json()
        reply = await ask(stage, engines, words(1, 1500))

        on_disk = {
            each["view"]["id"]: each["view"]["num_disk_tokens"] for each in explained["candidates"]
        }
        read = explained["decision"]["candidate"]
        assert read == reply.replica != first.replica
        assert reply.predicted == reply.reported >= 150 * 16
        assert parts(reply)["pool"] == reply.reported
        assert 90 * 16 <= on_disk[read] <= 100 * 16
        assert on_disk[first.replica] == 0
        assert stage.metric("warmroute_pool_knowledge_total", kind="on_disk") >= 90
