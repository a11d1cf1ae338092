"""Time added over direct for warm bodies of 20 KB and 200 KB, one request in flight.

The same request again and again (the router knows its tokens, the replica holds its blocks), a
small JSON answer. Direct and through the router alternate in pairs on warm connections; the
difference of a pair is one sample.
"""

from __future__ import annotations

from typing import Final

import uvloop

from loadtest.dev.bench.client import Connection, pair
from loadtest.dev.bench.conversations import of_size
from loadtest.dev.bench.measures import Budget, Line, distribution
from loadtest.dev.bench.rig import start_rig
from loadtest.dev.bench.setting import Setting
from router.tokens import load_prompter

_SIZES: Final = ((20_000, 1500, 0.8), (200_000, 500, 1.5))  # bytes, pairs, budget of the p50 in ms
_NUM_WARM_UP: Final = 20


def run(setting: Setting) -> list[Line]:
    """Measure."""
    return uvloop.run(_run(setting))


async def _run(setting: Setting) -> list[Line]:
    prompter = load_prompter(str(setting.model_dir), local_files_only=True)
    lines: list[Line] = []
    async with start_rig(setting) as rig:
        for num_bytes, num_pairs, budget_ms in _SIZES:
            prepared = of_size(prompter, f"overhead-{num_bytes}", num_bytes)
            added_ms: list[float] = []
            direct_ms: list[float] = []
            async with Connection(rig.direct_port) as direct, Connection(rig.port) as routed:
                replica = await rig.warm(routed, prepared)
                num_cached = rig.num_cached_tokens(prepared, replica)
                request = prepared.request(num_cached_tokens=num_cached)
                for _ in range(_NUM_WARM_UP):
                    await routed.send(request)
                    await direct.send(request)
                steps = range(setting.size(num_pairs, 5))
                for number in setting.track(steps, f"overhead {num_bytes // 1000} KB"):
                    plain, answer = await pair(number, direct, routed, request)
                    rig.check(prepared, answer, replica)
                    added_ms.append(answer.total_ms - plain.total_ms)
                    direct_ms.append(plain.total_ms)
            lines.append(
                distribution(
                    f"added over direct, warm body of {len(prepared.body) / 1000:,.0f} KB",
                    "ms",
                    added_ms,
                    Budget("p50", budget_ms),
                    note=f"direct p50 {sorted(direct_ms)[len(direct_ms) // 2]:.2f} ms; "
                    + rig.prediction_note,
                )
            )
    return lines
