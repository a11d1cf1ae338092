"""Faults, seen from outside: what a client and a subscriber meet.

Whose turn it is to fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
import zmq
import zmq.asyncio
from msgspec.structs import replace

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.events import GARBAGE
from loadtest.emulator.faults import Fault, FaultKind, Faults
from loadtest.emulator.options import EmulatorOptions
from loadtest.engine_model.time_model import PRESETS
from router.kv_events.wire import END_OF_REPLAY, BlockStored, decode

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello " * 60}], "max_tokens": 8}
OPTIONS = EmulatorOptions(time_model=PRESETS["instant"])


@pytest.fixture
async def replica() -> AsyncIterator[Emulator]:
    async with Emulator(OPTIONS) as replica:
        yield replica


@pytest.fixture
async def session(replica: Emulator) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(replica.url) as session:
        yield session


async def arm(session: aiohttp.ClientSession, *faults: dict[str, Any]) -> dict[str, Any]:
    async with session.post("/emulator/faults", json=list(faults)) as answer:
        assert answer.status == 200
        return dict(await answer.json())


async def ask(session: aiohttp.ClientSession, **change: Any) -> dict[str, Any]:
    async with session.post(CHAT, json=BODY | change) as answer:
        answer.raise_for_status()
        return dict(await answer.json())


@pytest.mark.parametrize(("kind", "status"), [("refuse", 503), ("status", 418)])
async def test_a_status_on_command(session: aiohttp.ClientSession, kind: str, status: int) -> None:
    """Once, as armed, then all is well again."""
    listed = await arm(session, {"kind": kind, "count": 1, "status": 418})
    assert listed["armed"][0]["kind"] == kind

    async with session.post(CHAT, json=BODY) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["code"] == status

    assert (await ask(session))["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_death_after_the_first_byte(
    replica: Emulator, session: aiohttp.ClientSession, stream: bool
) -> None:
    """A stream breaks in the middle, a whole answer never comes; no request stays behind."""
    await arm(session, {"kind": "die_after", "count": 1, "after_tokens": 2})

    received = b""
    with pytest.raises(aiohttp.ClientError):  # noqa: PT012 - what came before the end counts
        async with session.post(CHAT, json=BODY | {"stream": stream}) as answer:
            async for line in answer.content:
                received += line

    assert (b'"content"' in received) == stream
    assert b"[DONE]" not in received
    await ask(session)
    assert replica.replica.ranks[0].engine.num_requests == 0


async def test_faults_can_be_seen_and_cleared(
    replica: Emulator, session: aiohttp.ClientSession
) -> None:
    """DELETE disarms requests' faults, slowness and silence."""
    await arm(
        session,
        {"kind": "refuse"},
        {"kind": "slow", "factor": 3.0},
        {"kind": "silence_events"},
        {"kind": "drop_events", "count": 5},
        {"kind": "truncate_replay"},
    )
    rank = replica.replica.ranks[0]
    assert rank.publisher is not None
    assert rank.engine.slowdown == 3.0
    assert (rank.publisher.silent, rank.publisher.num_to_drop) == (True, 5)

    async with session.delete("/emulator/faults") as answer:
        assert (await answer.json())["armed"] == []

    assert rank.engine.slowdown == 1.0
    assert (rank.publisher.silent, rank.publisher.num_to_drop) == (False, 0)
    await ask(session)


@pytest.mark.parametrize("moves", [False, True])
async def test_a_restart_empties_the_cache_and_counts_events_from_zero(moves: bool) -> None:
    """Same addresses (or a new port), nothing cached; a subscriber sees 0 again."""
    async with Emulator(OPTIONS) as replica:
        first = replica.replica.ranks[0].publisher
        assert first is not None
        port = replica.port
        new_port = 0 if moves else None
        async with aiohttp.ClientSession() as session:
            for salt in ("a", "b"):
                await one(session, replica.url, salt)
            replica.changed.clear()
            fault = {"kind": "restart", "down_s": 0.01, "port": new_port}
            async with session.post(f"{replica.url}/emulator/faults", json=fault) as answer:
                await answer.read()
            await replica.changed.wait()

            assert replica.num_lives == 2
            assert (replica.port == port) != moves
            second = replica.replica.ranks[0].publisher
            assert second is not None
            assert second is not first
            assert second.ports == first.ports
            usage = await one(session, replica.url, "a")
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
            numbers, first_event = await replay(second.ports[1])
            assert numbers[0] == 0
            assert isinstance(first_event, BlockStored)


