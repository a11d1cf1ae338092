"""The router's time for a turn, with and without a Mooncake pool that it asks before it decides.

Sixteen connections send agents' turns of 20,000 tokens, each with 2,000 new ones, as fast as they
are answered. No replica holds anything; the pool holds everything, so every decision is verified
with its master: up to 512 keys a question. The master is another process and answers at once, or
after 10 ms, or (always too late) after 2 s. `x-warmroute-ms`: head of the request read -> replica
chosen. The budget is twice the time without a pool.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import uvloop
from msgspec import Struct

from loadtest.bench.client import Connection
from loadtest.bench.conversations import CONTRACT, Prepared, growing
from loadtest.bench.fake_engine import MODEL
from loadtest.bench.measures import Budget, Line, distribution
from loadtest.bench.rig import Rig, RigError, helper, start_rig
from loadtest.bench.setting import Setting
from loadtest.results import percentile
from router.tokens import load_prompter

_IN_FLIGHT: Final = 16
_TOKENS: Final = 20_000
_TURNS: Final = 6
_MASTERS: Final = (("at once", 0.0), ("after 10 ms", 10.0), ("after 2 s", 2000.0))
_HEAD: Final = f"{MODEL}@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"
_FETCHES_NOTHING: Final = b";pool=0\r\n"
_PATIENCE_S: Final = 60.0


class _Samples(Struct):
    router_ms: list[float] = []
    num_pooled: int = 0


def run(setting: Setting) -> list[Line]:
    """Measure."""
    return uvloop.run(_run(setting))


async def _run(setting: Setting) -> list[Line]:
    prompter = load_prompter(str(setting.model_dir), local_files_only=True)
    num_tokens = setting.size(_TOKENS, 4_000)
    agents = [
        list(growing(prompter, f"pool-{number}", num_tokens, setting.size(_TURNS, 1)))
        for number in setting.track(range(setting.size(4 * _IN_FLIGHT, 4)), "agents")
    ]
    objects = setting.work_dir / "objects"
    objects.write_text("\n".join(sorted({key for turns in agents for key in _keys(turns[-1])})))
    async with start_rig(setting) as rig:
        without = await _converse(setting, rig, agents, "no pool")
    budget = Budget("p99", 2 * percentile(sorted(without.router_ms), 0.99))
    lines = [distribution("x-warmroute-ms, no pool", "ms", without.router_ms)]
    for what, delay_ms in _MASTERS[: setting.size(len(_MASTERS), 1)]:
        async with _master(objects, delay_ms) as url, start_rig(setting, "--mooncake", url) as rig:
            await _until_known(rig, agents[0][0])
            found = await _converse(setting, rig, agents, f"answers {what}")
            note = f"{found.num_pooled} of {len(found.router_ms)} to be fetched; "
            note += _verified(await rig.metrics())
        what = f"x-warmroute-ms, a pool whose master answers {what}"
        lines.append(distribution(what, "ms", found.router_ms, budget, note=note))
    return lines


async def _converse(
    setting: Setting, rig: Rig, agents: Sequence[Sequence[Prepared]], what: str
) -> _Samples:
    samples, waiting = _Samples(), setting.track(agents, what)

    async def send_on() -> None:
        async with Connection(rig.port) as connection:
            for turns in waiting:
                for number, turn in enumerate(turns):
                    answer = await connection.send(turn.request(stream="1,0"))
                    if answer.status != 200:
                        raise RigError(f"answered {answer.status}: {answer.body[:300]!r}")
                    if number:  # the first is cold: its tokens are another benchmark's
                        samples.router_ms.append(float(answer.header("x-warmroute-ms") or "nan"))
                        samples.num_pooled += _FETCHES_NOTHING not in answer.head

    async with asyncio.TaskGroup() as group:
        for _ in range(min(_IN_FLIGHT, len(agents))):
            group.create_task(send_on(), name="agent")
    return samples


async def _until_known(rig: Rig, turn: Prepared) -> None:
    """Wait until the router knows what the pool holds, by a prompt of which that is something."""
    async with asyncio.timeout(_PATIENCE_S), Connection(rig.port) as connection:
        request = turn.request(stream="1,0")
        while _FETCHES_NOTHING in (await connection.send(request)).head:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _verified(page: str) -> str:
    """Say what came of the questions to the master."""
    counts = re.findall(
        r'^warmroute_pool_verifications_total\{.*result="(\w+)"\} (.+)$', page, re.M
    )
    return ", ".join(f"{result} {float(number):.0f}" for result, number in counts if float(number))


def _keys(turn: Prepared) -> list[str]:
    """Name the objects of a prompt's blocks, as vLLM's connector does."""
    return [_HEAD + digest.hex() for digest in CONTRACT.digests(None, turn.token_ids)]


@asynccontextmanager
async def _master(objects: Path, delay_ms: float) -> AsyncIterator[str]:
    options = ("--keys", str(objects), "--delay-ms", str(delay_ms))
    async with helper("the fake master", "loadtest.bench.fake_master", *options) as (line, _):
        port: int = msgspec.json.decode(line)["port"]
        yield f"http://127.0.0.1:{port}"
