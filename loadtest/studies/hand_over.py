"""What handing token ids to engines saves: first tokens with and without, in turn, at real engines.

    python -m loadtest.studies.hand_over ROUTER_OFF ROUTER_ON ENGINE

Two routers in front of one engine, `tokens.hand_over` off and on; the latter's /metrics say how
many prompts it handed over. A conversation of each length is in the engine's cache; each round asks
both routers for its next turn, the first one first in every other round. Then the same while the
engine streams four other answers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import orjson
from msgspec import Struct

from loadtest.agent_text import code
from loadtest.markdown import table

SIZES: Final = (1_500, 6_000, 25_000, 80_000)  # tokens, about
NUM_STREAMS: Final = 4
NUM_WARM_ROUNDS: Final = 2
_PATIENCE_S: Final = 60.0
_HANDED: Final = "warmroute_handed_over_requests_total"


class Sample(Struct, frozen=True):
    """One request: first token's time, and what the engine reports."""

    ttft_ms: float
    num_tokens: int
    num_cached_tokens: int


class Row(Struct, frozen=True):
    """One length under one load."""

    num_tokens: int
    num_streams: int
    without: list[Sample]
    handed: list[Sample]
    num_handed: int  # of the latter, as the router counts them

    def cells(self) -> list[str]:
        pairs = list(zip(self.without, self.handed, strict=True))
        saved = [one.ttft_ms - other.ttft_ms for one, other in pairs]
        same = sum(one.num_cached_tokens == other.num_cached_tokens for one, other in pairs)
        return [
            f"{self.num_tokens:,}",
            f"{self.num_streams}",
            _times([sample.ttft_ms for sample in self.without]),
            _times([sample.ttft_ms for sample in self.handed]),
            _times(saved),
            f"{self.num_handed} of {len(pairs)}",
            f"{same} of {len(pairs)}",
        ]


HEADER: Final = ["tokens", "other streams", "off, ms", "on, ms", "saved, ms", "as ids",
                 "same `cached_tokens`"]  # fmt: skip


class Setting(Struct, frozen=True, kw_only=True):
    """What is measured, and how often."""

    without: str
    handed: str
    engine: str
    model: str
    num_rounds: int
    sizes: Sequence[int]


async def measure(setting: Setting) -> list[Row]:
    """Measure all lengths, idle and under load."""
    rows = []
    async with aiohttp.ClientSession() as client:
        await _await_hand_over(client, setting)
        for num_streams in (0, NUM_STREAMS):
            async with asyncio.TaskGroup() as group:
                streams = [
                    group.create_task(_stream(client, setting, number))
                    for number in range(num_streams)
                ]
                for size in setting.sizes:
                    text = code(random.Random(size), size)
                    rows.append(await _row(client, setting, text, num_streams))
                for stream in streams:
                    stream.cancel()
    return rows


async def _await_hand_over(client: aiohttp.ClientSession, setting: Setting) -> None:
    """Send prompts until one is handed over: the router has found out what it wants to know."""
    text = code(random.Random(0), 2_000)
    async with asyncio.timeout(_PATIENCE_S):
        while not await _num_handed(client, setting):
            await _ask(client, setting.handed, setting.model, [text])
            await asyncio.sleep(0.2)


async def _num_handed(client: aiohttp.ClientSession, setting: Setting) -> int:
    async with client.get(f"{setting.handed}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return round(sum(float(line.split()[-1]) for line in lines if line.startswith(_HANDED)))


async def _row(client: aiohttp.ClientSession, setting: Setting, text: str, num_streams: int) -> Row:
    routers = (setting.without, setting.handed)
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    num_handed = 0
    for number in range(NUM_WARM_ROUNDS + setting.num_rounds):
        if number == NUM_WARM_ROUNDS:
            num_handed = await _num_handed(client, setting)
        for which in (0, 1) if number % 2 else (1, 0):
            question = f"Question {num_streams} {number} {which}: what is wrong in line {number}?"
            texts = [text, "Ask.", question]
            sample = await _ask(client, routers[which], setting.model, texts)
            if number >= NUM_WARM_ROUNDS:
                samples[which].append(sample)
        await asyncio.sleep(0.05)
    num_tokens = round(statistics.median(sample.num_tokens for sample in samples[0]))
    num_handed = await _num_handed(client, setting) - num_handed
    return Row(num_tokens, num_streams, *samples, num_handed)


async def _ask(client: aiohttp.ClientSession, url: str, model: str, texts: Sequence[str]) -> Sample:
    roles = ("user", "assistant")
    body: dict[str, Any] = {
        "model": model,
        "messages": [
            {"role": roles[number % 2], "content": text} for number, text in enumerate(texts)
        ],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = orjson.dumps(body)
    headers = {"Content-Type": "application/json"}
    started_s = time.perf_counter()
    first_s: float | None = None
    usage: dict[str, Any] = {}
    async with client.post(f"{url}/v1/chat/completions", data=data, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if first_s is None and line.startswith(b"data:"):
                first_s = time.perf_counter()
            if b'"usage":{' in line:
                usage = orjson.loads(line[5:])["usage"]
    assert first_s is not None
    details = usage.get("prompt_tokens_details") or {}
    return Sample(
        (first_s - started_s) * 1000, usage["prompt_tokens"], details.get("cached_tokens") or 0
    )


async def _stream(client: aiohttp.ClientSession, setting: Setting, number: int) -> None:
    """Keep one answer running."""
    while True:
        body = {"model": setting.model, "prompt": f"Stream {number}", "max_tokens": 1000,
                "stream": True, "ignore_eos": True}  # fmt: skip
        async with client.post(f"{setting.engine}/v1/completions", json=body) as answer:
            async for _ in answer.content:
                pass


def _times(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("without", help="URL of a router with tokens.hand_over off")
    parser.add_argument("handed", help="of one with it on")
    parser.add_argument("engine", help="of the engine behind both")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args()
    rows = asyncio.run(
        measure(
            Setting(
                without=options.without,
                handed=options.handed,
                engine=options.engine,
                model=options.model,
                num_rounds=options.rounds,
                sizes=options.sizes,
            )
        )
    )
    print(table(HEADER, [row.cells() for row in rows]))


if __name__ == "__main__":
    main()
