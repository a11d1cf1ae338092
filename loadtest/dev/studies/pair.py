"""Two real engines, and one router after the other in front of them.

This module runs processes, clears caches and sends sessions. `real_grid` orders the runs, and
`grid_run` sums up the answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Final

from msgspec import Struct

from loadtest.agents import Session
from loadtest.compare.arms import arm_of, serve_flags
from loadtest.dev.studies.cells import NUM_BLOCKS, NUM_ENGINES, Prefill
from loadtest.dev.studies.grid_run import pace_of
from loadtest.engines.mooncake import MASTER_READY_S, SEGMENT_BYTES, Master
from loadtest.engines.ports import free_port
from loadtest.engines.process import Process, all_up
from loadtest.engines.vllm import BLOCK_BYTES, TOOL_OPTIONS, Engine
from loadtest.results import TurnResult
from loadtest.runner.sessions import drive
from loadtest.runner.stack import start_router
from router.scheduling.waiting import QueueRules

SESSION_HEADER: Final = "x-session-id"
_MAX_MODEL_LEN: Final = 32_768
_SEGMENT_BYTES: Final[dict[Prefill, int]] = {"fast": 4 * SEGMENT_BYTES, "slow": 10 * SEGMENT_BYTES}
"""Each engine's pool segment: 8,192 blocks in all, more than any cell needs."""
_LEASE_MS: Final = 5_000  # Mooncake's default
_WARM_UP_TOKENS: Final = 6_000
_NUM_WARM_UPS: Final = 3  # the last one is timed
_SHORT_TOKEN: Final = 300  # a prompt of one token
_BUFFER_STEPS: Final = 500  # a router that joins needs only events since the last clear
_OPTIONS: Final = (*TOOL_OPTIONS, "--enable-scale-out")  # routers may ask them to render
_MODELS: Final[dict[Prefill, tuple[str, ...]]] = {
    "fast": (),
    "slow": (
        "--hf-overrides",
        json.dumps(
            {
                "hidden_size": 256,
                "intermediate_size": 768,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
            }
        ),
    ),
}
"""The tiny model, and one of its kind with slow prefill."""
_BLOCK_BYTES: Final[dict[Prefill, int]] = {"fast": BLOCK_BYTES, "slow": 2 * BLOCK_BYTES}
_SILENCE_S: Final = 60.0 + QueueRules().max_wait_s  # a client has to wait for longer than that
_OTHER_READY_S: Final = 60.0


Command = Callable[[int, int, Sequence[Engine]], Sequence[str]]
"""Makes another router's command line, from where it listens, its metrics' port, the engines."""


class Arm(Struct, frozen=True, kw_only=True):
    """The router in front of the engines: one of ours by label, or another one by command.

    Another router is ready when its `/v1/models` answers.
    """

    label: str
    command: Command | None = None

    @property
    def is_ours(self) -> bool:
        return self.command is None


