"""Hash contracts: how an engine names the KV block of a token prefix, to the bit.

What must live here: the algorithms, the seeds, the extra keys, and the search for the contract
that a replica's own events obey. What must not: tokens' origin, who holds a block, any I/O.

The rule (source: vllm/v1/core/kv_cache_utils.py and vllm/utils/hashing.py, 0.32.0):

    digest(block) = H((digest(parent), (token, ...), extra_keys or None))
    digest(parent of the first block) = NONE_HASH = H(seed text)

H is SHA-256 or XXH3-128 over pickle (highest protocol) or canonical CBOR. The seed text is
PYTHONHASHSEED if set, else `vllm-none-hash` for SHA-256 and 32 random bytes for XXH3.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NewType, get_args

import cbor2
import xxhash
from msgspec import Struct

BlockKey = NewType("BlockKey", int)
"""The name of one block in every index: the low `KEY_BITS` bits of the engine's digest."""

KEY_BITS = 60
"""Events carry 64 bits; four are given up because CPython keeps an int below 2**60 in 32 bytes
and a larger one in 48, a quarter of what an indexed block costs. Two of a billion distinct
blocks then share a key with probability 0.35: a wrong guess of one block, never a wrong answer.
"""

KEY_MASK = (1 << KEY_BITS) - 1

Algorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "warmroute"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

DEFAULT_SEED = "vllm-none-hash"  # Source: DEFAULT_NONE_HASH_SEED, vLLM 0.32.0


def block_key(external: int | bytes) -> BlockKey:
    """Name a block by its hash as events carry it: 64-bit int, or the digest's raw bytes."""
    if isinstance(external, bytes):
        external = int.from_bytes(external[-8:], "big")
    return BlockKey(external & KEY_MASK)


class ExtraKeys(Struct, frozen=True, gc=False):
    """What besides tokens goes into a digest: part of the prompt's identity.

    lora: adapter name and path (as `/v1/models` shows them: id and root), on every block.
    cache_salt: on the first block only. Empty is None.
    """

    lora: tuple[str, str] | None = None
    cache_salt: str | None = None


NO_EXTRA = ExtraKeys()


class HashContract(Struct, frozen=True, kw_only=True):
    """How one engine computes block digests.

    `seed` is the text behind NONE_HASH. `tagged` says whether extra keys enter the digest as
    ("cache_salt", salt) (vLLM >= 0.3x) or bare (before). The algorithm `warmroute` is our own
    XXH3-64 chain for engines whose digests cannot be computed (translation, approximation).
    """

    algorithm: Algorithm
    block_size: int
    seed: str = DEFAULT_SEED
    tagged: bool = True

    def extend(
        self,
        parent: bytes | None,
        token_ids: Sequence[int],
        extra: ExtraKeys = NO_EXTRA,
    ) -> tuple[list[BlockKey], bytes | None]:
        """Hash the full blocks of `token_ids`, chained behind `parent`.

        Args:
            parent: Digest of the block before; None: `token_ids` starts the prompt.
            token_ids: Token ids, shape (num_tokens,); a partial last block is left out.
            extra: Salt and adapter of the prompt.

        Returns:
            Keys, shape (num_tokens // block_size,), and the last block's digest (`parent`
            if there was no full block).
        """
        size = self.block_size
        num_blocks = len(token_ids) // size
        if num_blocks == 0:
            return [], parent
        digest_of = _DIGEST[self.algorithm]
        first_extra, later_extra = self._extra_tuples(extra)
        if parent is None:
            digest, block_extra = none_hash(self.algorithm, self.seed), first_extra
        else:
            digest, block_extra = parent, later_extra
        keys: list[BlockKey] = []
        tokens = iter(token_ids)
        from_bytes = int.from_bytes
        for _ in range(num_blocks):
            digest = digest_of((digest, tuple(islice(tokens, size)), block_extra))
            keys.append(from_bytes(digest[-8:], "big") & KEY_MASK)  # type: ignore[arg-type]
            block_extra = later_extra
        return keys, digest

    def _extra_tuples(
        self, extra: ExtraKeys
    ) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
        """Build the extra keys of the first and of every later block, in the engine's order."""
        if extra.lora is None and extra.cache_salt is None:
            return None, None
        lora: tuple[Any, ...] = ()
        salt: tuple[Any, ...] = ()
        if extra.lora is not None:
            lora = (("lora", *extra.lora),) if self.tagged else (extra.lora[0],)
        if extra.cache_salt is not None:
            salt = (("cache_salt", extra.cache_salt),) if self.tagged else (extra.cache_salt,)
        return (lora + salt) or None, lora or None


