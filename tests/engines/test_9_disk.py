"""Two real replicas and a pool whose owner keeps on disk what does not fit its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.harness import MASTER_READY_S, Engine, Master, Router, all_up
from tests.engines.turns import mixed_sessions, take_turns, wrong_predictions

MIN_EXACT_RATIO = 0.98  # as in test_7_pool: the pool moves between answer and look-up


@pytest.fixture(scope="module")
def master(log_dir: Path) -> Iterator[Master]:
    """A master that has objects moved to disk from 600 blocks on."""
    running = Master(log_dir, watermark=0.6, lease_ms=200, has_disk=True)
    with all_up([running], timeout_s=MASTER_READY_S):
        yield running


@pytest.fixture(scope="module")
def engines(master: Master, log_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two replicas with small caches; the pool's memory and its disk are another process's."""
    owner = master.memory(log_dir)
    with all_up([owner], timeout_s=MASTER_READY_S):
        both = [master.engine(f"d{i}", log_dir, segment_bytes=0) for i in (1, 2)]
        with all_up(both):
            yield both[0], both[1]


async def test_what_went_to_disk_is_read_and_predicted(
    engines: tuple[Engine, Engine], master: Master, log_dir: Path
) -> None:
    """Sessions that are thrown to and fro: nothing that was stored once is computed again."""
    with Router(engines, log_dir, options=master.options, policy="random") as router:
        turns = await take_turns(router.url, mixed_sessions(num_turns=6, num_sessions=6))
        num_on_disk = router.metric("warmroute_pool_knowledge_total", kind="on_disk")
    results = [result for _, result in turns]
    wrong = wrong_predictions(results)
    num_pooled = sum(r.predicted is not None and r.predicted.pool > 0 for r in results)

    assert len(results) >= 60
    assert master.metric("master_evicted_key_count") > 200
    assert num_pooled >= 10, "hardly anything was fetched: nothing was proved"
    assert num_on_disk >= 100, "hardly anything was on disk: nothing was proved"
    assert len(wrong) <= (1 - MIN_EXACT_RATIO) * len(results), "\n".join(wrong)
    print(f"{num_pooled} of {len(results)} read, {num_on_disk:.0f} blocks on disk, wrong: {wrong}")
