"""Several workers of one command: real processes, a real Redis, emulated engines."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import pytest

from loadtest.emulator.emulator import Emulator
from tests.faults.stage import SLOW, Engines, chat, records_in, streamed, words
from tests.ports import free_port
from tests.redis_servers import Start
from tests.waiting import until
from tests.workers.served import Served, serving_workers

pytestmark = pytest.mark.usefixtures("forked_children")


async def ask_both(served: Served, *engines: Emulator) -> int:
    """Ask on new connections until each worker has answered; return the number of requests."""
    for number in range(100):
        assert (await served.ask(chat(words(number)), f"session-{number}")).status == 200
        if len(await served.metric("warmroute_requests_total")) == 2:
            await served.know(*engines)
            return number + 1
    raise AssertionError("one worker gets all connections")


async def test_what_clients_and_operators_see_is_one_router() -> None:
    """Predictions are exact whichever worker a turn comes to; commands show all of it."""
    async with Engines(2) as engines, serving_workers(*engines) as served:
        texts, replies = [words(7, num_words=150)], []
        for turn in range(8):
            reply = await served.ask(chat(*texts))
            replies.append(reply)
            texts += [reply.text, words(100 + turn, num_words=20)]
            await served.know(*engines)
        number = len(replies) + await ask_both(served, *engines)

        assert all(reply.predicted == reply.reported for reply in replies)
        assert len({reply.replica for reply in replies}) == 1
        page = await served.get("/metrics", admin=False)
        samples = [line for line in page.splitlines() if not line.startswith("#")]
        assert all('worker="' in line for line in samples)
        helps = [line for line in page.splitlines() if line.startswith("# HELP")]
        assert len(helps) == len(set(helps)) > 50
        assert sum((await served.metric("warmroute_requests_total")).values()) == number
        assert (await served.get("/admin/metrics")).count("warmroute_worker_up{") == 2

        async def are_booked() -> bool:
            """Return whether the causes of all turns are known, also to the other worker."""
            sessions = (await served.get("/admin/sessions"))["sessions"]
            return sum(each["turns"] for each in sessions) == number

        await until(are_booked)
        state = await served.get("/admin/state")
        assert state["workers"] == {"total": 2, "missing": [], "degraded": []}
        assert sum(state["tokens"]["totals"]) == sum(
            (await served.metric("warmroute_prompt_tokens_total")).values()
        )
        assert sum(row["audited"] for row in state["replicas"]["shown"]) == number
        listed = await served.get("/admin/sessions")
        for reply in replies:
            name = reply.headers["x-warmroute-request-id"]
            turn = (await served.get(f"/admin/requests/{name}"))["turn"]
            assert turn["request_id"] == name

        status = await served.beside("status")
        assert status.exit_code == 0, status.output
        assert "2 workers" in status.output
        for command in ("why", "page"):
            assert (await served.beside(command)).exit_code == 0
        listing = await served.beside("why", "--json")
        assert json.loads(listing.output)["total"] == len(listed["sessions"])


async def test_orders_reach_all_workers_and_those_started_later() -> None:
    async with Engines(2) as (first, second), serving_workers(first) as served:
        added = {"url": second.url, "name": "late"}
        assert await served.post("/admin/replicas", added) == 201
        await served.until_all("warmroute_replica_healthy", 2.0)
        assert await served.post("/admin/replicas/r1/drain", {"draining": True}) == 200
        await served.until_all("warmroute_replica_withheld", 1.0, replica="r1")

        served.kill_worker(1)
        await until(lambda: served.said("process ended", "worker 1"))
        await served.together()
        await served.until_all("warmroute_replica_healthy", 1.0, replica="late")
        await served.until_all("warmroute_replica_withheld", 1.0, replica="r1")
        assert (await served.ask()).replica == "late"


async def test_the_feed_has_the_requests_of_all_workers() -> None:
    async with Engines(1) as engines, serving_workers(*engines) as served:
        ended: set[str] = set()
        states: list[dict[str, Any]] = []

        async def listen() -> None:
            """Follow the feed, again if the worker that has the connection is killed."""
            while True:
                with suppress(aiohttp.ClientError):
                    async with (
                        aiohttp.ClientSession() as client,
                        client.get(f"{served.admin_url}/admin/live") as answer,
                    ):
                        async for line in answer.content:
                            fields = orjson.loads(line)
                            if fields["kind"] == "decision":
                                ended.add(fields["request"])
                            else:
                                states.append(fields)

        async with asyncio.TaskGroup() as tg:
            listening = tg.create_task(listen())
            await until(lambda: states and not states[-1]["workers"]["missing"])
            asked = {(await served.ask()).headers["x-warmroute-request-id"] for _ in range(12)}
            await ask_both(served, *engines)
            await until(lambda: asked <= ended)

            def is_missed() -> bool:
                """Return whether a state lacks worker 2; it may be back before the next one."""
                with suppress(KeyError, OSError):
                    served.kill_worker(2)
                return bool(states[-1]["workers"]["missing"] == [2])

            await until(is_missed)
            assert "worker 2 does not answer" in str(states[-1]["degraded"])
            await until(lambda: not states[-1]["workers"]["missing"])
            listening.cancel()


async def test_a_listener_gets_the_last_requests_of_all_workers() -> None:
    async with Engines(1) as engines, serving_workers(*engines) as served:
        num_asked = await ask_both(served, *engines)
        found: set[str] = set()
        async with (
            asyncio.timeout(60),
            aiohttp.ClientSession() as client,
            client.get(f"{served.admin_url}/admin/live?last=20") as answer,
        ):
            while len(found) < min(num_asked, 10):  # ten of each worker
                fields = orjson.loads(await answer.content.readline())
                if fields["kind"] == "decision":
                    found.add(fields["request"])
        async with aiohttp.ClientSession() as client:
            refused = await client.get(f"{served.admin_url}/admin/live?last=21")
        assert refused.status == 400


async def open_streams(
    served: Served, stack: AsyncExitStack, num_each: int = 2
) -> dict[int, list[aiohttp.ClientResponse]]:
    """Begin streams until each worker has some."""
    found: dict[int, list[aiohttp.ClientResponse]] = {1: [], 2: []}
    while any(len(streams) < num_each for streams in found.values()):
        client = await stack.enter_async_context(aiohttp.ClientSession())
        answer = await stack.enter_async_context(
            client.post(
                f"{served.url}/v1/chat/completions",
                json=streamed(chat(words(len(found[1]) * 100 + len(found[2])), max_tokens=100)),
            )
        )
        assert answer.connection is not None
        port = answer.connection.transport.get_extra_info("sockname")[1]
        found[served.worker_of(port)].append(answer)
    return found


async def test_a_worker_that_is_killed_touches_no_request_of_another() -> None:
    """It is started again, and the other one's streams end as if nothing had been."""
    slow = Engines(2, time_model=SLOW, reply_tokens=100)
    async with slow as engines, serving_workers(*engines) as served, AsyncExitStack() as stack:
        streams = await open_streams(served, stack)
        served.kill_worker(1)

        for answer in streams[1]:
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        for answer in streams[2]:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        await served.together()
        assert (await served.ask(chat(words(1), max_tokens=2))).status == 200
        assert served.said("process ended; it is started again", "worker 1", "SIGKILL") == 1
        # What the dead worker had in flight counts no longer.
        await served.until_all("warmroute_inflight_requests", 0.0)


