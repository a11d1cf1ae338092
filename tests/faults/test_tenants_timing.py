"""Whether a tenant can learn from time to first token what another one sent: measured.

An attacker's question is whether its probe of a prompt is quicker than one that was never sent. The
answer is the rank-sum statistic of the two samples: the same test must say yes where a cache is
shared, so that a no means something.
"""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import pytest

from loadtest.engine_model.time_model import TimeModel
from tests.faults.stage import Engines, Json, Stage, chat, on_stage, streamed, words
from tests.faults.tenants import A, B, tenants_file

# 160 ms for these prompts: a busy machine adds 100 ms to some of them and to some it does not.
COLD = TimeModel(base_ms=1.0, ms_per_prefill_token=0.12)
NUM_PROBES = {"own": 14, "group": 10}  # of the latter, all are quicker
NUM_WORDS = 300
BY_CHANCE = 3.3  # one sample of 1,000 is beyond


@pytest.mark.parametrize("cache", ["own", "group"])
async def test_time_shows_nothing_of_other_tenants(tmp_path: Path, cache: str) -> None:
    """B's probes of A's prompts are no quicker than fresh ones, unless both share a cache."""
    fields = "" if cache == "own" else "cache: group"
    path = tenants_file(tmp_path, a=fields, b=fields)
    if cache == "group":
        text = path.read_text()
        path.write_text("".join(_unsalted(line) for line in text.splitlines(keepends=True)))
    rng, num_probes = random.Random(1), NUM_PROBES[cache]
    probes: list[float] = []
    fresh: list[float] = []
    async with Engines(1, time_model=COLD, num_gpu_blocks=16384) as engines:
        async with on_stage(*engines, tenants__file=path) as stage:
            for number in range(3):
                await _first_token_ms(stage, 900 + number, A)  # connections, first encodes
            for number in range(num_probes):
                await _first_token_ms(stage, 100 + number, A)
            await stage.knows(*engines)
            for number in range(num_probes):
                asked = [(100 + number, probes), (500 + number, fresh)]  # equally long
                rng.shuffle(asked)
                for which, times in asked:
                    # The emulator remembers texts it has tokenized, as no real engine does.
                    engines[0].replica.tokenizer.forget()
                    times.append(await _first_token_ms(stage, which, B))

    z = _rank_sum(probes, fresh)
    figures = f"z={z:.2f}, medians {_median(probes):.1f} and {_median(fresh):.1f} ms"
    if cache == "own":
        assert abs(z) < BY_CHANCE, figures
    else:
        assert z < -BY_CHANCE, figures


def _unsalted(line: str) -> str:
    head, _, tail = line.partition("salt: ")
    return head + tail.partition(", ")[2] if tail else line


async def _first_token_ms(stage: Stage, number: int, headers: Json) -> float:
    """Ask, and take the time to the first bytes of the answer, in milliseconds."""
    body = streamed(chat(words(number, NUM_WORDS), max_tokens=1))
    started_s = time.monotonic()
    async with stage.asking(body, headers=headers) as answer:
        await answer.content.readany()
        first_s = time.monotonic()
        await answer.read()
    assert answer.status == 200
    return (first_s - started_s) * 1000


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _rank_sum(ones: list[float], others: list[float]) -> float:
    """Give the Mann-Whitney statistic as a normal deviate; negative: `ones` are smaller."""
    num_larger = sum(one > other for one in ones for other in others)
    n, m = len(ones), len(others)
    return (num_larger - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)
