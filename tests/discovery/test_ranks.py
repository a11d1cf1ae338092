"""Ranks that come and go while a replica runs: vLLM's elastic scaling."""

from __future__ import annotations

from typing import Any

from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import chat, on_stage


def pages(*ranks: int, metrics: int = 3) -> dict[str, Any]:
    lines = [f'vllm:num_requests_running{{engine="{rank}"}} 0' for rank in range(metrics)]
    lines.append("process_start_time_seconds 1")
    sources = {
        str(rank): {"endpoint": f"tcp://127.0.0.1:{9 + rank}", "publisher": "zmq"} for rank in ranks
    }
    return {"/kv_event_sources": sources, "/metrics": (200, "\n".join(lines))}


async def test_ranks_that_go_are_dropped_and_those_that_come_are_found() -> None:
    settings = {"health__interval_s": 0.05, "health__load_interval_s": 0.1}
    async with FakeEngine() as engine:
        engine.pages |= pages(0, 1, 2)
        async with on_stage(engine, **settings, policy__name="round_robin") as stage:
            fleet = stage.router.fleet
            assert fleet.members.replica("r1").num_ranks == 3

            normal = engine.pages
            engine.pages = dict.fromkeys(normal, (503, "scaling"))
            await stage.until(lambda: not fleet.members.is_up("r1", 0.0))
            engine.pages = normal | pages(0, 1)
            await stage.until(lambda: fleet.members.replica("r1").num_ranks == 2)
            await stage.until(lambda: fleet.members.is_up("r1", 0.0))
            for _ in range(6):
                assert (await stage.ask(chat("a"))).status == 200
            named = {r.headers.get("X-data-parallel-rank") for r in engine.received}
            assert named == {"0", "1"}

            engine.pages = normal | pages(0)
            await stage.until(lambda: fleet.members.replica("r1").num_ranks == 1)
            engine.pages = normal | pages(0, 1, 2)
            await stage.until(lambda: fleet.members.replica("r1").num_ranks == 3)
