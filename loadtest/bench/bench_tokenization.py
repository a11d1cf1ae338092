"""From a chat request to token ids and block keys, without HTTP: cold, and a turn of 2,000 tokens.

Cold: a prompter that has never seen the prompt (tokenizing uses every core). Incremental: a
conversation that grows by 2,000 tokens a turn around 80,000. Split into what runs on the event
loop (render, find what is known, commit, hash) and the encoding, which leaves it when long.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
from msgspec import Struct

from loadtest.bench.conversations import CONTRACT, NEW_TOKENS, growing
from loadtest.bench.measures import Line, distribution
from loadtest.bench.setting import Setting
from router.api.openai import parse_chat
from router.tokens import Prompter, load_prompter


class _Times(Struct):
    parse_ms: list[float] = []
    plan_ms: list[float] = []
    encode_ms: list[float] = []
    commit_ms: list[float] = []
    total_ms: list[float] = []


def run(setting: Setting) -> list[Line]:
    """Measure."""
    lines = _of_model(setting, setting.model_dir, "tiny tokenizer")
    if setting.other_model_dir is not None:
        lines += _of_model(setting, setting.other_model_dir, setting.other_model_dir.name)
    return lines


def _of_model(setting: Setting, model_dir: Path, name: str) -> list[Line]:
    prompter = _proven(model_dir)
    cold, warm = _Times(), _Times()
    context_tokens = setting.size(80_000, 6_000)
    num_turns = setting.size(40, 3)
    start_tokens = context_tokens - NEW_TOKENS * num_turns // 2
    lengths: list[int] = []
    for number in setting.track(range(setting.size(5, 1)), f"{name}, cold"):
        fresh = _proven(model_dir)
        prepared = next(growing(prompter, f"cold-{number}", context_tokens, 0))
        _time(fresh, prepared.body, cold)
        lengths.append(prepared.num_tokens)
    turns = [turn.body for turn in growing(_proven(model_dir), "warm", start_tokens, num_turns)]
    _time(prompter, turns[0], _Times())
    for body in setting.track(turns[1:], f"{name}, incremental"):
        _time(prompter, body, warm)
    return [
        distribution(
            f"{name}, cold prompt of {lengths[0]:,} tokens",
            "ms",
            cold.total_ms,
            note=_split(cold),
        ),
        distribution(
            f"{name}, turn of {NEW_TOKENS:,} new tokens around {context_tokens:,}",
            "ms",
            warm.total_ms,
            note=_split(warm),
        ),
    ]


def _proven(model_dir: Path) -> Prompter:
    """Load a model's prompter as a router has it: with fastokens, where that is exact."""
    prompter = load_prompter(str(model_dir), local_files_only=True)
    prompter.quicken()
    return prompter


def _time(prompter: Prompter, body: bytes, times: _Times) -> None:
    at_s = [time.perf_counter()]
    parsed: dict[str, Any] = orjson.loads(body)
    at_s.append(time.perf_counter())
    plan = prompter.plan_chat(parse_chat(parsed))
    at_s.append(time.perf_counter())
    encoded = plan.encode()
    at_s.append(time.perf_counter())
    prompter.commit(plan, encoded).keys(CONTRACT)
    at_s.append(time.perf_counter())
    taken_ms = [(b - a) * 1000 for a, b in pairwise(at_s)]
    for series, taken in zip(
        (times.parse_ms, times.plan_ms, times.encode_ms, times.commit_ms), taken_ms, strict=True
    ):
        series.append(taken)
    times.total_ms.append(sum(taken_ms))


def _split(times: _Times) -> str:
    def p50(samples: list[float]) -> float:
        return sorted(samples)[len(samples) // 2]

    return (
        f"p50: JSON {p50(times.parse_ms):.1f}, render and walk {p50(times.plan_ms):.1f}, "
        f"encode {p50(times.encode_ms):.1f}, commit and hash {p50(times.commit_ms):.1f}"
    )