@lru_cache(maxsize=256)
def none_hash(algorithm: Algorithm, seed: str) -> bytes:
    """Compute the digest that stands for "no parent"."""
    return _DIGEST[algorithm](seed)


class StoredView(Struct, frozen=True, gc=False):
    """What one BlockStored event says, for the search: hashes as published, tokens of them all."""

    block_hashes: Sequence[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: Sequence[int]
    block_size: int
    lora_name: str | None = None
    extra_keys: Sequence[Sequence[Any] | None] | None = None


def find_contract(
    stored: StoredView,
    *,
    seeds: Iterable[str] = (),
    lora_paths: dict[str, str] | None = None,
) -> HashContract | None:
    """Find the contract that yields this event's first hash, None if none does.

    Only an event whose parent is None can tell (a later digest needs its parent's full digest,
    events carry 64 bits of it). `seeds` are tried before the defaults; `lora_paths` maps adapter
    name to path for events that carry an adapter.
    """
    if stored.parent_block_hash is not None or not stored.block_hashes or stored.block_size <= 0:
        return None
    first_block = stored.token_ids[: stored.block_size]
    if len(first_block) < stored.block_size:
        return None
    wanted = block_key(stored.block_hashes[0])
    extra = _extra_of(stored, lora_paths or {})
    if extra is None:
        return None
    for algorithm in ALGORITHMS:
        if algorithm == "warmroute":
            continue
        for seed in dict.fromkeys((*seeds, DEFAULT_SEED, "0")):
            for tagged in (True, False):
                contract = HashContract(
                    algorithm=algorithm, block_size=stored.block_size, seed=seed, tagged=tagged
                )
                keys, _ = contract.extend(None, first_block, extra)
                if keys[0] == wanted:
                    return contract
    return None


def _extra_of(stored: StoredView, lora_paths: dict[str, str]) -> ExtraKeys | None:
    """Rebuild the first block's extra keys from the untagged ones; None: cannot be known."""
    bare = list((stored.extra_keys or [None])[0] or [])
    lora: tuple[str, str] | None = None
    if stored.lora_name is not None:
        lora = (stored.lora_name, lora_paths.get(stored.lora_name, ""))
        if bare and bare[0] == stored.lora_name:
            bare = bare[1:]
    if len(bare) > 1 or (bare and not isinstance(bare[0], str)):
        return None  # multimodal items or prompt embeddings: wait for a plain prompt
    return ExtraKeys(lora=lora, cache_salt=bare[0] if bare else None)


def _sha256(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _sha256_cbor(value: Any) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def _xxhash(value: Any) -> bytes:
    return xxhash.xxh3_128_digest(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def _xxhash_cbor(value: Any) -> bytes:
    return xxhash.xxh3_128_digest(cbor2.dumps(value, canonical=True))


def _warmroute(value: Any) -> bytes:
    return xxhash.xxh3_64_digest(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


_DIGEST: dict[str, Callable[[Any], bytes]] = {
    "sha256": _sha256,
    "sha256_cbor": _sha256_cbor,
    "xxhash": _xxhash,
    "xxhash_cbor": _xxhash_cbor,
    "warmroute": _warmroute,
}
