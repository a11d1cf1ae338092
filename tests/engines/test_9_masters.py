"""Two Mooncake masters that choose one by a real etcd: the one that serves dies under load."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loadtest.results import TurnResult
from tests.engines.drive import drive
from tests.engines.harness import (
    ENGINE_READY_S,
    MASTER_READY_S,
    Engine,
    Master,
    Process,
    Router,
    all_up,
    until,
    wait_until,
)
from tests.engines.turns import mixed_sessions, num_pooled, take_turns, wrong_predictions
from tests.ports import free_port

FAILOVER_S = 120  # here 10 to 12: 5 until etcd's lease is over, 5 of warm-up

ETCD = shutil.which("etcd")

pytestmark = pytest.mark.skipif(
    ETCD is None and "WARMROUTE_TEST_REQUIRE_SERVERS" not in os.environ,
    reason="no etcd here (Debian's package etcd-server)",
)

Fleet = tuple[tuple[Master, Master], tuple[Engine, Engine]]


@pytest.fixture
def etcd(log_dir: Path) -> Iterator[str]:
    """An etcd of one node: where it listens."""
    assert ETCD is not None, "no etcd here: tests/engines/install.sh"
    port, peers = free_port(), free_port()
    command: list[str | Path] = [
        ETCD, "--data-dir", log_dir / f"etcd-{port}",
        "--listen-client-urls", f"http://127.0.0.1:{port}",
        "--advertise-client-urls", f"http://127.0.0.1:{port}",
        "--listen-peer-urls", f"http://127.0.0.1:{peers}",
        "--initial-advertise-peer-urls", f"http://127.0.0.1:{peers}",
        "--initial-cluster", f"default=http://127.0.0.1:{peers}",
    ]  # fmt: skip
    running = Process(f"etcd-{port}", f"http://127.0.0.1:{port}", command, log_dir / "etcd.log", {})
    with all_up([running]):
        yield f"127.0.0.1:{port}"


@pytest.fixture
def fleet(etcd: str, log_dir: Path) -> Iterator[Fleet]:
    """Two masters of one pool, and two replicas that give it its memory."""
    masters = Master(log_dir, etcd=etcd), Master(log_dir, etcd=etcd)
    engines = masters[0].engine("h1", log_dir), masters[0].engine("h2", log_dir)
    with all_up(masters, "/role", MASTER_READY_S):
        the_one_that_serves(masters)
        try:
            for engine in engines:
                engine.start()
            for engine in engines:
                started(engine, masters)
            yield masters, engines
        finally:
            for engine in engines:
                engine.kill()


def started(engine: Engine, masters: tuple[Master, Master]) -> None:
    """Wait for an engine; one whose store finds no master that serves, ends: start it again.

    Where processors are short a master may lose its lease in etcd, and none serves for a while.
    """
    try:
        engine.wait_ready("/health", ENGINE_READY_S)
    except RuntimeError:
        engine.kill()
        the_one_that_serves(masters)
        engine.start().wait_ready("/health", ENGINE_READY_S)


async def test_the_master_that_serves_dies_and_the_other_takes_over(
    fleet: Fleet, log_dir: Path
) -> None:
    """No request fails; what the old one held is gone; what is stored since is predicted."""
    masters, engines = fleet
    flags = "--mooncake", ",".join(m.url for m in masters), "--set", "mooncake.verify_timeout_s=0.1"
    with Router(engines, log_dir, options=flags, policy="random") as router:
        await until(lambda: router.metric("warmroute_pool_up") == 1)
        results: list[TurnResult] = []
        killed: list[Master] = []

        async def fail_over() -> None:
            await until(lambda: num_pooled(results) > 0)
            killed.append(await asyncio.to_thread(the_one_that_serves, masters))
            await asyncio.to_thread(killed[0].kill)
            await until(lambda: router.metric("warmroute_pool_up") == 0)
            await until(lambda: router.metric("warmroute_pool_up") == 1)

        async with asyncio.TaskGroup() as tg:
            failing = tg.create_task(fail_over())
            while not failing.done():
                sessions = mixed_sessions(num_turns=4, num_sessions=4, scale_time=0.1)
                await drive(router.url, sessions, concurrency=3, on_result=results.append)
        after = [result for _, result in await take_turns(router.url, mixed_sessions(num_turns=4))]
        wrong = wrong_predictions(after)
        log = router.log_path.read_text()

    assert [r.error_message for r in (*results, *after) if r.error is not None] == []
    assert the_one_that_serves(masters) not in killed
    assert num_pooled(after) > 0
    assert len(wrong) <= max(1, 0.02 * len(after)), "\n".join(wrong)
    assert "pool lost" in log


def the_one_that_serves(masters: tuple[Master, Master]) -> Master:
    """Wait until a master serves; return it."""
    found: list[Master] = []

    def looked() -> bool:
        master = serving(masters)
        found.extend([master] if master is not None else [])
        return bool(found)

    wait_until(looked, FAILOVER_S, "a master that serves")
    return found[0]


def serving(masters: tuple[Master, Master]) -> Master | None:
    """Return the master that serves; None: none does, at the moment."""
    for master in masters:
        try:
            answer = httpx.get(f"{master.url}/ha_status", timeout=5)
        except httpx.TransportError:
            continue
        if answer.text.strip() == "serving":
            return master
    return None
