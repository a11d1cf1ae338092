"""CPU a request with two workers (`serve --workers 2`), over that of one process.

The same load at both: 20 KB bodies, 16 in flight, warm. They run side by side and take turns, so
that a busy machine slows down both. The CPU of the workers' own Redis and of their parent counts.
The load shares the cores, so requests/s are less than with the load elsewhere.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Final

import uvloop

from loadtest.dev.bench.client import Connection, hammer
from loadtest.dev.bench.conversations import of_size
from loadtest.dev.bench.measures import Budget, Line
from loadtest.dev.bench.rig import Rig, start_rig
from loadtest.dev.bench.setting import Setting
from router.tokens import load_prompter

_IN_FLIGHT: Final = 16
_BODY_BYTES: Final = 20_000
_WARM_S: Final = 1.0
_LEAST_MS: Final = 1e-3  # in a moment too short for the clock of CPU time


class _Side:
    """One of the two, and what it took."""

    def __init__(self, rig: Rig, requests: list[bytes]) -> None:
        self._rig = rig
        self._requests = requests
        self.num_answers = 0
        self.elapsed_s = self.cpu_s = self.redis_s = 0.0

    async def warm(self) -> None:
        """Make each connection's prompt known where it goes, too: nothing is counted."""
        await hammer(self._rig.port, self._requests, _WARM_S)

    async def take_turn(self, seconds: float) -> None:
        """Send on for some seconds."""
        cpu_s, redis_s = self._rig.cpu_s(), self._rig.redis_cpu_s()
        self.num_answers += await hammer(self._rig.port, self._requests, seconds)
        self.elapsed_s += seconds
        self.cpu_s += self._rig.cpu_s() - cpu_s
        self.redis_s += self._rig.redis_cpu_s() - redis_s

    @property
    def cpu_ms(self) -> float:
        return self.cpu_s / self.num_answers * 1000

    @property
    def per_s(self) -> float:
        return self.num_answers / self.elapsed_s


def run(setting: Setting) -> list[Line]:
    """Measure."""
    return uvloop.run(_run(setting))


async def _run(setting: Setting) -> list[Line]:
    seconds = setting.size(20, 3) / 10
    async with AsyncExitStack() as stack:
        one = await _start(setting, stack, "one")
        two = await _start(setting, stack, "two", "--workers", "2")
        for side in (one, two):
            await side.warm()
        for number in setting.track(range(setting.size(8, 2)), "one and two workers"):
            first, second = (one, two) if number % 2 else (two, one)
            await first.take_turn(seconds)
            await second.take_turn(seconds)
    redis_ms = two.redis_s / two.num_answers * 1000
    return [
        Line(
            what=f"CPU a request, two workers over one, 20 KB, {_IN_FLIGHT} in flight",
            unit="times",
            num_samples=two.num_answers,
            value=two.cpu_ms / max(one.cpu_ms, _LEAST_MS),
            budgets=(Budget("value", 1.2),),
            note=f"{one.cpu_ms:.2f} and {two.cpu_ms:.2f} ms, of that {redis_ms:.2f} ms Redis'",
        ),
        Line(
            what="requests/s, two workers over one, the load on the same cores",
            unit="times",
            num_samples=two.num_answers,
            value=two.per_s / one.per_s,
            note=f"{one.per_s:,.0f} and {two.per_s:,.0f} requests/s",
        ),
    ]


async def _start(setting: Setting, stack: AsyncExitStack, name: str, *flags: str) -> _Side:
    folder = setting.work_dir / name
    folder.mkdir()
    own = Setting(
        work_dir=folder,
        progress=setting.progress,
        quick=setting.quick,
        model_dir=setting.model_dir,
    )
    rig = await stack.enter_async_context(start_rig(own, *flags))
    prompter = load_prompter(str(setting.model_dir), local_files_only=True)
    requests = []
    for number in range(_IN_FLIGHT):
        prepared = of_size(prompter, f"workers-{number}", _BODY_BYTES)
        async with Connection(rig.port) as connection:
            replica = await rig.warm(connection, prepared)
        num_cached_tokens = rig.num_cached_tokens(prepared, replica)
        requests.append(prepared.request(num_cached_tokens=num_cached_tokens))
    return _Side(rig, requests)
