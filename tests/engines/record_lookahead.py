"""Record events and hits of vLLM's own cache manager where hashes cover the next tokens: 0.33 on.

    PYTHONPATH=OVERLAY:. VLLM_TARGET_DEVICE=cpu .engines/venv/bin/python \
        -m tests.engines.record_lookahead

No engine starts: requests go through `KVCacheManager` as the scheduler hands them over, one by one.
Written to tests/fixtures/lookahead: each request, the tokens that the manager found cached, and the
messages as the publisher packs them. OVERLAY: see tests/engines/overlay.py.
"""

from __future__ import annotations

import base64
import json
import random
import zlib
from pathlib import Path
from typing import Any

import msgspec
import torch
import vllm
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from tests.engines.hybrid_models import prompt_of

FIXTURES = Path(__file__).parents[1] / "fixtures" / "lookahead"
BLOCK_SIZE = 16
NUM_BLOCKS = 90
NUM_REPLY_TOKENS = 20
_ATTENTION: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}

CASES: dict[str, dict[str, Any]] = {
    "plain": {"lookahead": 0},
    "one": {"lookahead": 1},
    "three": {"lookahead": 3},
    "cbor": {"lookahead": 1, "algorithm": "sha256_cbor"},
    "windows": {"lookahead": 1, "window": 40},
    "windows-three": {"lookahead": 3, "window": 40},
    "random-seed": {"lookahead": 1, "algorithm": "xxhash"},
}


def requests() -> list[dict[str, Any]]:
    """Draw requests that part on block boundaries, just before and just behind them."""
    rng = random.Random("lookahead")
    table: list[dict[str, Any]] = []
    for _ in range(130):
        root = rng.choice("abcdef")
        parts = [(root, rng.choice((15, 16, 17, 18, 32, 33, 48, 64, 65, 67, 96)))]
        if rng.random() < 0.7:
            parts.append((root + rng.choice("xyz"), rng.choice((1, 2, 3, 15, 16, 17, 40))))
        table.append({"parts": parts})
        if rng.random() < 0.15:
            table[-1]["salt"] = rng.choice(("t1", "t2"))
        if rng.random() < 0.2:
            table.append({"answer": len(table) - 1, "parts": [(f"reply {len(table)}", 30)]})
            table[-2]["answered"] = rng.choices(range(300, 8000), k=NUM_REPLY_TOKENS)
            table[-1].update({k: v for k, v in table[-2].items() if k == "salt"})
    return table


def manager_of(case: dict[str, Any]) -> KVCacheManager:
    specs: list[Any] = [FullAttentionSpec(block_size=BLOCK_SIZE, **_ATTENTION)]
    if "window" in case:
        window = {"block_size": BLOCK_SIZE, "sliding_window": case["window"], **_ATTENTION}
        specs.insert(0, SlidingWindowSpec(**window))
    return KVCacheManager(
        KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer {i}"], s) for i, s in enumerate(specs)],
        ),
        max_model_len=1024,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=True,
        num_hash_lookahead_tokens=case["lookahead"],
        num_prefill_lookahead=case["lookahead"],
        enable_kv_cache_events=True,
    )


def serve(manager: KVCacheManager, request: Request, answered: list[int]) -> int:
    """Compute a request as the scheduler has it done; return its cached tokens."""
    blocks, num_cached, _ = manager.get_computed_blocks(request)
    num_new = request.num_tokens - num_cached
    assert manager.allocate_slots(request, num_new, num_cached, blocks) is not None
    request.num_computed_tokens = request.num_tokens
    for token in answered:
        request.append_output_token_ids(token)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    manager.free(request)
    return int(num_cached)


def record(name: str, case: dict[str, Any]) -> None:
    """Send the requests through one manager, and write its fixture."""
    hash_fn = get_hash_fn_by_name(case.get("algorithm", "sha256"))
    kv_cache_utils.init_none_hash(hash_fn)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, hash_fn, case["lookahead"])
    manager, encode = manager_of(case), msgspec.msgpack.Encoder().encode
    table, messages = requests(), []
    for number, row in enumerate(table):
        request = Request(
            request_id=str(number),
            prompt_token_ids=prompt_of(row, table),
            sampling_params=SamplingParams(max_tokens=NUM_REPLY_TOKENS + 1),
            pooling_params=None,
            cache_salt=row.get("salt"),
            block_hasher=hasher,
        )
        row["cached"] = serve(manager, request, row.get("answered", []))
        events = manager.take_events()
        row["messages"] = int(bool(events))
        if events:
            messages.append(encode(KVEventBatch(float(number), events, 0)).hex())
    path = FIXTURES / f"vllm-{vllm.__version__}-{name}.json"
    lines = ",\n".join("  " + json.dumps(row) for row in table)
    head = json.dumps({"block_size": BLOCK_SIZE, **case})[1:-1]
    packed = base64.b64encode(zlib.compress(json.dumps(messages).encode(), 9)).decode()
    path.write_text(f'{{{head},\n "requests": [\n{lines}\n ],\n "messages": "{packed}"}}\n')
    hits = sum(row["cached"] > 0 for row in table)
    print(path.name, len(table), "requests,", hits, "hits,", path.stat().st_size, "bytes")


if __name__ == "__main__":
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for case_name, chosen in CASES.items():
        record(case_name, chosen)