async def test_a_worker_that_ends_again_and_again_is_said_once() -> None:
    async with Engines(1) as engines, serving_workers(*engines) as served:
        for _ in range(5):
            await until(lambda: served.pid_of(1) is not None)
            pid = served.pid_of(1)
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                served.kill_worker(1)
            await until(lambda pid=pid: served.pid_of(1) != pid)
            assert (await served.ask()).status == 200

        assert served.said("process ended; it is started again") == 1
        assert served.said("process ends again and again", "longest_pause_s=5") == 1
        await served.together()


async def test_sigterm_drains_all_workers() -> None:
    """Every stream ends, and nothing is left of the workers."""
    slow = Engines(2, time_model=SLOW, reply_tokens=100)
    async with slow as engines, serving_workers(*engines) as served, AsyncExitStack() as stack:
        streams = await open_streams(served, stack)
        folder = Path(served.redis.cwd())
        left = [*served.workers().values(), served.redis]
        served.process.send_signal(signal.SIGTERM)

        for answer in (answer for answers in streams.values() for answer in answers):
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        await until(lambda: served.process.returncode is not None)
        assert served.process.returncode == 0
        assert all(map(served.has_ended, left))
        assert folder.name.startswith("warmroute-")
        assert not await asyncio.to_thread(folder.exists)


