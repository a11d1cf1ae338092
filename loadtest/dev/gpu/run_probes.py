"""Single requests on idle replicas: the cost model, token hand-over, and reads of a CPU tier."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, Final

import httpx
import orjson
from msgspec.structs import replace

from loadtest.agent_text import code
from loadtest.dev.gpu.run_record import Fetch, HandOver, Prefill
from loadtest.dev.gpu.run_replicas import empty_caches, routing
from loadtest.dev.gpu.run_setting import Setting
from loadtest.engines.process import read_metric
from loadtest.engines.vllm import Engine
from loadtest.results import TurnResult
from loadtest.runner.exchange import Exchange
from loadtest.runner.requests import CHAT, COMPLETIONS
from loadtest.runner.sending import make_client, send
from loadtest.runner.stack import Router

_SILENCE_S: Final = 120.0
_PROBE_TOKENS: Final = 2_000  # long enough to be handed over
_MAX_PROBES: Final = 20
_PROBE_PAUSE_S: Final = 0.2
_HANDED: Final = "warmroute_handed_over_requests_total"

_Way = Callable[[Sequence[str]], Awaitable[TurnResult]]
"""Sends a conversation of these texts."""


class ProbeFailed(Exception):
    """A single request failed; the message is one line."""


async def measure_prefill(router: Router, setting: Setting) -> list[Prefill]:
    """Send new prompts of each length through a router that has learned what they cost.

    Raises:
        ProbeFailed: a request failed.
    """
    found = []
    for length in setting.prefill_lengths:
        measured, predicted, lengths = [], [], []
        for number in range(setting.num_repeats):
            texts = [f"Prompt {length} {number}.\n{_text(f'{length}/{number}', length)}"]
            predicted.append(await _predicted_ms(router, texts))
            result = await _ask(router.url, texts)
            measured.append(_ms(result))
            lengths.append(result.num_prompt_tokens or 0)
        found.append(
            Prefill(
                num_tokens=round(median(lengths)),
                measured_ms=tuple(measured),
                predicted_ms=tuple(predicted),
            )
        )
    return found


async def measure_hand_over(
    engines: Sequence[Engine], setting: Setting, log_dir: Path
) -> list[HandOver]:
    """Ask two routers in turn, one without hand-over, for turns of a cached conversation.

    A replica that takes no ids with a chat (vLLM 0.26) is asked directly.

    Raises:
        ProbeFailed: a request failed.
        ChildDied: a router did not start.
    """
    one = engines[:1]
    folders = log_dir / "hand-over-off", log_dir / "hand-over-on"
    for folder in folders:
        await asyncio.to_thread(folder.mkdir)
    off, on = (["--tokens-hand-over", mode] for mode in ("off", "on"))
    async with (
        routing(one, "kv_aware", folders[0], off) as without,
        routing(one, "kv_aware", folders[1], on) as handing,
    ):
        if await _is_handed_over(handing):
            return [
                await _compare(without, handing, length, setting.num_repeats)
                for length in setting.hand_over_lengths
            ]
    return [
        await _compare_directly(engines[0], length, setting.num_repeats)
        for length in setting.hand_over_lengths
    ]


async def measure_fetches(engines: Sequence[Engine], setting: Setting) -> list[Fetch]:
    """Let a replica compute prompts, empty its GPU cache alone, and send them again.

    Raises:
        ProbeFailed: a request failed.
    """
    engine = engines[0]
    found = []
    for length in setting.prefill_lengths:
        computed, fetched = [], []
        for number in range(setting.num_repeats):
            texts = [f"Fetch {length} {number}.\n{_text(f'fetch/{length}/{number}', length)}"]
            computed.append(await _ask(engine.url, texts))
            empty_caches([engine])
            fetched.append(await _ask(engine.url, texts))
        found.append(
            Fetch(
                num_tokens=computed[0].num_prompt_tokens or 0,
                num_fetched_tokens=tuple(result.num_cached_tokens or 0 for result in fetched),
                computed_ms=tuple(map(_ms, computed)),
                fetched_ms=tuple(map(_ms, fetched)),
            )
        )
    return found


async def _compare(without: Router, handing: Router, length: int, num_repeats: int) -> HandOver:
    ways = partial(_ask, without.url), partial(_ask, handing.url)
    text = _text(f"hand over/{length}", length)
    await _both(ways, text, 0)  # fills the cache
    before = await _num_handed(handing)
    pairs = [await _both(ways, text, number) for number in range(1, num_repeats + 1)]
    return _compared(pairs, round(await _num_handed(handing) - before))


async def _compare_directly(engine: Engine, length: int, num_repeats: int) -> HandOver:
    ways = partial(_ask, engine.url), partial(_ask_by_ids, engine)
    text = _text(f"hand over/{length}", length)
    await _both(ways, text, 0)  # fills the cache
    pairs = [await _both(ways, text, number) for number in range(1, num_repeats + 1)]
    return replace(_compared(pairs, num_repeats), is_direct=True)


async def _both(ways: tuple[_Way, _Way], text: str, number: int) -> tuple[TurnResult, TurnResult]:
    """Ask a new question about a text in both ways, every second time the second one first."""
    found: dict[int, TurnResult] = {}
    for which in (0, 1) if number % 2 else (1, 0):
        question = f"Question {number} {which}: what is wrong in line {number}?"
        found[which] = await ways[which]([text, "Ask.", question])
    return found[0], found[1]


def _compared(pairs: Sequence[tuple[TurnResult, TurnResult]], num_handed: int) -> HandOver:
    return HandOver(
        num_tokens=pairs[-1][1].num_prompt_tokens or 0,
        off_ms=tuple(_ms(off) for off, _ in pairs),
        on_ms=tuple(_ms(on) for _, on in pairs),
        num_handed=num_handed,
    )


async def _ask_by_ids(engine: Engine, texts: Sequence[str]) -> TurnResult:
    """Ask a replica by token ids, as a completion."""
    ids = await asyncio.to_thread(engine.tokenize, _body(texts))
    body = {**_body([]), "prompt": ids}
    del body["messages"]
    return await _send(engine.url, COMPLETIONS, body)


async def _is_handed_over(router: Router) -> bool:
    """Send a prompt until its ids are handed over; the replica is asked in the background."""
    text = _text("probe", _PROBE_TOKENS)
    for _ in range(_MAX_PROBES):
        await _ask(router.url, [text])
        if await _num_handed(router):
            return True
        await asyncio.sleep(_PROBE_PAUSE_S)
    return False


async def _num_handed(router: Router) -> float:
    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
        return read_metric((await client.get(f"{router.url}/metrics")).text, _HANDED)


async def _predicted_ms(router: Router, texts: Sequence[str]) -> float:
    """Ask what the router expects of a prompt where it would send it."""
    async with httpx.AsyncClient(timeout=_SILENCE_S, trust_env=False) as client:
        answer = await client.post(f"{router.admin_url}/admin/explain", json=_body(texts))
    if answer.status_code != 200:
        raise ProbeFailed(f"/admin/explain answered {answer.status_code}")
    decision = answer.json()["decision"]
    for cost in decision["costs"]:
        if cost["id"] == decision["candidate"]:
            parts = (cost["queue_ms"], cost["fetch_ms"], cost["prefill_ms"])
            return float(sum(parts))
    raise ProbeFailed("/admin/explain names no cost of the chosen replica")


async def _ask(url: str, texts: Sequence[str]) -> TurnResult:
    return await _send(url, CHAT, _body(texts))


async def _send(url: str, route: str, body: dict[str, Any]) -> TurnResult:
    """Send a request as a stream.

    Raises:
        ProbeFailed: it failed.
    """
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    exchange = Exchange("probe", 0, start_s=monotonic())
    async with make_client(timeout_s=_SILENCE_S, base_url=url) as client:
        await send(client, route, orjson.dumps(streamed), exchange, monotonic, headers={})
    result = exchange.result(monotonic())
    if result.error is not None or result.ttft_s is None:
        raise ProbeFailed(f"a request failed: {result.error}: {result.error_message}")
    return result


def _body(texts: Sequence[str]) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[k % 2], "content": text} for k, text in enumerate(texts)]
    return {
        "model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip


def _text(seed: str, num_tokens: int) -> str:
    return code(random.Random(seed), num_tokens)


def _ms(result: TurnResult) -> float:
    assert result.ttft_s is not None
    return round(1e3 * result.ttft_s, 2)
