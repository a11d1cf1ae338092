"""A process's clock is set, and its resolver fails, from outside and while it runs."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

from loadtest.dev.chaos import surroundings

ASKING = """
import asyncio, socket, sys, time
import uvloop

async def ask():
    loop = asyncio.get_running_loop()
    in_a_thread = lambda *asked: loop.run_in_executor(None, socket.getaddrinfo, *asked)
    for ask in (loop.getaddrinfo, in_a_thread):
        for name in ("r1.chaos.test", "127.0.0.1"):
            try:
                found = await ask(name, 80)
                yield found[0][4][0]
            except OSError as exc:
                yield exc.errno

async def main():
    for _ in sys.stdin:
        print(time.time(), *[each async for each in ask()], flush=True)

uvloop.run(main())
"""


async def test_a_clock_and_a_resolver_are_set_from_outside(tmp_path: Path) -> None:
    """As uvloop asks for names, and as a thread does; other names are the system's."""
    tmp_path.joinpath("asking.py").write_text(ASKING)
    file = tmp_path / "shared"
    surroundings.create(file)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(surroundings.__file__), str(file), "asking"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{Path(surroundings.__file__).parents[2]}"},
    )
    assert process.stdin is not None
    assert process.stdout is not None

    async def look() -> tuple[float, list[str]]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"?\n")
        async with asyncio.timeout(60):
            now, *found = (await process.stdout.readline()).decode().split()
        return float(now) - time.time(), found

    assert (await look())[1] == ["127.0.0.1"] * 4
    surroundings.fail_names(file, socket.EAI_AGAIN)
    surroundings.step(file, -3600.0)
    offset_s, found = await look()
    surroundings.fail_names(file, 0)
    surroundings.step(file, 0.0)
    after_s, later = await look()
    process.stdin.close()
    await process.wait()

    assert found == [str(int(socket.EAI_AGAIN)), "127.0.0.1"] * 2
    assert -3660 < offset_s < -3540
    assert -60 < after_s < 60
    assert later == ["127.0.0.1"] * 4
