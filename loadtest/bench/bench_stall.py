"""How long the router's event loop stands still while cold prompts of 100,000 tokens arrive.

Such prompts, each new to the router, are sent back to back, two in flight. Meanwhile `/healthz`
is asked every few milliseconds on a connection of its own: an answer that takes long has waited
for the loop. The same without the prompts, before, shows what the machine itself adds. The
router's own `warmroute_loop_lag_seconds` (a timer ten times a second) stands beside it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Sequence
from typing import Final

import uvloop

from loadtest.bench.client import Connection, request_bytes
from loadtest.bench.conversations import Prepared, growing
from loadtest.bench.measures import Budget, Line, distribution
from loadtest.bench.rig import Rig, RigError, start_rig
from loadtest.bench.setting import Setting
from loadtest.results import percentile
from router.tokens import load_prompter

_TOKENS: Final = 100_000
_IN_FLIGHT: Final = 2
_PROBE_S: Final = 0.002
_LATE: Final = re.compile(
    r'warmroute_loop_lag_seconds_bucket\{le="([\d.]+|\+Inf)"\} (\d+(?:\.\d+)?)'
)


def run(setting: Setting) -> list[Line]:
    """Measure."""
    return uvloop.run(_run(setting))


async def _run(setting: Setting) -> list[Line]:
    prompter = load_prompter(str(setting.model_dir), local_files_only=True)
    num_tokens = setting.size(_TOKENS, 4_000)
    prompts = [
        next(growing(prompter, f"stall-{n}", num_tokens, 0)) for n in range(setting.size(40, 3))
    ]
    async with start_rig(setting) as rig:
        idle_ms = await _probe_while(rig, asyncio.sleep(setting.size(30, 1) / 10))
        before = _lag_counts(await rig.metrics())
        stall_ms = await _probe_while(rig, _send(setting, rig, prompts))
        after = _lag_counts(await rig.metrics())
    late = {le: after[le] - before.get(le, 0) for le in after}
    num_late = late["+Inf"] - late["0.02"]
    return [
        distribution(
            f"/healthz while cold prompts of {prompts[0].num_tokens:,} tokens arrive",
            "ms",
            stall_ms,
            Budget("max", 20.0),
            note=f"p50/p99/max without them {_p(idle_ms, 0.5):.2f}/{_p(idle_ms, 0.99):.2f}/"
            f"{max(idle_ms):.2f}; own timer over 20 ms late: {num_late:.0f} of {late['+Inf']:.0f}",
        )
    ]


async def _probe_while(rig: Rig, work: Coroutine[None, None, None]) -> list[float]:
    """Ask /healthz until the work is done; return how long each answer took, in ms."""
    request = request_bytes("/healthz")
    taken_ms: list[float] = []
    async with Connection(rig.port) as connection, asyncio.TaskGroup() as group:
        working = group.create_task(work, name="work")
        while not working.done():
            taken_ms.append((await connection.send(request)).total_ms)
            await asyncio.sleep(_PROBE_S)
    return taken_ms


async def _send(setting: Setting, rig: Rig, prompts: Sequence[Prepared]) -> None:
    waiting = setting.track(prompts, "cold prompts")

    async def send_on() -> None:
        async with Connection(rig.port) as connection:
            for prompt in waiting:
                answer = await connection.send(prompt.request(stream="1,0"))
                if answer.status != 200:
                    raise RigError(f"the router answered {answer.status}")

    async with asyncio.TaskGroup() as group:
        for _ in range(_IN_FLIGHT):
            group.create_task(send_on(), name="cold prompts")


def _lag_counts(page: str) -> dict[str, int]:
    return {le: round(float(count)) for le, count in _LATE.findall(page)}


def _p(samples: Sequence[float], share: float) -> float:
    return percentile(sorted(samples), share)
