"""Compute block digests with vLLM's own functions: run by an interpreter that has vLLM.

    PYTHON_WITH_VLLM tests/data/make_hash_vectors.py > tests/data/hash_vectors.json

Each vector: algorithm, seed (the text behind NONE_HASH), tagged, block size, token ids, LoRA,
salt -> the digests of the prompt's full blocks, hex. Untagged vectors are what releases before
tagged extra keys hashed: the same functions, fed with the bare values.
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
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

LORAS = [None, ("sql", "/adapters/sql")]
SALTS = [None, "t1", "ünïcode"]


def request(lora, salt):
    """Make what generate_block_hash_extra_keys reads of a Request."""
    lora_request = lora and SimpleNamespace(lora_name=lora[0], lora_path=lora[1])
    return SimpleNamespace(
        mm_features=[], lora_request=lora_request, cache_salt=salt, prompt_embeds=None
    )


def digests(hash_fn, token_ids, block_size, lora, salt, tagged):
    """Chain the prompt's blocks exactly as the engine's block hasher does."""
    parent, result = None, []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        extra, _ = generate_block_hash_extra_keys(request(lora, salt), start, end, 0)
        if extra and not tagged:
            extra = tuple(key[1] for key in extra)
        parent = hash_block_tokens(hash_fn, parent, token_ids[start:end], extra)
        result.append(parent.hex())
    return result


def vectors():
    rng = random.Random(7)
    for algorithm, seed in product(
        ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"), (None, "0", "1234")
    ):
        os.environ.pop("PYTHONHASHSEED", None)
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed
        elif algorithm.startswith("xxhash"):
            continue  # random bytes: no contract, by intention
        hash_fn = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(hash_fn)
        for lora, salt, tagged in product(LORAS, SALTS, (True, False)):
            block_size = rng.choice((1, 2, 4, 16, 32))
            token_ids = [
                rng.choice((rng.randrange(300), rng.randrange(1 << 18))) for _ in range(70)
            ]
            token_ids = token_ids[: 2 * block_size + rng.randrange(block_size)]
            yield {
                "algorithm": algorithm,
                "seed": kv_cache_utils.get_none_hash_seed(),
                "tagged": tagged,
                "block_size": block_size,
                "token_ids": token_ids,
                "lora": lora,
                "cache_salt": salt,
                "digests": digests(hash_fn, token_ids, block_size, lora, salt, tagged),
            }


lines = ",\n".join(json.dumps(vector) for vector in vectors())
sys.stdout.write(f'{{"vllm": "{vllm.__version__}", "vectors": [\n{lines}\n]}}\n')
