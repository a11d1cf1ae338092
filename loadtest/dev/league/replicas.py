"""Replicas with cold caches: real vLLM engines on the CPU, or emulated ones.

Real engines start once and are cleared before each run. Emulated ones are fresh for each run.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import httpx
from msgspec import Struct

from loadtest.dev.league.cell import Cell, Prefill
from loadtest.engines.mooncake import MASTER_READY_S, SEGMENT_BYTES, Master
from loadtest.engines.process import all_up
from loadtest.engines.vllm import BLOCK_BYTES, TOOL_OPTIONS, Engine
from loadtest.runner.stack import start_replicas
from router.config.tls import system_tls

UNLIMITED: Final = 5  # caches that never evict are so many times as large
_MAX_MODEL_LEN: Final = 32_768
_LEASE_MS: Final = 5_000  # Mooncake's default
_WARM_UP_TOKENS: Final = 6_000
_NUM_WARM_UPS: Final = 2
_BUFFER_STEPS: Final = 500  # a router that joins needs only events since the last clear
_BATCH: Final = ("--max-num-batched-tokens", "2048", "--max-num-seqs", "128")
"""Of emulated replicas. Source: vLLM 0.32.0, EngineArgs.get_batch_defaults, CPU, API server."""
_READY_S: Final = 600.0  # on a machine that does other things, too
_SLOW_LAYERS: Final = 12
_NUM_LAYERS: Final[dict[Prefill, int]] = {"fast": 2, "slow": _SLOW_LAYERS}


class Replica(Struct, frozen=True, kw_only=True):
    """One replica: its base URL, and where it publishes its KV events."""

    url: str
    events: str


class Replicas(Struct, frozen=True, kw_only=True):
    """The replicas of one cell: `cold` gives them with empty caches, for one run.

    `flags` are of our router: the pool behind them.
    """

    cold: Callable[[], AbstractAsyncContextManager[tuple[Replica, ...]]]
    flags: tuple[str, ...] = ()


@contextmanager
def running(cell: Cell, log_dir: Path, *, is_unlimited: bool) -> Iterator[Replicas]:
    """Run the replicas of a cell, as long as the context lasts.

    Raises:
        FileNotFoundError: no vLLM is installed.
        RuntimeError, TimeoutError: one of them did not start.
    """
    num_blocks = cell.num_blocks * (UNLIMITED if is_unlimited else 1)
    if cell.engines == "emulated":
        yield Replicas(cold=lambda: _emulated(cell, num_blocks, log_dir))
        return
    names = [f"r{number + 1}" for number in range(cell.num_replicas)]
    max_model_len = min(_MAX_MODEL_LEN, (num_blocks - 1) * cell.block_size)
    options = (*TOOL_OPTIONS, "--enable-scale-out", *_model(cell.prefill))  # others render there
    if not cell.has_pool or is_unlimited:
        tier = 0.0 if is_unlimited else cell.tier
        with _engines(
            [
                Engine(
                    name,
                    log_dir,
                    num_blocks=num_blocks,
                    max_model_len=max_model_len,
                    buffer_steps=_BUFFER_STEPS,
                    options=(*options, *_tier(cell.prefill, tier * num_blocks)),
                )
                for name in names
            ],
            is_external=tier > 0,
        ) as replicas:
            yield replicas
        return
    master = Master(log_dir, lease_ms=_LEASE_MS)
    with (
        all_up([master], timeout_s=MASTER_READY_S),
        _engines(
            [
                master.engine(
                    name,
                    log_dir,
                    segment_bytes=4 * SEGMENT_BYTES * _NUM_LAYERS[cell.prefill] // 2,
                    num_blocks=num_blocks,
                    max_model_len=max_model_len,
                    buffer_steps=_BUFFER_STEPS,
                    options=options[len(TOOL_OPTIONS) :],  # it has these
                )
                for name in names
            ],
            is_external=True,
            flags=master.options,
        ) as replicas,
    ):
        yield replicas


@contextmanager
def _engines(
    engines: Sequence[Engine], *, is_external: bool, flags: tuple[str, ...] = ()
) -> Iterator[Replicas]:
    """Run real engines; `is_external`: there is something behind their caches to be cleared."""
    with all_up(engines, timeout_s=_READY_S):
        _warm_up(engines)

        @asynccontextmanager
        async def cold() -> AsyncIterator[tuple[Replica, ...]]:
            for engine in engines:
                engine.reset_prefix_cache(external=is_external)
            yield tuple(Replica(url=each.url, events=each.events_endpoint) for each in engines)

        yield Replicas(cold=cold, flags=flags)


def _warm_up(engines: Sequence[Engine]) -> None:
    """Compute long prompts at all engines at once: the first ones take longer."""
    dice = random.Random("warm up")
    with ThreadPoolExecutor(len(engines)) as threads:
        for _ in range(_NUM_WARM_UPS):
            prompts = [
                [dice.randrange(300, 8_000) for _ in range(_WARM_UP_TOKENS)] for _ in engines
            ]
            list(threads.map(lambda each, prompt: each.complete(prompt), engines, prompts))


def _model(prefill: Prefill) -> tuple[str, ...]:
    """Write the options of the tiny model, or of one with slow prefill: six times the layers."""
    if prefill == "fast":
        return ()
    layers = {"num_hidden_layers": _SLOW_LAYERS, "max_window_layers": _SLOW_LAYERS}
    return ("--hf-overrides", json.dumps(layers))


def _tier(prefill: Prefill, num_blocks: float) -> tuple[str, ...]:
    """Write the option of a CPU tier of so many blocks (`site/cpu_tier.py`); none for 0."""
    if not num_blocks:
        return ()
    extra = {
        "spec_name": "TorchTier",
        "spec_module_path": "cpu_tier",
        "cpu_bytes_to_use": round(num_blocks * BLOCK_BYTES * _NUM_LAYERS[prefill] / 2),
    }
    tier = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return ("--kv-transfer-config", json.dumps({**tier, "kv_connector_extra_config": extra}))


@asynccontextmanager
async def _emulated(
    cell: Cell, num_blocks: int, log_dir: Path
) -> AsyncIterator[tuple[Replica, ...]]:
    flags = ["--preset", cell.preset, "--block-size", str(cell.block_size), *_BATCH]
    flags += ["--num-gpu-blocks", str(num_blocks)]
    if cell.tier:
        flags += ["--cpu-blocks", str(round(cell.tier * cell.num_blocks))]
    async with (
        start_replicas(flags, cell.num_replicas, log_dir) as replicas,
        httpx.AsyncClient(timeout=5.0, trust_env=False, verify=system_tls()) as client,
    ):
        urls = [replica.announced[1] for replica in replicas]
        yield tuple([Replica(url=url, events=await _events(client, url)) for url in urls])


async def _events(client: httpx.AsyncClient, url: str) -> str:
    """Find where a replica publishes its KV events."""
    sources = (await client.get(f"{url}/kv_event_sources")).json()
    return str(sources["0"]["endpoint"]).replace("*", "127.0.0.1")
