"""CPU of the router process per request of 100,000 tokens, all its threads, all it does.

Warm: every request adds other 2,000 tokens to a context of 98,000 that the router and one replica
know; one in flight. The share of requests that is encoded twice as a proof (`tokens.prove_ratio`)
is in it, as are probes and housekeeping. Cold: prompts of 100,000 tokens that share nothing with
any before but the system prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import uvloop

from loadtest.dev.bench.client import Connection
from loadtest.dev.bench.conversations import NEW_TOKENS, Prepared, growing, siblings
from loadtest.dev.bench.measures import Budget, Line
from loadtest.dev.bench.rig import Rig, RigError, start_rig
from loadtest.dev.bench.setting import Setting
from router.tokens import load_prompter

_TOKENS: Final = 100_000


def run(setting: Setting) -> list[Line]:
    """Measure."""
    return uvloop.run(_run(setting))


async def _run(setting: Setting) -> list[Line]:
    prompter = load_prompter(str(setting.model_dir), local_files_only=True)
    context_tokens = setting.size(_TOKENS, 6_000) - NEW_TOKENS
    base, *turns = siblings(prompter, context_tokens, setting.size(200, 3))
    fresh = load_prompter(str(setting.model_dir), local_files_only=True)
    cold = [
        next(growing(fresh, f"cold-{n}", context_tokens + NEW_TOKENS, 0))
        for n in range(setting.size(20, 2))
    ]
    async with start_rig(setting) as rig, Connection(rig.port) as connection:
        replica = await rig.warm(connection, base)
        warm_ms = await _cpu_ms(setting, rig, connection, turns, replica, "CPU, warm")
        note = rig.prediction_note
        cold_ms = await _cpu_ms(setting, rig, connection, cold, None, "CPU, cold")
    return [
        Line(
            what=f"router CPU, {turns[0].num_tokens:,} tokens of which {NEW_TOKENS:,} new",
            unit="ms",
            num_samples=len(turns),
            value=warm_ms,
            budgets=(Budget("value", 5.0),),
            note=note,
        ),
        Line(
            what=f"router CPU, {cold[0].num_tokens:,} tokens, cold",
            unit="ms",
            num_samples=len(cold),
            value=cold_ms,
            budgets=(Budget("value", 40.0),),
        ),
    ]


async def _cpu_ms(
    setting: Setting,
    rig: Rig,
    connection: Connection,
    turns: Sequence[Prepared],
    replica: str | None,
    what: str,
) -> float:
    before_s = rig.cpu_s()
    for turn in setting.track(turns, what):
        num_cached = rig.num_cached_tokens(turn, replica) if replica is not None else None
        answer = await connection.send(turn.request(num_cached_tokens=num_cached, stream="1,0"))
        if replica is not None:
            rig.check(turn, answer, replica)
        elif answer.status != 200:
            raise RigError(f"the router answered {answer.status}")
    return (rig.cpu_s() - before_s) / len(turns) * 1000
