"""Many emulated replicas in one process: `python -m loadtest.studies.scale_fleet NUM`.

Every one is whole: routes, cache, KV events, metrics; only its time model is empty, so that it
answers at once. A JSON line on stdout has their URLs. Ends with SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from typing import Final

import msgspec
import uvloop

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from loadtest.emulator.time_model import PRESETS

NUM_BLOCKS: Final = 4096  # of each replica: 65,536 tokens


async def serve(num_replicas: int) -> None:
    """Serve until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    options = EmulatorOptions(time_model=PRESETS["instant"], num_gpu_blocks=NUM_BLOCKS)
    async with AsyncExitStack() as stack:
        fleet = [await stack.enter_async_context(Emulator(options)) for _ in range(num_replicas)]
        print(msgspec.json.encode({"urls": [one.url for one in fleet]}).decode(), flush=True)
        await stop.wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