async def replay(port: int) -> tuple[list[int], Any]:
    """Fetch all buffered batches: their numbers, and the very first event."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{port}")
    await socket.send_multipart([b"", (0).to_bytes(8, "big")])
    batches: list[list[bytes]] = []
    while not batches or batches[-1][2] != END_OF_REPLAY:
        batches.append(await socket.recv_multipart())
    socket.close(linger=0)
    context.term()
    numbers = [int.from_bytes(frames[2], "big") for frames in batches[:-1]]
    return numbers, decode(batches[0][3], with_tokens=True).events[0]


async def one(session: aiohttp.ClientSession, url: str, salt: str) -> dict[str, Any]:
    async with session.post(url + CHAT, json=BODY | {"cache_salt": salt}) as answer:
        return dict((await answer.json())["usage"])


async def test_where_it_may_the_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line `kill` is SIGKILL for the process itself."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    options = EmulatorOptions(time_model=PRESETS["instant"], may_kill=True)
    async with Emulator(options) as replica:
        replica.app.arm(_fault("kill"))
        await replica.serve()

    assert killed == [(os.getpid(), signal.SIGKILL)]


async def test_a_taken_port_is_named_and_nothing_stays_open() -> None:
    """HTTP or event port: the error comes through, and the ports of the failed start are free."""
    async with Emulator(OPTIONS) as first:
        with pytest.raises(OSError, match="in use"):
            async with Emulator(EmulatorOptions(port=first.port)):
                pass
        publisher = first.replica.ranks[0].publisher
        assert publisher is not None
        with pytest.raises(zmq.ZMQError, match="in use"):
            async with Emulator(EmulatorOptions(replay_port=publisher.ports[1])):
                pass


def _fault(kind: FaultKind) -> Fault:
    return Fault(kind=kind)


async def test_garbage_is_published_as_batches_are(
    replica: Emulator, session: aiohttp.ClientSession
) -> None:
    """Numbered, and kept for the replay, too: a subscriber cannot avoid it."""
    publisher = replica.replica.ranks[0].publisher
    assert publisher is not None
    before = publisher.next_sequence

    await arm(session, {"kind": "garbage_events", "count": 7})

    payloads = [payload for _, payload in publisher.buffer]
    assert publisher.next_sequence == before + 7
    assert payloads[-7:] == [*GARBAGE, GARBAGE[0]]


async def test_generations_are_noted_at_both_ends(tmp_path: Path) -> None:
    """By the client's request id: one that is cut is not whole."""
    log = tmp_path / "requests.jsonl"
    poison = BODY | {"stream": True, "emulator": {"poison": "die_after"}}
    async with (
        Emulator(replace(OPTIONS, request_log=log)) as replica,
        aiohttp.ClientSession(replica.url) as session,
    ):
        async with session.post(CHAT, json=BODY, headers={"X-Request-Id": "one"}) as answer:
            await answer.read()
        with pytest.raises(aiohttp.ClientError):
            async with session.post(CHAT, json=poison, headers={"X-Request-Id": "two"}) as answer:
                await answer.read()

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    ends = {line["request"]: line["is_whole"] for line in lines if line["is_end"]}
    assert ends == {"one": True, "two": False}
    assert len(lines) == 4


@pytest.mark.parametrize("num_turns", range(4))
def test_a_connection_that_is_being_made_ends_with_the_replica(num_turns: int) -> None:
    """It is accepted by uvloop, and not among the connections yet; nothing serves it any more."""

    async def connect_and_close() -> bytes:
        loop = asyncio.get_running_loop()
        async with Emulator(OPTIONS) as replica:
            with socket.create_connection(("127.0.0.1", replica.port)) as client:
                client.setblocking(False)
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                await replica.close()
                with contextlib.suppress(ConnectionError):
                    await loop.sock_sendall(client, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                    async with asyncio.timeout(60):
                        return await loop.sock_recv(client, 100)
                return b""

    assert uvloop.run(connect_and_close()) == b""


def test_chance_is_repeatable() -> None:
    """Same seed, same requests fail, about as many as said."""

    def outcomes(seed: int) -> list[bool]:
        faults = Faults(seed)
        faults.arm(Fault(kind="die_before", probability=0.3))
        return [faults.next() is not None for _ in range(200)]

    assert outcomes(1) == outcomes(1)
    assert outcomes(1) != outcomes(2)
    assert 30 < sum(outcomes(1)) < 90


def test_faults_of_the_whole_replica_cannot_be_armed_for_requests() -> None:
    """A restart happens at once, not to a request."""
    with pytest.raises(ValueError, match="restart is not a fault of requests"):
        Faults(seed=0).arm(Fault(kind="restart"))