class Pair:
    """Both engines, running.

    Attributes:
        engines: Both engines.
        options: The pool's, for a router of ours.
        pace: How long they take for a prompt over their profile in the simulator (`warm_up`).
    """

    __slots__ = ("_has_tier", "_log_dir", "engines", "options", "pace")

    def __init__(
        self,
        engines: Sequence[Engine],
        log_dir: Path,
        options: Sequence[str],
        *,
        has_tier: bool = False,
    ) -> None:
        self.engines = engines
        self.pace = 1.0
        self._has_tier = has_tier
        self._log_dir = log_dir
        self.options = options

    def warm_up(self, prefill: Prefill) -> None:
        """Compute long prompts at both engines, to warm them up and to measure their pace.

        Both compute at once, as under load, because they share the machine. The time of one-token
        prompts is subtracted: it is spent before the engine computes.
        """
        dice = random.Random("warm up")

        def took_s(engine: Engine, prompt: Sequence[int]) -> float:
            start_s = monotonic()
            engine.complete(prompt)
            return monotonic() - start_s

        with ThreadPoolExecutor(len(self.engines)) as threads:
            for _ in range(_NUM_WARM_UPS):
                prompts = [
                    [dice.randrange(300, 8_000) for _ in range(_WARM_UP_TOKENS)]
                    for _ in self.engines
                ]
                times_s = list(threads.map(took_s, self.engines, prompts))
            shorts = [[_SHORT_TOKEN]] * len(self.engines)
            before_s = min(fmean(threads.map(took_s, self.engines, shorts)) for _ in range(3))
        self.pace = pace_of(prefill, _WARM_UP_TOKENS, fmean(times_s) - before_s)

    def clear(self) -> None:
        """Empty all caches."""
        for engine in self.engines:
            engine.reset_prefix_cache(external=bool(self.options) or self._has_tier)
            engine.complete([_SHORT_TOKEN])  # the engine publishes the clearing with its next step

    async def run(
        self,
        sessions: Sequence[Session],
        variant: Arm,
        on_result: Callable[[TurnResult], None],
    ) -> list[TurnResult]:
        """Send sessions through a fresh router to cold caches; return every turn's result.

        Args:
            sessions: In the order in which they start.
            variant: The router in front of the engines.
            on_result: Called after every turn.

        Raises:
            ChildDied, RuntimeError, TimeoutError: the router did not start.
        """
        async with self.in_front(variant) as url:
            return await drive(
                url,
                sessions,
                concurrency=len(sessions),
                session_header=SESSION_HEADER,
                scripted=True,
                timeout_s=_SILENCE_S,
                on_result=on_result,
            )

    @asynccontextmanager
    async def in_front(self, arm: Arm) -> AsyncIterator[str]:
        """Run a fresh router before cold caches; its URL.

        Raises:
            ChildDied, RuntimeError, TimeoutError: it did not start.
        """
        self.clear()
        urls = [engine.url for engine in self.engines]
        if arm.command is None:
            flags = [*serve_flags(arm_of(arm.label)), *self.options]
            async with start_router(urls, flags, self._log_dir) as router:
                yield router.url
        else:
            with _other(arm.command, self.engines, self._log_dir) as url:
                yield url


@contextmanager
def running(
    log_dir: Path,
    *,
    has_pool: bool,
    prefill: Prefill = "fast",
    tier: float = 0.0,
    num_blocks: int = NUM_BLOCKS,
) -> Iterator[Pair]:
    """Run both engines, with or without a shared pool, as long as the context lasts.

    Args:
        log_dir: Where they write.
        has_pool: Whether they share a Mooncake pool.
        prefill: The model's cost.
        tier: Blocks of each engine's CPU tier over `num_blocks`.
        num_blocks: Of each engine's cache.

    Raises:
        FileNotFoundError: no vLLM is installed.
        RuntimeError, TimeoutError: one of them did not start.
    """
    names = [f"r{number + 1}" for number in range(NUM_ENGINES)]
    if not has_pool:
        engines = [
            Engine(
                name,
                log_dir,
                num_blocks=num_blocks,
                max_model_len=_MAX_MODEL_LEN,
                buffer_steps=_BUFFER_STEPS,
                options=(*_OPTIONS, *_MODELS[prefill], *_tier_options(prefill, tier * num_blocks)),
            )
            for name in names
        ]
        with all_up(engines):
            yield _warm(Pair(engines, log_dir, (), has_tier=tier > 0), prefill)
        return
    master = Master(log_dir, lease_ms=_LEASE_MS)
    with all_up([master], timeout_s=MASTER_READY_S):
        engines = [
            master.engine(
                name,
                log_dir,
                segment_bytes=_SEGMENT_BYTES[prefill],
                num_blocks=num_blocks,
                max_model_len=_MAX_MODEL_LEN,
                buffer_steps=_BUFFER_STEPS,
                options=_MODELS[prefill],
            )
            for name in names
        ]
        with all_up(engines):
            yield _warm(Pair(engines, log_dir, master.options), prefill)


def _tier_options(prefill: Prefill, num_blocks: float) -> tuple[str, ...]:
    """Write the option of a CPU tier of so many blocks (`site/cpu_tier.py`); none for 0."""
    if not num_blocks:
        return ()
    extra = {
        "spec_name": "TorchTier",
        "spec_module_path": "cpu_tier",
        "cpu_bytes_to_use": round(num_blocks * _BLOCK_BYTES[prefill]),
    }
    tier = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return ("--kv-transfer-config", json.dumps({**tier, "kv_connector_extra_config": extra}))


def _warm(pair: Pair, prefill: Prefill) -> Pair:
    pair.warm_up(prefill)
    return pair


@contextmanager
def _other(command: Command, engines: Sequence[Engine], log_dir: Path) -> Iterator[str]:
    port = free_port()
    words = command(port, free_port(), engines)
    url = f"http://127.0.0.1:{port}"
    process = Process(words[0], url, words, log_dir / "other-router.log", {})
    with all_up([process], "/v1/models", _OTHER_READY_S):
        yield url