async def test_workers_and_their_redis_end_with_their_parent() -> None:
    async with Engines(1) as engines, serving_workers(*engines) as served:
        left = [*served.workers().values(), served.redis]
        served.parent.kill()
        await until(lambda: all(map(served.has_ended, left)))


async def test_sighup_reloads_all_workers(tmp_path: Path) -> None:
    file = tmp_path / "warmroute.yaml"
    file.write_text("policy: {name: kv_aware}\n")
    async with (
        Engines(1) as engines,
        serving_workers(*engines, args=("--config", str(file))) as served,
    ):
        file.write_text("policy: {name: round_robin}\n")
        served.process.send_signal(signal.SIGHUP)
        for number in (1, 2):
            await until(
                lambda number=number: served.said("reloaded", "policy.name", f"worker={number}")
            )
        served.kill_worker(1)
        await until(lambda: served.said("process ended", "worker 1"))
        file.write_text("policy: {name: least_loaded}\n")
        served.process.send_signal(signal.SIGHUP)  # while one of them starts
        await served.together()
        for number in (1, 2):

            async def is_in_force(number: int = number) -> bool:
                return await served.policy_of(number) == "least_loaded"

            await until(is_in_force)
        assert served.said("process ended") == 1


async def test_no_request_fails_though_the_workers_redis_is_killed() -> None:
    async with Engines(2) as engines, serving_workers(*engines) as served:
        statuses: list[int] = []
        is_over = asyncio.Event()

        async def load(number: int) -> None:
            while not is_over.is_set():
                statuses.append((await served.ask(chat(words(number)), f"s-{number}")).status)

        async with asyncio.TaskGroup() as tg:
            for number in range(4):
                tg.create_task(load(number))
            before = served.redis.pid
            served.redis.kill()
            await until(lambda: served.said("process ended", "redis"))
            await until(
                lambda: any(
                    "redis" in each.name() and each.pid != before
                    for each in served.parent.children()
                )
            )
            await served.together()
            is_over.set()
        assert set(statuses) == {200}


async def test_workers_of_a_configured_redis_append_to_one_decision_log(
    tmp_path: Path, start_redis: Start
) -> None:
    """They have no Redis of their own then."""
    file = tmp_path / "decisions.jsonl"
    args = ("--decision-log", str(file), "--redis", start_redis().url)
    async with Engines(1) as engines, serving_workers(*engines, args=args) as served:
        assert not any("redis" in each.name() for each in served.parent.children())
        number = await ask_both(served, *engines)
    assert len(records_in(file)) == number


async def refused(*args: str) -> str:
    """Try to serve with two workers; return why not."""
    from tests.cli.running import serving

    async with serving("--workers", "2", "--replica", "http://127.0.0.1:9", *args) as process:
        assert process.stderr is not None
        said = (await process.stderr.read()).decode()
        assert await process.wait() == 2
    return said


@pytest.mark.parametrize("taken", ["--port", "--admin-port"])
async def test_a_port_that_is_taken_is_said_once(taken: str) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        other = "--admin-port" if taken == "--port" else "--port"
        said = await refused(taken, str(port), other, "0")

    assert said == f"warmroute: cannot listen on 127.0.0.1:{port}: Address already in use\n"


async def test_one_port_cannot_be_both() -> None:
    port = str(free_port())
    said = await refused("--port", port, "--admin-port", port)

    assert said == f"warmroute: admin.port: {port} is listen.port already\n"


async def test_what_no_worker_can_start_with_is_said_once(tmp_path: Path) -> None:
    missing = ("--engine-api-key-file", str(tmp_path / "key"))
    said = await refused("--port", "0", "--admin-port", "0", *missing)

    assert said == "warmroute: engine.api_key_file: No such file or directory\n"
