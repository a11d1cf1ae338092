"""The replicas of a study, and a router in front of them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

import httpx

from loadtest.compare.arms import arm_of, serve_flags
from loadtest.dev.gpu.run_machine import Gpu, last_line
from loadtest.dev.gpu.run_models import cache_bytes, model_folder
from loadtest.dev.gpu.run_setting import Setting
from loadtest.engines.fork_client import Forked
from loadtest.engines.vllm import ENVIRON, TOOL_OPTIONS, Engine
from loadtest.runner import leash
from loadtest.runner.stack import Router, start_router

_BUFFER_STEPS: Final = 500  # a router that joins needs only events since the last clear
_SEED: Final = {"PYTHONHASHSEED": "0"}  # before 0.27 block hashes are random without it
_WATCH_S: Final = 0.2
_NOTICE_S: Final = 1.0  # a request may fail before its replica has ended
TAIL_LINES: Final = 400  # of a log, searched for the reason
_FIRST_TOKEN, _LAST_TOKEN = 300, 8_000  # any of the vocabulary but special ones

Found = TypeVar("Found")


class ReplicaDied(Exception):
    """A replica ended while it was needed; the message is one line."""


class GpuReplica(Engine):
    """A replica with an interpreter of its own: a GPU is not to be used after a fork.

    It ends with this process, also if this one is killed: the next study needs its memory.
    """

    __slots__ = ()

    def _spawn(self) -> subprocess.Popen[bytes] | Forked:
        leashed = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid())]
        return self._run([*leashed, *self._command])


def make_replicas(
    setting: Setting, python: Path, log_dir: Path, gpus: Sequence[Gpu]
) -> list[Engine]:
    """Make the replicas, not started; several share a GPU if there are more of them than GPUs."""
    options = list(TOOL_OPTIONS)
    kind: type[Engine] = Engine
    if setting.device == "gpu":
        kind = GpuReplica
        num_a_gpu = -(-setting.num_replicas // len(gpus))
        options += ["--model", str(model_folder(setting.model, log_dir))]
        options += ["--gpu-memory-utilization", f"{0.9 / num_a_gpu:.2f}"]
        num_bytes = cache_bytes(setting.model, setting.num_cache_tokens)
        options += ["--kv-cache-memory-bytes", str(num_bytes)]  # nothing is left to a profiling run
    if setting.offload_gib:
        options += ["--kv-offloading-size", f"{setting.offload_gib:g}"]
        options += ["--kv-offloading-backend", "native"]
    return [
        kind(
            f"r{number + 1}",
            log_dir,
            python=python,
            num_blocks=setting.num_blocks,
            max_model_len=setting.max_model_len,
            buffer_steps=_BUFFER_STEPS,
            options=options,
            environ=_SEED | (_environ(number, len(gpus)) if setting.device == "gpu" else {}),
        )
        for number in range(setting.num_replicas)
    ]


def _environ(number: int, num_gpus: int) -> dict[str, str]:
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name for name in seen.split(",") if name] or [str(gpu) for gpu in range(num_gpus)]
    paths = (ENVIRON["PYTHONPATH"], os.environ.get("PYTHONPATH"))
    return {
        "CUDA_VISIBLE_DEVICES": names[number % num_gpus],
        "LD_PRELOAD": os.environ.get("LD_PRELOAD", ""),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "OMP_NUM_THREADS": "2",
    }


def warm_up(engines: Sequence[Engine], longest: int) -> None:
    """Let each replica compute prompts of up to `longest` tokens, so that kernels are compiled.

    Raises:
        ReplicaDied: one of them does not.
    """
    dice = random.Random("warm up")

    def compute(engine: Engine) -> None:
        for length in (longest // 100, longest // 10, longest):
            prompt = [dice.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(length)]
            try:
                engine.complete(prompt, max_tokens=4)
            except httpx.HTTPError as exc:
                why = f"{engine.name} computes no prompt of {length} tokens: {exc!r}"
                raise ReplicaDied(f"{why}; {last_line(engine.tail(TAIL_LINES))}") from exc

    with ThreadPoolExecutor(len(engines)) as threads:
        list(threads.map(compute, engines))


def empty_caches(engines: Sequence[Engine]) -> None:
    """Empty all caches, as before every run; CPU tiers are kept."""
    for engine in engines:
        engine.reset_prefix_cache()


@asynccontextmanager
async def routing(
    engines: Sequence[Engine], arm: str, log_dir: Path, flags: Sequence[str] = ()
) -> AsyncIterator[Router]:
    """Run a fresh router of a variant.

    Raises:
        ChildDied: it did not start.
    """
    config = log_dir / "router.json"
    await asyncio.to_thread(config.write_text, json.dumps({"replicas": _listed(engines)}))
    words = ["--config", str(config), *serve_flags(arm_of(arm)), "--admin-open", *flags]
    words += ["--hash-seeds", _SEED["PYTHONHASHSEED"]]
    async with start_router((), words, log_dir) as router:
        yield router


def _listed(engines: Sequence[Engine]) -> list[dict[str, object]]:
    """Name each replica's event endpoints: releases before 0.27 do not report them."""
    return [
        {
            "url": engine.url,
            "name": engine.name,
            "events": [engine.events_endpoint],
            "replay": [engine.replay_endpoint],
        }
        for engine in engines
    ]


async def while_alive(engines: Sequence[Engine], work: Awaitable[Found]) -> Found:
    """Await some work as long as all replicas run; errors of the work are raised as they are.

    Raises:
        ReplicaDied: one of them ended first; the work is cancelled.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(engines), name="watch replicas")
            found = await work
            watcher.cancel()
    except ExceptionGroup as several:
        await asyncio.sleep(_NOTICE_S)
        _check(engines)
        raise several.exceptions[0] from None
    return found


async def _watch(engines: Sequence[Engine]) -> None:
    while True:
        _check(engines)
        await asyncio.sleep(_WATCH_S)


def _check(engines: Sequence[Engine]) -> None:
    for engine in engines:
        if engine.has_ended:
            raise ReplicaDied(f"{engine.name} ended: {last_line(engine.tail(TAIL_LINES))}")
