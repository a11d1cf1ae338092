"""Record what vLLM's own coordinator finds in random caches of models with several KV groups.

    .engines/venv/bin/python tests/engines/record_hit_lengths.py

No engine is started: the coordinator is asked directly, for groups of many kinds and sizes, with
EAGLE and without. Written to tests/fixtures/kv_groups: the groups, and for each cache the prompt's
length, the units at which each group holds a block that ends there (as bits), and the hit.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
)

FIXTURES = Path(__file__).parents[1] / "fixtures" / "kv_groups"
NUM_CASES = 40
MAX_TOKENS = 60

_ATTENTION: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}


def full(size: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=size, **_ATTENTION)


def window(size: int, tokens: int) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=size, sliding_window=tokens, **_ATTENTION)


def mamba(size: int) -> KVCacheSpec:
    return MambaSpec(
        block_size=size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )


LAYOUTS: dict[str, tuple[int | None, list[KVCacheSpec]]] = {  # the unit; None: what divides all
    "dense": (None, [full(2)]),
    "gemma": (None, [window(2, 7), window(2, 7), full(2)]),
    "window 1": (None, [full(2), window(2, 1)]),
    "two windows": (None, [full(2), window(2, 5), window(2, 12)]),
    "coarse full": (None, [window(2, 6), full(4)]),
    "coarse window": (None, [full(2), window(4, 9)]),
    "thirds": (None, [full(4), window(6, 9), window(2, 4)]),
    "mamba": (None, [full(4), mamba(4)]),
    "mamba small": (None, [mamba(2), full(4)]),
    "mamba fine": (2, [mamba(8), full(8)]),
    "mamba fine small full": (None, [mamba(8), full(2)]),
    "mamba and window": (None, [full(2), mamba(4), window(2, 5)]),
    "mamba and coarse window": (2, [full(4), mamba(8), window(4, 5)]),
    "windows alone": (None, [window(2, 5), window(2, 9)]),
    "one window": (None, [window(2, 6)]),
    "mamba alone": (None, [mamba(4)]),
    "four finer windows": (
        None,
        [full(8), window(4, 9), window(2, 5), window(2, 12), window(4, 5)],
    ),
    "four windows": (None, [window(12, 14), full(4), window(6, 9), window(2, 4), window(4, 11)]),
}


def draw(rng: random.Random, specs: list[KVCacheSpec], unit: int, num_units: int) -> list[int]:
    """Draw a cache: for each group the ends of the blocks it holds, as bits."""
    density, end_of_full = rng.choice((0.5, 0.8, 0.95, 1.0)), rng.randrange(num_units + 1)
    held = []
    for spec in specs:
        bits = 0
        for end in range(1, num_units + 1):
            if end % (spec.block_size // unit):  # the partial end of a prompt
                ok = rng.random() < 0.3 and not isinstance(spec, SlidingWindowSpec)
            elif isinstance(spec, FullAttentionSpec):
                ok = end <= end_of_full
            else:
                ok = rng.random() < density
            bits |= ok << (end - 1)
        held.append(bits)
    return held


def record(name: str, unit: int, specs: list[KVCacheSpec], eagle: bool) -> str:
    """Ask for the hits of one model; return its part of the fixture, a line for each cache."""
    rng = random.Random(f"{name} {eagle}")
    coordinator = get_kv_cache_coordinator(
        KVCacheConfig(
            num_blocks=4,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer {i}"], s) for i, s in enumerate(specs)],
        ),
        max_model_len=1024,
        max_in_flight_tokens=1024,
        use_eagle=eagle,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=math.lcm(*(spec.block_size for spec in specs)),
        hash_block_size=unit,
    )
    cases = []
    for _ in range(NUM_CASES):
        num_tokens = rng.randrange(1, MAX_TOKENS)
        hashes = [BlockHash(bytes([i]) * 32) for i in range(num_tokens // unit)]
        held = draw(rng, specs, unit, len(hashes))
        pool = coordinator.block_pool
        pool.cached_block_hash_to_block._cache = {
            make_block_hash_with_group_id(digest, group): pool.blocks[1]
            for group, bits in enumerate(held)
            for position, digest in enumerate(hashes)
            if bits >> position & 1
        }
        hit = coordinator.find_longest_cache_hit(hashes, num_tokens - 1)[1]
        cases.append(json.dumps([num_tokens, held, hit], separators=(",", ":")))
    groups = [
        [
            group,
            get_kv_cache_spec_kind(spec).value,
            spec.block_size,
            getattr(spec, "sliding_window", None),
        ]
        for group, spec in enumerate(specs)
    ]
    layout = {"name": name, "eagle": eagle, "unit": unit, "groups": groups}
    return '{"layout": ' + json.dumps(layout) + ', "cases": [\n' + ",\n".join(cases) + "\n]}"


def main() -> None:
    """Record every layout."""
    register_all_kvcache_specs(None)
    parts = [
        record(name, unit or math.gcd(*(s.block_size for s in specs)), specs, eagle)
        for name, (unit, specs) in LAYOUTS.items()
        for eagle in (False, True)
    ]
    path = FIXTURES / f"coordinator-{vllm.__version__}.json"
    path.write_text("[\n" + ",\n".join(parts) + "\n]\n")
    print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
