"""Two data-parallel ranks behind one real engine's port, and an adapter loaded while it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.engines.harness import Engine, Router, all_up, wait_until
from tests.ports import ports_in_a_row

NUM_BLOCKS = 600
LORA_OPTIONS = ("--enable-lora", "--max-lora-rank", "8", "--api-server-count", "1")
TARGETS = {"q_proj": 128, "v_proj": 64}  # output sizes of the tiny model's layers


@pytest.fixture(scope="module")
def engine(log_dir: Path) -> Iterator[Engine]:
    """Start an engine with two ranks that loads adapters on request."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ports_in_a_row(2)}",  # rank 1's is the next one
        "replay_endpoint": f"tcp://*:{ports_in_a_row(2)}",
    }
    ranks = ("--data-parallel-size", "2", "--kv-events-config", json.dumps(events))
    engine = Engine(
        "ranks",
        log_dir,
        num_blocks=NUM_BLOCKS,
        options=(*ranks, *LORA_OPTIONS),
        environ={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
    )
    with all_up([engine]):
        yield engine


@pytest.fixture(scope="module")
def router(engine: Engine, log_dir: Path) -> Iterator[Router]:
    with Router([engine], log_dir) as running:
        yield running


def ask(router: Router, model: str, first_word: str) -> tuple[str, int]:
    """Send a prompt; return where it went and how much was cached, predicted and reported alike."""
    stored = router.metric("warmroute_kv_events_total")
    text = " ".join([first_word, *(f"word{i}" for i in range(200))])
    reply = router.chat(
        {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    )
    reply.raise_for_status()
    cached = int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert reply.headers["x-warmroute-cached"].startswith(f"gpu={cached};")
    if not cached:
        wait_until(lambda: router.metric("warmroute_kv_events_total") > stored, 60, "events")
    return reply.headers["x-warmroute-replica"], cached


def adapter(directory: Path, seed: int) -> str:
    """Write a small random adapter; return its path."""
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(TARGETS)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(2):
        for target, size in TARGETS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            for part, shape in (("lora_A", (8, 64)), ("lora_B", (size, 8))):
                weights = random.standard_normal(shape).astype(np.float32)
                tensors[f"{name}.{part}.weight"] = weights
    save_file(tensors, directory / "adapter_model.safetensors")
    return str(directory)


def test_each_rank_has_a_cache_of_its_own(engine: Engine, router: Router) -> None:
    """Predicted = reported at both; a prompt comes back to the rank that has it."""
    listed = httpx.get(f"{router.admin_url}/admin/replicas", timeout=30).json()["replicas"]
    firsts = [ask(router, "tiny", f"first{number}") for number in range(12)]
    seconds = [ask(router, "tiny", f"first{number}") for number in range(12)]

    assert {where for where, _ in firsts} == {"r1#0", "r1#1"}
    assert [where for where, _ in seconds] == [where for where, _ in firsts]
    assert all(cached >= 32 * 10 for _, cached in seconds)
    assert {cached for _, cached in firsts} == {0}
    assert len(listed[0]["ranks"]) == 2
    metrics = httpx.get(f"{engine.url}/metrics", timeout=30).text
    assert f'num_gpu_blocks="{2 * NUM_BLOCKS}"' in metrics  # summed; the router divides


def test_a_reloaded_adapter_has_blocks_of_its_own(router: Router, tmp_path: Path) -> None:
    """Loaded without a restart; predicted = reported before and after a reload."""
    first, second = (adapter(tmp_path / str(seed), seed) for seed in (1, 2))

    def load(**fields: object) -> None:
        order = {"route": "load_lora_adapter", "params": {"lora_name": "sql", **fields}}
        answer = httpx.post(f"{router.admin_url}/admin/control", json=order, timeout=60).json()
        assert [each["error"] for each in answer["replicas"]] == [None], answer

    assert router.chat({"model": "sql", "messages": []}).status_code == 404
    assert ask(router, "tiny", "adapted")[1] == 0
    load(lora_path=first)
    assert ask(router, "sql", "adapted")[1] == 0
    assert ask(router, "sql", "adapted")[1] >= 32 * 10
    load(lora_path=second, load_inplace=True)
    assert ask(router, "sql", "adapted")[1] == 0
    assert ask(router, "sql", "adapted")[1] >= 32 * 10
