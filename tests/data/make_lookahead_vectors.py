"""Compute block digests that cover the next tokens with vLLM's own hasher: 0.33 or newer.

    PYTHON_WITH_VLLM tests/data/make_lookahead_vectors.py > tests/data/lookahead_vectors.json

To run it with another release's Python, see tests/engines/overlay.py. Each vector: algorithm, block
size, lookahead, token ids, items [identifier, start, end], LoRA, salt -> the digests, hex.
"""

import json
import os
import random
import sys
from itertools import product
from types import SimpleNamespace

import vllm
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher


def request(token_ids, items, lora, salt):
    """Make what the block hasher reads of a Request."""
    features = [
        SimpleNamespace(
            identifier=name.encode().decode(),  # decoded from a message: an object of its own
            mm_position=SimpleNamespace(offset=start, length=end - start),
        )
        for name, start, end in items
    ]
    return SimpleNamespace(
        all_token_ids=token_ids,
        num_tokens=len(token_ids),
        block_hashes=[],
        mm_features=features,
        lora_request=lora and SimpleNamespace(lora_name=lora[0], lora_path=lora[1]),
        cache_salt=salt,
        prompt_embeds=None,
    )


def items_of(rng):
    """Place some items behind one another."""
    items, end = [], 0
    for _ in range(rng.choice((0, 0, 1, 3))):
        start = end + rng.randrange(0, 12)
        end = start + rng.choice((1, 2, 5, 16, 37))
        items.append((rng.choice(("a" * 64, "b" * 64, "own")), start, end))
    return items, end


def vectors(rng):
    os.environ.pop("PYTHONHASHSEED", None)
    for algorithm, lookahead, _ in product(("sha256", "sha256_cbor"), (0, 1, 3), range(10)):
        hash_fn = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(hash_fn)
        block_size = rng.choice((1, 4, 16))
        items, end = items_of(rng)
        num_tokens = max(end, 2 * block_size) + rng.randrange(2 * block_size)
        token_ids = [rng.randrange(1 << 18) for _ in range(num_tokens)]
        lora = rng.choice((None, ("sql", "/adapters/sql")))
        salt = rng.choice((None, "t1"))
        hasher = get_request_block_hasher(block_size, hash_fn, lookahead)
        yield {
            "algorithm": algorithm,
            "block_size": block_size,
            "lookahead": lookahead,
            "token_ids": token_ids,
            "items": items,
            "lora": lora,
            "cache_salt": salt,
            "digests": [d.hex() for d in hasher(request(token_ids, items, lora, salt))],
        }


lines = ",\n".join(json.dumps(vector) for vector in vectors(random.Random(33)))
sys.stdout.write(f'{{"vllm": "{vllm.__version__}", "vectors": [\n{lines}\n]}}\n')
