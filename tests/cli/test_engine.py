"""`warmroute engine`: where an order goes is said, and a terminal is asked first."""

from __future__ import annotations

import asyncio
import os
import pty
from contextlib import AsyncExitStack, suppress

import pytest
from aiohttp import web

from tests.cli.running import beside
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import STUCK, Engines, Stage, chat, num_running, on_stage, words
from tests.forks import python_command, python_environment


async def _does(_: web.Request) -> web.Response:
    return web.json_response({})


@pytest.mark.parametrize(
    "route",
    ["sleep", "pause", "release_kv_cache_memory", "reset_prefix_cache", "reset_mm_cache",
     "reset_encoder_cache", "wake_up", "resume", "start_profile", "unload_lora_adapter"],
)  # fmt: skip
async def test_an_order_for_nobody_in_particular_reaches_no_engine(route: str) -> None:
    async with FakeEngine(_does) as a, FakeEngine(_does) as b, on_stage(a, b) as stage:
        result = await beside(stage, "engine", route)
        both = await beside(stage, "engine", route, "--all", "--replica", "r1")

        assert (a.received, b.received) == ([], [])
    assert (result.exit_code, both.exit_code) == (2, 2)
    assert f"say where: {route} --replica NAME" in result.stderr
    assert "--all" in result.stderr
    assert "not both" in both.stderr


@pytest.mark.parametrize(("where", "sent"), [(("--all",), (1, 1)), (("--replica", "r2"), (0, 1))])
async def test_a_script_says_where_and_is_not_asked(
    where: tuple[str, ...], sent: tuple[int, int]
) -> None:
    async with FakeEngine(_does) as a, FakeEngine(_does) as b, on_stage(a, b) as stage:
        result = await beside(stage, "engine", "sleep", "level=1", *where)

        assert (len(a.received), len(b.received)) == sent
    assert result.exit_code == 0


async def test_a_question_may_go_to_all() -> None:
    """It changes nothing."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        result = await beside(stage, "engine", "is_sleeping")

    assert result.stdout.count('{"is_sleeping": false}') == 2


async def on_a_terminal(stage: Stage, *args: str, answer: bytes) -> tuple[int, str]:
    """Run the command with a terminal as its input; return its exit status and what it wrote."""
    ours, theirs = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            *(*python_command(), "-m", "router.cli", "engine", *args, "--admin", stage.admin_url),
            stdin=theirs,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=python_environment(),
        )
        assert process.stdout is not None
        written = b""
        if answer:
            with suppress(asyncio.IncompleteReadError):
                written = await process.stdout.readuntil(b"[y/N]: ")
            os.write(ours, answer)
        written += await process.stdout.read()
        return await process.wait(), written.decode()
    finally:
        os.close(ours)
        os.close(theirs)


async def test_a_terminal_is_asked_with_the_number_of_requests_in_flight() -> None:
    """No is the default, and sends nothing."""
    async with Engines(2, time_model=STUCK) as engines, on_stage(*engines) as stage:
        async with AsyncExitStack() as stack:
            for number in range(3):
                await stack.enter_async_context(stage.hanging_up(chat(words(number))))
            await stage.until(lambda: sum(map(num_running, engines)) == 3)
            at_first = num_running(engines[0])
            status, asked = await on_a_terminal(stage, "sleep", "level=1", "--all", answer=b"\n")
            one = await on_a_terminal(stage, "pause", "--replica", "r1", answer=b"n\n")

        assert all(engine.replica.sleep_level is None for engine in engines)
        assert not engines[0].replica.is_paused
    assert status == one[0] == 1
    assert "3 requests in flight at all replicas (2). Send sleep level=1? [y/N]" in asked
    noun = "request" if at_first == 1 else "requests"
    assert f"{at_first} {noun} in flight at r1. Send pause?" in one[1]


async def test_what_a_terminal_confirms_is_sent() -> None:
    """What interrupts nothing is sent without a question."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        status, text = await on_a_terminal(stage, "sleep", "--replica", "r2", answer=b"y\n")
        levels = [engine.replica.sleep_level for engine in engines]
        woken = await on_a_terminal(stage, "wake_up", "--all", answer=b"")
        told = await on_a_terminal(stage, "is_sleeping", answer=b"")

    assert (status, levels) == (0, [None, 1])
    assert "r2: 200" in text
    assert woken[0] == told[0] == 0
    assert "[y/N]" not in woken[1] + told[1]
