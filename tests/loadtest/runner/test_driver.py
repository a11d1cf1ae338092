"""The driver against the emulator and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.faults import Fault
from loadtest.emulator.options import EmulatorOptions
from loadtest.engine_model.time_model import PRESETS, TimeModel
from loadtest.results import RunInfo, TurnResult
from loadtest.runner import ReplayOptions, TargetError, replay
from loadtest.workload import Turn, Workload
from tests.faults.fake_engine import FakeEngine, hang_up
from tests.loadtest.runner.samples import (
    BLOCK_SIZE,
    DONE,
    IdPrompts,
    answer,
    burst,
    chain,
    good,
    turn,
    usage,
    word,
    workload,
)
from tests.ports import free_port

INSTANT = EmulatorOptions(time_model=PRESETS["instant"], block_size=BLOCK_SIZE)
PATIENCE_S = 60.0


async def play(work: Workload, url: str, **options: Any) -> list[TurnResult]:
    run = await replay(
        work, url, options=ReplayOptions(**{"loop": "closed"} | options), prompts=IdPrompts()
    )
    return list(run.turns)


@pytest.fixture
async def emulator() -> AsyncIterator[Emulator]:
    async with Emulator(INSTANT) as running:
        yield running


# -- what is sent, and what is measured ----------------------------------------------------------


async def test_a_conversation_on_the_emulator(emulator: Emulator) -> None:
    """Turns go in order, what repeats is found in the cache, replies are as long as asked for."""
    sent: list[Turn] = []
    seen: list[TurnResult] = []
    started: list[RunInfo] = []

    run = await replay(
        chain(4),
        emulator.url + "/v1/",
        options=ReplayOptions(label="me", seed=3, loop="closed"),
        prompts=IdPrompts(),
        on_result=seen.append,
        on_send=sent.append,
        on_start=lambda info, target: started.append(info),
    )

    assert (run.info.label, run.info.loop, run.info.is_complete) == ("me", "closed", True)
    assert (run.info.target, run.info.seed, run.info.note) == (emulator.url, 3, "")
    assert run.info.settings["model"] == "tiny"
    assert started == [run.info]
    assert run.info.settings["num_turns"] == 4
    assert list(run.turns) == seen
    assert [turn.number for turn in sent] == [0, 1, 2, 3]
    assert [result.error for result in seen] == [None] * 4
    assert [result.num_prompt_tokens for result in seen] == [16, 32, 48, 64]
    assert [result.num_cached_tokens for result in seen] == [0, 16, 32, 48]
    assert [result.num_output_tokens for result in seen] == [3] * 4
    for result in seen:
        assert result.ttft_s is not None
        assert 0 < result.ttft_s <= result.total_s
        assert result.due_s is None


async def test_messages_go_to_the_chat_api(emulator: Emulator) -> None:
    """Prompts that are messages are sent as a chat."""

    class Chat:
        def body(self, turn: Turn) -> dict[str, Any]:
            return {"messages": [{"role": "user", "content": "hello there"}]}

    run = await replay(burst(1), emulator.url, options=ReplayOptions(), prompts=Chat())

    assert [(result.error, result.num_output_tokens) for result in run.turns] == [(None, 3)]


async def test_what_goes_into_a_request() -> None:
    """Length, model, usage, extra fields, headers and the key are in every request."""
    async with FakeEngine(good) as engine:
        work = workload(turn("s", 0, num_output_tokens=50), turn("t", 0, num_output_tokens=0))
        await play(
            work,
            engine.url,
            max_tokens=20,
            api_key="sk-1",
            headers={"X-Team": "blue"},
            session_header="x-session-id",
            extra_body={"top_k": 5},
        )
        await play(burst(1), engine.url, ignore_eos=False, model="tiny")

    by_session = {each.headers.get("x-session-id"): each for each in engine.received}
    first, second, third = (json.loads(by_session[key].body) for key in ("s", "t", None))
    assert first | {"prompt": []} == {
        "max_tokens": 20,
        "model": "tiny",
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_k": 5,
        "prompt": [],
    }
    assert second["max_tokens"] == 1
    assert "ignore_eos" not in third
    headers = by_session["s"].headers
    assert (headers["Authorization"], headers["X-Team"]) == ("Bearer sk-1", "blue")
    assert len(engine.received) == 3


async def test_long_prompts_go_in_one_piece(emulator: Emulator) -> None:
    """A body of megabytes is made off the loop and sent whole."""
    blocks = tuple(range(1, 20_001))
    async with FakeEngine(good) as engine:
        results = await play(workload(turn("s", 0, hash_ids=blocks)), engine.url)

    assert results[0].error is None
    assert len(json.loads(engine.received[0].body)["prompt"]) == 320_000
    assert "Content-Length" in engine.received[0].headers


# -- open loop -----------------------------------------------------------------------------------


async def test_open_loop_does_not_wait_for_answers() -> None:
    """Turns are sent when they are due though none before them is answered."""
    gate = asyncio.Event()

    async def late(request: web.Request) -> web.StreamResponse:
        if len(engine.received) == 5:
            gate.set()
        await gate.wait()
        return await good(request)

    async with FakeEngine(late) as engine, asyncio.timeout(PATIENCE_S):
        results = await play(burst(5, every_s=0.01), engine.url, loop="open")

    assert [result.error for result in results] == [None] * 5
    assert sorted(r.due_s for r in results if r.due_s is not None) == pytest.approx(
        [0.0, 0.01, 0.02, 0.03, 0.04]
    )
    for result in results:
        assert result.due_s is not None
        assert result.late_s == pytest.approx(result.start_s - result.due_s)


async def test_a_stall_counts_from_when_turns_were_due() -> None:
    """No coordinated omission: who is due while the server stands still waits from then on."""
    arrived_s: dict[str, float] = {}
    over = asyncio.Event()
    over_s = 0.0

    async def stalled(request: web.Request) -> web.StreamResponse:
        nonlocal over_s
        arrived_s[request.headers["x-session-id"]] = time.monotonic()
        if len(arrived_s) == 20:  # it stands still until all of them wait
            over_s = time.monotonic()
            over.set()
        await over.wait()
        return await good(request)

    async with FakeEngine(stalled) as engine, asyncio.timeout(PATIENCE_S):
        results = await play(
            burst(20, every_s=0.02), engine.url, loop="open", session_header="x-session-id"
        )

    ttfts = {result.session_id: result.ttft_s or 0.0 for result in results}
    for result in results:
        # It was sent, `late_s` after it was due, before it arrived; it had no token before the end.
        waited_s = over_s - arrived_s[result.session_id] + result.late_s
        assert ttfts[result.session_id] >= waited_s - 0.001
    assert ttfts["s0"] >= 19 * 0.02 - 0.005


async def test_a_late_driver_says_so() -> None:
    """A driver that was held up counts times from the due time and reports its lateness."""

    class Slow(IdPrompts):
        def body(self, turn: Turn) -> dict[str, Any]:
            body = super().body(turn)
            if turn.session_id == "s1":
                time.sleep(0.1)
            return body

    async with FakeEngine(good) as engine:
        run = await replay(burst(3), engine.url, options=ReplayOptions(loop="open"), prompts=Slow())

    late = {result.session_id: result for result in run.turns}["s2"]
    assert late.late_s >= 0.1
    assert late.ttft_s is not None
    assert late.ttft_s > late.late_s


async def test_rates_scale_the_arrivals() -> None:
    """100 turns a second over a workload of one a second: due every 10 ms."""
    async with FakeEngine(good) as engine:
        results = await play(burst(4, every_s=1.0), engine.url, loop="open", rate=100.0)

    due = sorted(result.due_s or 0.0 for result in results)
    assert due == pytest.approx([0.0, 0.01, 0.02, 0.03])


async def test_a_rate_needs_the_open_loop() -> None:
    """In the closed loop the target sets the pace: an error before anything is sent."""
    async with FakeEngine(good) as engine:
        with pytest.raises(ValueError, match="open loop"):
            await play(chain(2), engine.url, rate=5.0)

    assert engine.received == []


# -- closed loop ---------------------------------------------------------------------------------


async def test_closed_loop_bounds_sessions() -> None:
    """Two sessions at once are two requests at once, and all are served."""
    running = most = 0

    async def counted(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        response = await good(request)
        running -= 1
        return response

    async with FakeEngine(counted) as engine:
        results = await play(burst(8), engine.url, loop="closed", concurrency=2)

    assert len(results) == 8
    assert most == 2


async def test_a_failed_turn_does_not_end_its_session() -> None:
    """Every target gets the same turns: the next one is sent after a failed one, too."""

    async def second_fails(request: web.Request) -> web.StreamResponse:
        if len(engine.received) == 2:
            return web.json_response({"error": {"message": "no"}}, status=500)
        return await good(request)

    async with FakeEngine(second_fails) as engine:
        results = await play(chain(3), engine.url)

    assert [result.error for result in results] == [None, "http_500", None]


async def test_tool_waits_are_kept() -> None:
    """The next turn is not sent before its tool has run."""
    async with FakeEngine(good) as engine:
        results = await play(chain(2, wait_s=0.2), engine.url)

    first, second = results
    assert second.start_s - (first.start_s + first.total_s) >= 0.2 - 0.002


# -- what goes wrong -----------------------------------------------------------------------------


async def test_a_server_that_hangs_up() -> None:
    """A connection that is cut, before or inside the answer, is `broken`."""

    async def cut(request: web.Request) -> web.StreamResponse:
        if len(engine.received) > 1:
            await answer(request, word())
        hang_up(request)
        return web.Response()

    async with FakeEngine(cut) as engine:
        results = await play(chain(2), engine.url)

    assert [result.error for result in results] == ["broken", "broken"]


async def test_silence_is_a_timeout() -> None:
    """Who says nothing for too long is given up; what came before the silence is kept."""

    async def pause(request: web.Request) -> web.StreamResponse:
        response = await answer(request, word())
        await asyncio.sleep(PATIENCE_S)
        return response

    async with FakeEngine(pause) as engine:
        results = await play(burst(1), engine.url, timeout_s=1.0)

    assert results[0].error == "timeout"
    assert results[0].ttft_s is not None


async def test_usage_may_be_missing() -> None:
    """A target that reports no usage, or no cached tokens, has unknown counts, not zero."""

    async def silent(request: web.Request) -> web.StreamResponse:
        if len(engine.received) == 1:
            return await answer(request, word(), DONE)
        return await answer(request, word(), usage(cached=None), DONE)

    async with FakeEngine(silent) as engine:
        first, second = await play(chain(2), engine.url)

    assert (first.num_prompt_tokens, first.num_cached_tokens) == (None, None)
    assert (second.num_prompt_tokens, second.num_cached_tokens) == (16, None)


async def test_a_target_that_dies_midway() -> None:
    """The run ends after so many refused connections; what was measured is kept, and reported."""
    options = EmulatorOptions(time_model=TimeModel(base_ms=1.0), block_size=BLOCK_SIZE)
    async with Emulator(options) as emulator:
        done = 0

        def kill_at_ten(result: TurnResult) -> None:
            nonlocal done
            done += 1
            if done == 10:
                emulator.app.arm(Fault(kind="kill"))

        async with asyncio.timeout(PATIENCE_S):
            run = await replay(
                burst(200, every_s=0.01),
                emulator.url,
                options=ReplayOptions(loop="open"),
                prompts=IdPrompts(),
                on_result=kill_at_ten,
            )

    assert not run.info.is_complete
    assert "the target is gone" in run.info.note
    assert "not sent" in run.info.note
    assert sum(result.error is None for result in run.turns) >= 10
    assert [result.error for result in run.turns[-10:]].count("connect") >= 9
    assert len(run.turns) < 200


async def test_errors_that_are_answers_do_not_end_the_run() -> None:
    """A target that refuses everything is still there: all turns are sent."""

    async def busy(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "busy"}, status=503)

    async with FakeEngine(busy) as engine:
        results = await play(burst(30), engine.url)

    assert {result.error for result in results} == {"http_503"}
    assert len(results) == 30


# -- how it ends ---------------------------------------------------------------------------------


async def test_a_cancelled_replay_is_a_partial_run() -> None:
    """What is in flight is dropped, what is done is returned, and the task goes on."""

    async def first_only(request: web.Request) -> web.StreamResponse:
        if len(engine.received) > 1:
            asyncio.get_running_loop().call_soon(task.cancel)
            await asyncio.sleep(PATIENCE_S)
        return await good(request)

    async with FakeEngine(first_only) as engine, asyncio.TaskGroup() as group:
        task = group.create_task(
            replay(chain(3), engine.url, options=ReplayOptions(loop="closed"), prompts=IdPrompts())
        )
        run = await task
        async with asyncio.timeout(PATIENCE_S):
            await engine.left.wait()

    assert not run.info.is_complete
    assert run.info.note.startswith("interrupted at ")
    assert run.info.note.endswith("1 of 3 turns done, 1 in flight dropped, 1 not sent")
    assert [result.number for result in run.turns] == [0]


async def test_stopping_in_time_awaits_what_is_in_flight() -> None:
    """After `stop_after_s` nothing is sent any more; answers under way are measured."""

    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(1.5)
        return await good(request)

    async with FakeEngine(slow) as engine, asyncio.timeout(PATIENCE_S):
        run = await replay(
            workload(turn("a", 0), turn("b", 0, 100.0)),
            engine.url,
            options=ReplayOptions(stop_after_s=1.0, loop="open"),
            prompts=IdPrompts(),
        )

    assert run.info.is_complete
    assert run.info.note == "stopped after 1 s, as asked: 1 of 2 turns done, 1 not sent"
    assert [result.error for result in run.turns] == [None]


async def test_warm_up_turns_are_marked() -> None:
    """The first turns are sent but not to be counted."""
    async with FakeEngine(good) as engine:
        results = await play(burst(4), engine.url, warm_up_turns=2)

    assert {result.session_id for result in results if result.is_warm_up} == {"s0", "s1"}


async def test_an_empty_workload_is_a_complete_run() -> None:
    """Nothing to send, nothing measured, nothing wrong."""
    async with FakeEngine(good) as engine:
        run = await replay(workload(), engine.url, options=ReplayOptions(), prompts=IdPrompts())

    assert run.info.is_complete
    assert run.turns == ()


async def test_errors_of_our_own_come_out_as_they_are() -> None:
    """What a listener raises ends the replay and reaches the caller by itself."""

    def full(result: TurnResult) -> None:
        raise OSError("disk full")

    async with FakeEngine(good) as engine:
        with pytest.raises(OSError, match="disk full"):
            await replay(
                burst(2),
                engine.url,
                options=ReplayOptions(),
                prompts=IdPrompts(),
                on_result=full,
            )


async def test_nothing_is_sent_to_a_target_that_is_not_there() -> None:
    """An unreachable target is an error before the first turn."""
    with pytest.raises(TargetError, match="nothing answers"):
        await play(burst(1), f"http://127.0.0.1:{free_port()}")
