"""Crowds at one router process: many agents that think, many streams at once, a burst of chats.

Agents keep their connections open and send a short turn now and then, throughout. In front of them
come streams, all at once, and then large chats, all at once, whose prompts are new. Another
process asks `/healthz` on a new connection 50 times a second, as a liveness probe would.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

import uvloop
from msgspec import Struct

from loadtest.dev.bench.client import Connection, request_bytes
from loadtest.dev.bench.conversations import TARGET, Prepared, of_size
from loadtest.dev.bench.measures import Budget, Line, distribution
from loadtest.dev.bench.rig import Rig, start_rig
from loadtest.dev.bench.setting import Setting
from loadtest.runner.children import Child, running
from loadtest.runner.stack import child_environment
from router.tokens import load_prompter

_FIRST_S: Final = 10.0  # a new connection without a request is closed after 15 s
_THINK_S: Final = 15.0
_TURN_BYTES: Final = 6_000
_EVENTS: Final = "100,50"  # of a stream, and milliseconds between them
_CHAT_BYTES: Final = 200_000
_LOOK_S: Final = 0.1
_PATIENCE_S: Final = 120.0
_MB: Final = 1024 * 1024


class _Crowd(Struct, frozen=True, kw_only=True):
    """One part of the run."""

    what: str
    num_requests: int
    healthz_ms: list[float]
    num_silent: int  # questions to `/healthz` that got no 200
    peak_mb: float


def run(setting: Setting) -> list[Line]:
    """Measure."""
    _raise_descriptors()
    return uvloop.run(_run(setting))


async def _run(setting: Setting) -> list[Line]:
    prompter = load_prompter(str(setting.model_dir), local_files_only=True)
    turns = [of_size(prompter, f"agent-{n}", _TURN_BYTES) for n in range(20)]
    chat = of_size(prompter, "burst", _CHAT_BYTES)
    num_agents = setting.size(2_000, 20)
    num_streams, num_chats = setting.size(1_000, 10), setting.size(1_000, 5)
    answers: Counter[str] = Counter()
    crowds: list[_Crowd] = []
    async with start_rig(setting) as rig, _liveness(rig, setting) as child:
        idle_mb = rig.rss_bytes() / _MB
        async with asyncio.TaskGroup() as group:
            agents = [
                group.create_task(_agent(rig.port, random.Random(n), turns, answers), name="agent")
                for n in range(num_agents)
            ]
            for what, num, work in setting.track(
                (
                    (f"{num_agents:,} agents that think", num_agents, _pass(setting)),
                    (
                        f"{num_streams:,} streams at once",
                        num_streams,
                        _streams(rig.port, turns[0], num_streams, answers),
                    ),
                    (
                        f"{num_chats:,} chats of 200 KB at once",
                        num_chats,
                        _burst(rig.port, chat, num_chats, answers),
                    ),
                ),
                "crowds",
            ):
                crowds.append(await _watched(rig, child, what, num, work))
            for agent in agents:
                agent.cancel()
    num_failed = sum(num for kind, num in answers.items() if kind != "200")
    num_failed += sum(crowd.num_silent for crowd in crowds)
    lines = [_line(crowd, idle_mb) for crowd in crowds]
    lines.append(
        Line(
            what="answers to crowds that are errors",
            unit="answers",
            num_samples=sum(answers.values()),
            value=num_failed,
            budgets=(Budget("value", 0.5),),
            note=", ".join(f"{kind}: {num:,}" for kind, num in answers.most_common(4)),
        )
    )
    return lines


def _line(crowd: _Crowd, idle_mb: float) -> Line:
    return distribution(
        f"/healthz, {crowd.what}",
        "ms",
        crowd.healthz_ms,
        Budget("p99", 100.0),
        note=f"RSS {idle_mb:.0f} MB idle, {crowd.peak_mb:.0f} MB at most",
    )


def _liveness(rig: Rig, setting: Setting) -> AbstractAsyncContextManager[Child]:
    """Start the process that asks."""
    argv = ["-m", "loadtest.dev.bench.liveness", str(rig.port)]
    log = setting.work_dir / "liveness.log"
    return running("liveness", argv, log=log, env=child_environment(os.environ))


async def _watched(
    rig: Rig, child: Child, what: str, num_requests: int, work: Coroutine[None, None, None]
) -> _Crowd:
    start = len(child.log.read_text())
    peak_bytes = rig.rss_bytes()
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work, name=what)
        while not working.done():
            peak_bytes = max(peak_bytes, rig.rss_bytes())
            await asyncio.sleep(_LOOK_S)
    said = [line.split() for line in child.log.read_text()[start:].splitlines()[:-1]]
    return _Crowd(
        what=what,
        num_requests=num_requests,
        healthz_ms=[float(taken_ms) for taken_ms, _ in said],
        num_silent=sum(status != "200" for _, status in said),
        peak_mb=peak_bytes / _MB,
    )


async def _pass(setting: Setting) -> None:
    """Leave the agents to themselves."""
    await asyncio.sleep(setting.size(20, 2))


async def _agent(
    port: int, rng: random.Random, turns: Sequence[Prepared], answers: Counter[str]
) -> None:
    """Think and ask, on one connection, until cancelled; on a new one if that breaks."""
    wait_s = rng.uniform(0.0, _FIRST_S)
    while True:
        async with Connection(port) as connection:
            is_open = True
            while is_open:
                await asyncio.sleep(wait_s)
                is_open = await _ask(connection, rng.choice(turns).request(), answers)
                wait_s = rng.uniform(0.0, 2 * _THINK_S)


async def _streams(port: int, turn: Prepared, num: int, answers: Counter[str]) -> None:
    body = turn.body.replace(b'"stream":false', b'"stream":true')
    request = request_bytes(TARGET, body, {"X-Bench-Stream": _EVENTS})
    await _at_once(port, [request] * num, answers)


async def _burst(port: int, chat: Prepared, num: int, answers: Counter[str]) -> None:
    before, begun, behind = chat.body.partition(b'"content":"')
    bodies = [b"%b%b%d %b" % (before, begun, n, behind) for n in range(num)]
    await _at_once(port, [request_bytes(TARGET, body) for body in bodies], answers)


async def _at_once(port: int, requests: Sequence[bytes], answers: Counter[str]) -> None:
    """Send each request on a connection of its own, none before all are open."""
    connections = [Connection(port) for _ in requests]
    try:
        for connection in connections:
            await connection.__aenter__()
        async with asyncio.TaskGroup() as group:
            for connection, request in zip(connections, requests, strict=True):
                group.create_task(_ask(connection, request, answers), name="crowd")
    finally:
        for connection in connections:
            await connection.__aexit__()


async def _ask(connection: Connection, request: bytes, answers: Counter[str]) -> bool:
    """Ask, and count the answer's status; False: the connection broke."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            answer = await connection.send(request)
    except (ConnectionError, TimeoutError) as exc:
        answers[type(exc).__name__] += 1
        return False
    answers[str(answer.status)] += 1
    return True


def _raise_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
