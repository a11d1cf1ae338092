"""Two real replicas behind a MultiConnector: the pool's store, and one that writes files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from loadtest.agents import make_sessions
from loadtest.engines.ports import free_port
from tests.engines.halves import assert_halves_are_refused, chat, said
from tests.engines.harness import MASTER_READY_S, Engine, Master, Router, all_up, wait_until
from tests.engines.turns import PROFILE, take_turns, wrong_predictions
from tests.forks import python_command, python_environment

MAX_WRONG = 2  # of twelve: on a starved machine a read may fail, and is computed instead


def several(log_dir: Path, name: str, role: str = "kv_both") -> tuple[str, str]:
    """Options of an engine that saves to the pool and to files of its own."""
    connectors = [
        {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"lookup_rpc_port": free_port()},
        },
        {
            "kv_connector": "ExampleConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"shared_storage_path": str(log_dir / f"{name}-files")},
        },
    ]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }
    return "--kv-transfer-config", json.dumps(transfer)


def check(engines: Sequence[Engine], master: Master) -> str:
    """Return what `warmroute check` says, in one line."""
    urls = [word for engine in engines for word in ("--replica", engine.url)]
    command = [*python_command(), "-m", "router.cli", "check", *urls, "--mooncake", master.url]
    done = subprocess.run(
        # The first time each engine looks at its machine, and that is busy.
        [*command, "--wait", "240", "--set", "health.timeout_s=60"],
        env=python_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return " ".join(done.stdout.split())


@pytest.mark.timeout(600)
async def test_a_pool_is_known_whose_engines_announce_nothing(log_dir: Path) -> None:
    """Sessions go on at another replica: what they read there was listed before, and predicted."""
    master = Master(log_dir)
    with all_up([master], timeout_s=MASTER_READY_S):
        engines = [
            master.engine(name, log_dir, options=several(log_dir, name)) for name in ("m1", "m2")
        ]
        with all_up(engines), Router(engines, log_dir, options=master.options) as router:
            sessions = make_sessions(replace(PROFILE, num_sessions=4, seed=75))
            router.drain("r2")
            first = [each for _, each in await take_turns(router.url, sessions, max_rounds=2)]
            num_blocks = sum((each.num_prompt_tokens or 0) // 32 for each in first[-4:])
            num_shared = sum((each.num_cached_tokens or 0) // 32 for each in first[1:4])
            wait_until(
                lambda: router.metric("warmroute_pool_blocks") >= num_blocks - num_shared,
                60,
                "a listing",
            )
            router.drain("r2", draining=False)
            router.drain("r1")
            second = [each for _, each in await take_turns(router.url, sessions, max_rounds=1)]
            num_announced = router.metric("warmroute_pool_knowledge_total", kind="stored")
            found = check(engines, master)

    assert {each.replica for each in second} == {"r2"}
    wrong = wrong_predictions(first + second)
    assert len(wrong) <= MAX_WRONG, "\n".join(wrong)
    assert sum(each.predicted.pool for each in second if each.predicted is not None) > 2000
    assert num_announced == 0
    assert "take part: r1, r2" in found


@pytest.mark.timeout(600)
def test_one_computes_and_the_other_answers(log_dir: Path) -> None:
    """Through the store alone, as without the other connector; without roles they are refused."""
    master = Master(log_dir)
    with all_up([master], timeout_s=MASTER_READY_S):
        producer, consumer = engines = [
            master.engine(role, log_dir, options=several(log_dir, role, role))
            for role in ("kv_producer", "kv_consumer")
        ]
        config = {
            "replicas": [
                {"url": producer.url, "name": "p", "role": "prefill"},
                {"url": consumer.url, "name": "d", "role": "decode"},
            ],
            "prefill": {"store_wait_s": 5.0},
        }
        with all_up(engines):
            with Router(engines, log_dir, options=master.options) as router:
                assert_halves_are_refused(router)
            with Router((), log_dir, config=config, options=master.options) as router:
                answers = [router.chat(chat(number)) for number in range(3)]
            alone = [producer.chat(chat(number)) for number in range(3)]

    assert [said(answer) for answer in answers] == [
        each["choices"][0]["message"]["content"] for each in alone
    ]
    for answer in answers:
        usage = answer.json()["usage"]
        num_reusable = (usage["prompt_tokens"] - 1) // 32 * 32
        assert answer.headers["x-warmroute-prefill"] == "p"
        assert usage["prompt_tokens_details"]["cached_tokens"] == num_reusable > 1000
        assert answer.headers["x-warmroute-cached"] == f"gpu=0;cpu=0;pool={num_reusable}"
