"""Tensor-parallel replicas in a real pool: each rank stores its part; who reads what is known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from loadtest.agents import make_sessions
from loadtest.results import TurnResult
from tests.engines.harness import (
    MASTER_READY_S,
    Engine,
    Master,
    Router,
    all_up,
    wait_until,
)
from tests.engines.hybrid_models import make_model
from tests.engines.turns import PROFILE, take_turns, wrong_predictions

MAX_WRONG = 2  # of four reads: on a starved machine one may fail, and is computed instead
TP_2 = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")


async def handed_on(
    engines: Sequence[Engine], master: Master, log_dir: Path, *, num_objects: int
) -> list[list[TurnResult]]:
    """Take four sessions from replica to replica: two turns at the first, one at each other one.

    `num_objects`: of a block that the first one stores. Each engine has stored something before, so
    that a listing shows its layout; in dev mode it reports its prefix.
    """
    sessions = make_sessions(replace(PROFILE, num_sessions=4, seed=74))
    names = [f"r{number + 1}" for number in range(len(engines))]
    rounds = []
    for number, engine in enumerate(engines):
        engine.complete(range(1000 * number + 300, 1000 * number + 1000))
    wait_until(partial(_are_there, master, engines), 60, "their blocks")
    num_before = len(master.keys())
    with Router(engines, log_dir, options=master.options) as router:
        wait_until(partial(_are_known, router, master), 60, "all layouts")
        for name in names[1:]:
            router.drain(name)
        for last, name in zip((None, *names), names, strict=False):
            if last is not None:
                router.drain(name, draining=False)
                router.drain(last)
            turns = await take_turns(router.url, sessions, max_rounds=1 if last else 2)
            results = [result for _, result in turns]
            assert {result.replica for result in results} == {name}
            rounds.append(results)
            if last is None:
                wait_until(
                    partial(_has_saved, master, results, num_objects, num_before), 60, "its blocks"
                )
    wrong = wrong_predictions(result for results in rounds for result in results)
    assert len(wrong) <= MAX_WRONG, "\n".join(wrong)
    return rounds


def _are_there(master: Master, engines: Sequence[Engine]) -> bool:
    """Return whether each engine's 21 blocks are in the pool."""
    return len({key.rpartition("@")[2] for key in master.keys()}) == 21 * len(engines)


def _are_known(router: Router, master: Master) -> bool:
    """Return whether a router knows a layout for each prefix that is there."""
    prefixes = {key.partition("@tp_rank")[0] for key in master.keys()}
    known = httpx.get(f"{router.admin_url}/admin/pool", timeout=30).text
    return all(f'"{prefix}@tp_rank' in known for prefix in prefixes)


def _has_saved(
    master: Master, results: Sequence[TurnResult], num_objects: int, num_before: int
) -> bool:
    """Return whether all of the sessions is saved: that goes on when they are answered."""
    num_blocks = sum((result.num_prompt_tokens or 0) // 32 for result in results[-4:])
    num_shared = sum((result.num_cached_tokens or 0) // 32 for result in results[1:4])
    return len(master.keys()) >= num_before + num_objects * (num_blocks - num_shared)


def num_pooled(results: Sequence[TurnResult]) -> int:
    return sum(result.predicted.pool for result in results if result.predicted is not None)


@pytest.mark.timeout(600)
async def test_what_two_ranks_stored_is_read_by_two_ranks_alone(log_dir: Path) -> None:
    """Another replica of TP 2 reads both parts; one of TP 1, of another prefix, reads nothing."""
    master, model = Master(log_dir), str(make_model("two-heads", log_dir / "two-heads"))
    with all_up([master], timeout_s=MASTER_READY_S):
        engines = [
            master.engine(
                f"prefix-{number}",
                log_dir,
                options=("--model", model, *parallel),
                extra_config={"cache_prefix": prefix},
            )
            for number, (prefix, parallel) in enumerate((("tp2", TP_2), ("tp2", TP_2), ("tp1", ())))
        ]
        with all_up(engines):
            _, second, third = await handed_on(engines, master, log_dir, num_objects=2)
            layouts = {key.rpartition("@")[0] for key in master.keys()}

    assert num_pooled(second) > 2000
    assert num_pooled(third) == 0
    tail = "pcp0@dcp0@pp_rank:0@group:0"
    assert layouts == {
        f"tp2@two-heads@tp_rank:0@{tail}",
        f"tp2@two-heads@tp_rank:1@{tail}",
        f"tp1@two-heads@tp_rank:0@{tail}",
    }


@pytest.mark.timeout(600)
async def test_replicas_of_several_sizes_may_read_one_layout(log_dir: Path) -> None:
    """With the same `store_tp_size` one of TP 1 reads what TP 2 stored, and the other way round."""
    master, model = Master(log_dir), str(make_model("two-heads", log_dir / "two-heads"))
    with all_up([master], timeout_s=MASTER_READY_S):
        engines = [
            master.engine(
                f"store-{number}",
                log_dir,
                options=("--model", model, *parallel),
                extra_config={"store_tp_size": 2},
            )
            for number, parallel in enumerate((TP_2, ()))
        ]
        with all_up(engines):
            _, second = await handed_on(engines, master, log_dir, num_objects=2)

    assert num_pooled(second) > 2000
