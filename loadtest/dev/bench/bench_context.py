"""Router time added to an agent's turn of 80,000 tokens; 2,000 of them are new each turn.

Growing conversations as coding agents have them (system prompt, tools, tool calls and results),
streamed answers, one request in flight. Every turn is sent twice, straight to a replica and
through the router, in alternating order; the difference of the pair is one sample. Between turns
the replica publishes the blocks of the last one, so that each turn is warm and only its new
tokens are unknown. Contexts grow by 22,000 tokens around 80,000. Time runs until the last byte of
an answer that comes at once.
"""

from __future__ import annotations

from typing import Final

import uvloop
from msgspec import Struct

from loadtest.dev.bench.client import Connection, pair
from loadtest.dev.bench.conversations import NEW_TOKENS, growing
from loadtest.dev.bench.measures import Budget, Line, distribution
from loadtest.dev.bench.rig import Rig, start_rig
from loadtest.dev.bench.setting import Setting
from router.tokens import Prompter, load_prompter

_NUM_CONVERSATIONS: Final = 10
_NUM_TURNS: Final = 11  # of each, that are measured


class _Samples(Struct):
    added_ms: list[float] = []
    direct_ms: list[float] = []
    body_bytes: list[int] = []


def run(setting: Setting) -> list[Line]:
    """Measure."""
    return uvloop.run(_run(setting))


async def _run(setting: Setting) -> list[Line]:
    prompter = load_prompter(str(setting.model_dir), local_files_only=True)
    context_tokens = setting.size(80_000, 8_000)
    num_turns = setting.size(_NUM_TURNS, 3)
    samples = _Samples()
    async with start_rig(setting) as rig:
        names = [str(number) for number in range(setting.size(_NUM_CONVERSATIONS, 1))]
        for name in setting.track(names, f"context {context_tokens:,}"):
            await _converse(rig, prompter, name, context_tokens, num_turns, samples)
    return _lines(context_tokens, samples, rig)


async def _converse(
    rig: Rig,
    prompter: Prompter,
    name: str,
    context_tokens: int,
    num_turns: int,
    samples: _Samples,
) -> None:
    start_tokens = context_tokens - NEW_TOKENS * (num_turns - 1) // 2
    turns = growing(prompter, name, start_tokens, num_turns)
    async with Connection(rig.direct_port) as direct, Connection(rig.port) as routed:
        replica = await rig.warm(routed, next(turns))
        for number, turn in enumerate(turns):
            num_cached = rig.num_cached_tokens(turn, replica)
            request = turn.request(num_cached_tokens=num_cached, stream="1,0")
            plain, answer = await pair(number, direct, routed, request)
            rig.check(turn, answer, replica)
            samples.added_ms.append(answer.total_ms - plain.total_ms)
            samples.direct_ms.append(plain.total_ms)
            samples.body_bytes.append(len(turn.body))
            await rig.store(turn, replica)


def _lines(context_tokens: int, samples: _Samples, rig: Rig) -> list[Line]:
    context = f"{context_tokens:,} tokens of context, {NEW_TOKENS:,} new"
    direct_p50_ms = sorted(samples.direct_ms)[len(samples.direct_ms) // 2]
    mean_kb = sum(samples.body_bytes) / len(samples.body_bytes) / 1000
    return [
        distribution(
            f"added to a turn, {context}",
            "ms",
            samples.added_ms,
            Budget("p50", 3.0),
            Budget("p99", 8.0),
            note=f"body {mean_kb:,.0f} KB; direct p50 {direct_p50_ms:.2f} ms; "
            + rig.prediction_note,
        ),
    ]
