"""A real kv_producer computes prompts, a real kv_consumer answers them, through a real pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engines.halves import assert_halves_are_refused, chat, said
from tests.engines.harness import MASTER_READY_S, Engine, Master, Router, all_up


@pytest.fixture(scope="module")
def master(log_dir: Path) -> Iterator[Master]:
    running = Master(log_dir)
    with all_up([running], timeout_s=MASTER_READY_S):
        yield running


@pytest.fixture(scope="module")
def halves(master: Master, log_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    """A producer and a consumer."""
    engines = (
        master.engine("producer", log_dir, kv_role="kv_producer"),
        master.engine("consumer", log_dir, kv_role="kv_consumer"),
    )
    with all_up(engines):
        yield engines


def test_halves_without_roles_are_refused(
    master: Master, halves: tuple[Engine, Engine], log_dir: Path
) -> None:
    """The producer shows that it is one."""
    with Router(halves, log_dir, options=master.options) as router:
        assert_halves_are_refused(router)


def test_one_computes_and_the_other_answers(
    master: Master, halves: tuple[Engine, Engine], log_dir: Path
) -> None:
    """As one engine alone would; also when the producer is killed."""
    producer, consumer = halves
    config = {
        "replicas": [
            {"url": producer.url, "name": "p", "role": "prefill"},
            {"url": consumer.url, "name": "d", "role": "decode"},
        ],
        "prefill": {"store_wait_s": 5.0},
    }
    with Router((), log_dir, config=config, options=master.options) as router:
        listed = httpx.get(f"{router.admin_url}/admin/replicas").json()["replicas"]
        answers = [router.chat(chat(number)) for number in range(3)]
        alone = [
            httpx.post(f"{producer.url}/v1/chat/completions", json=chat(number), timeout=120)
            for number in range(3)
        ]
        producer.kill()
        later = router.chat(chat(4))

        assert [said(answer) for answer in answers] == [said(answer) for answer in alone]
        assert {answer.headers["x-warmroute-replica"] for answer in answers} == {"d"}
        assert {answer.headers["x-warmroute-prefill"] for answer in answers} == {"p"}
        for answer in answers:
            usage = answer.json()["usage"]
            num_reusable = (usage["prompt_tokens"] - 1) // 32 * 32
            assert usage["prompt_tokens_details"]["cached_tokens"] == num_reusable > 1000
            assert answer.headers["x-warmroute-cached"] == f"gpu=0;cpu=0;pool={num_reusable}"
        assert [each["replica"]["seems"] for each in listed] == ["prefill", None]
        assert said(later)
        assert later.headers["x-warmroute-prefill"] == "local"
