"""Hash contracts: how an engine names the KV block of a token prefix, to the bit.

What must live here: the algorithms, the seeds, the extra keys. What must not: tokens' origin, who
holds a block, any I/O. router.kv_events.contract_search finds the contract that events obey.

The rule (source: vllm/v1/core/kv_cache_utils.py and vllm/utils/hashing.py, 0.32.0 and 0.33.0):

    digest(block) = H((digest(parent), (token, ...), extra_keys or None))
    digest(parent of the first block) = NONE_HASH = H(seed text)
    extra_keys: ("lora", name, path) in every block; ("mm", identifier, start of the item less start
    of the block) for each image or other item that the block overlaps, in their order;
    ("cache_salt", salt) in the first block

Engines with EAGLE, EAGLE3 or MTP and no KV connector hash ahead from 0.33.0 on
(`num_hash_lookahead_tokens` in vllm/config/vllm.py). With L such tokens, extra_keys is
(E, *the next L tokens), where E is the extra keys or None of the tokens [start, end + L). A prompt
of n tokens has (n - L) // block size blocks.

H is SHA-256 or XXH3-128 over pickle (highest protocol) or canonical CBOR. The seed text is
PYTHONHASHSEED if set, else `vllm-none-hash` for SHA-256 and 32 random bytes for XXH3.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Annotated, Any, Literal, NamedTuple, NewType, get_args

import cbor2
import numpy as np
from msgspec import Meta, Struct
from xxhash import xxh3_64_digest, xxh3_128_digest

BlockKey = NewType("BlockKey", int)
"""The name of one block in every index: the low `KEY_BITS` bits of the engine's digest."""

KEY_BITS = 60
"""Four of the 64 bits in events are dropped: CPython keeps an int below 2**60 in 32 bytes, and a
larger one in 48. That saves a quarter of the memory of an indexed block. Two of a billion distinct
blocks then share a key with probability 0.35: a wrong guess of one block, never a wrong answer.
"""

KEY_MASK = (1 << KEY_BITS) - 1

MAX_BLOCK_SIZE = 1 << 16
"""Tokens in a block at most; hybrid models have some thousands."""

MAX_LOOKAHEAD = 64
"""Tokens behind a block that its hash covers, at most: as many as drafts by multi-module MTP."""

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

    @property
    def kinds(self) -> tuple[str, ...]:
        """Name the kinds of prompts that it is of: of one adapter, salted."""
        adapter = () if self.lora is None else (adapter_kind(self.lora[0]),)
        return adapter if self.cache_salt is None else (*adapter, SALTED)


SALTED = "salted"


def adapter_kind(name: str) -> str:
    """Name the kind of prompts that are an adapter's."""
    return f"adapter {name}"


NO_EXTRA = ExtraKeys()


class MediaSpan(NamedTuple):
    """Where an image or another item is: tokens [start, end) from the first that is hashed.

    `start` may be negative: the item began in blocks before. `identifier` is its engine's name.
    """

    identifier: str
    start: int
    end: int


class HashContract(Struct, frozen=True, kw_only=True):
    """How one engine computes block digests.

    `seed` is the text behind NONE_HASH. `tagged` says whether extra keys enter the digest as
    ("cache_salt", salt) (vLLM >= 0.3x) or bare (before). The algorithm `warmroute` is our own
    XXH3-64 chain for engines whose digests cannot be computed (translation, approximation).
    `lookahead` is how many tokens behind a block its digest covers as well.
    """

    algorithm: Algorithm
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)]
    seed: Annotated[str, Meta(max_length=4_096)] = DEFAULT_SEED
    tagged: bool = True
    lookahead: Annotated[int, Meta(ge=0, le=MAX_LOOKAHEAD)] = 0

    def extend(
        self,
        parent: bytes | None,
        token_ids: Sequence[int],
        extra: ExtraKeys = NO_EXTRA,
        media: Sequence[MediaSpan] = (),
    ) -> tuple[list[BlockKey], bytes | None]:
        """Hash the full blocks of `token_ids`, chained behind `parent`.

        Args:
            parent: Digest of the block before; None: `token_ids` starts the prompt.
            token_ids: Token ids, shape (num_tokens,); a partial last block is left out, also one
                without all of its lookahead.
            extra: Salt and adapter of the prompt.
            media: Images and the like among the tokens, in their order.

        Returns:
            Keys, shape (`num_blocks(num_tokens)`,), and the last block's digest (`parent` if there
            was no full block).
        """
        digests = self.digests(parent, token_ids, extra, media)
        return (_keys(digests), digests[-1]) if digests else ([], parent)

    def num_blocks(self, num_tokens: int) -> int:
        """Count the blocks of a prompt that have a digest."""
        return max(0, num_tokens - self.lookahead) // self.block_size

    def digests(
        self,
        parent: bytes | None,
        token_ids: Sequence[int],
        extra: ExtraKeys = NO_EXTRA,
        media: Sequence[MediaSpan] = (),
    ) -> list[bytes]:
        """Hash as `extend` does, to the full digests: shape (`num_blocks(num_tokens)`,)."""
        # zip over one iterator cuts full blocks in C and drops the partial one.
        blocks = list(zip(*[iter(token_ids)] * self.block_size, strict=False))
        if not blocks:
            return []
        hash_block = _BLOCK_HASH[self.algorithm]
        if media or self.lookahead:
            del blocks[self.num_blocks(len(token_ids)) :]
            return self._digests_one_by_one(parent, blocks, token_ids, extra, media)
        first_extra, later_extra = self._extra_tuples(extra)
        if parent is None:
            digest = hash_block(none_hash(self.algorithm, self.seed), blocks[0], first_extra)
        else:
            digest = hash_block(parent, blocks[0], later_extra)
        digests = [digest]
        for block in blocks[1:]:
            digest = hash_block(digest, block, later_extra)
            digests.append(digest)
        return digests

    def _digests_one_by_one(
        self,
        parent: bytes | None,
        blocks: list[tuple[int, ...]],
        token_ids: Sequence[int],
        extra: ExtraKeys,
        media: Sequence[MediaSpan],
    ) -> list[bytes]:
        """Hash blocks that differ in their extra keys: by items that they overlap, or by tokens
        behind them.
        """
        hash_block = _BLOCK_HASH[self.algorithm]
        lora = self._extra_tuples(ExtraKeys(lora=extra.lora))[1] or ()
        digest = none_hash(self.algorithm, self.seed) if parent is None else parent
        digests: list[bytes] = []
        first = 0  # of the items that do not end before the block
        for position, block in enumerate(blocks):
            start = position * self.block_size
            end = start + self.block_size + self.lookahead
            while first < len(media) and media[first].end <= start:
                first += 1
            found: list[tuple[Any, ...]] = []
            for identifier, item_start, _ in media[first:]:
                if item_start >= end:
                    break
                # pickle writes the same object once, the engine has one for each item
                name = identifier.encode().decode()
                key = (name, item_start - start)
                found.append(("mm", *key) if self.tagged else key)
            salt = ()
            if parent is None and position == 0:
                salt = self._extra_tuples(ExtraKeys(cache_salt=extra.cache_salt))[0] or ()
            keys: _ExtraTuple = (*lora, *found, *salt) or None
            if self.lookahead:
                keys = (keys, *token_ids[end - self.lookahead : end])
            digest = hash_block(digest, block, keys)
            digests.append(digest)
        return digests

    def _extra_tuples(
        self, extra: ExtraKeys
    ) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None]:
        """Build the extra keys of the first and of every later block, in the engine's order."""
        if extra.lora is None and extra.cache_salt is None:
            return None, None
        lora: tuple[Any, ...] = ()
        salt: tuple[Any, ...] = ()
        if extra.lora is not None:
            name, path = extra.lora
            if path is name:  # pickle writes the same object once, the engine has two
                path = path.encode().decode()
            lora = (("lora", name, path),) if self.tagged else (name,)
        if extra.cache_salt is not None:
            salt = (("cache_salt", extra.cache_salt),) if self.tagged else (extra.cache_salt,)
        return (lora + salt) or None, lora or None


@lru_cache(maxsize=256)
def none_hash(algorithm: Algorithm, seed: str) -> bytes:
    """Compute the digest that stands for "no parent"."""
    text = cbor2.dumps(seed) if algorithm.endswith("_cbor") else pickle.dumps(seed, _PROTOCOL)
    return _HASH[algorithm](text)


# -- one block -----------------------------------------------------------------------------------

_PROTOCOL = 5  # pickle's highest in every Python that runs vLLM, named so that ours cannot differ

_ExtraTuple = tuple[Any, ...] | None


def _keys(digests: list[bytes]) -> list[BlockKey]:
    """Return the low bits of all digests at once: 0.03 us a block instead of 0.2 one by one."""
    words = np.frombuffer(b"".join(digests), dtype=">u8")
    step = len(digests[0]) // 8
    keys: list[BlockKey] = (words[step - 1 :: step] & np.uint64(KEY_MASK)).tolist()
    return keys


def _sha256(data: bytes) -> bytes:
    return sha256(data).digest()


def _sha256_pickle(parent: bytes, block: tuple[int, ...], extra: _ExtraTuple) -> bytes:
    return sha256(pickle.dumps((parent, block, extra), _PROTOCOL)).digest()


def _sha256_cbor(parent: bytes, block: tuple[int, ...], extra: _ExtraTuple) -> bytes:
    return sha256(cbor(parent, block, extra)).digest()


def _xxhash_pickle(parent: bytes, block: tuple[int, ...], extra: _ExtraTuple) -> bytes:
    return xxh3_128_digest(pickle.dumps((parent, block, extra), _PROTOCOL))


def _xxhash_cbor(parent: bytes, block: tuple[int, ...], extra: _ExtraTuple) -> bytes:
    return xxh3_128_digest(cbor(parent, block, extra))


def _warmroute(parent: bytes, block: tuple[int, ...], extra: _ExtraTuple) -> bytes:
    return xxh3_64_digest(pickle.dumps((parent, block, extra), _PROTOCOL))


def cbor(parent: bytes, block: tuple[int, ...], extra: _ExtraTuple) -> bytes:
    """Write cbor2.dumps((parent, block, extra), canonical=True): cbor2 takes 3 us more a block."""
    return b"".join(
        (
            b"\x83",
            _cbor_head(2, len(parent)),
            parent,
            _cbor_head(4, len(block)),
            *map(_CBOR_TOKENS.__getitem__, block),
            _CBOR_EXTRA[extra],
        )
    )


class CborTokens(dict[int, bytes]):
    """Token ids as canonical CBOR, remembered: as many as the vocabularies have."""

    limit = 1 << 20

    def __missing__(self, token: int) -> bytes:
        encoded = cbor2.dumps(token)
        if len(self) < self.limit:
            self[token] = encoded
        return encoded


_CBOR_TOKENS = CborTokens()


@lru_cache(maxsize=256)
def _cbor_head(major: int, length: int) -> bytes:
    """Encode a CBOR head (RFC 8949, section 3): major type and argument, shortest form."""
    head = cbor2.dumps(length)
    return bytes([head[0] | major << 5]) + head[1:]


class _CborExtra(dict[_ExtraTuple, bytes]):
    """Extra keys as canonical CBOR; short ones are remembered, a client's may be megabytes.

    Those with tokens in them (lookahead) differ with every block, and are not.
    """

    limit = 1024
    max_bytes = 1024

    def __missing__(self, extra: _ExtraTuple) -> bytes:
        encoded = cbor2.dumps(extra, canonical=True)
        has_tokens = extra is not None and isinstance(extra[-1], int)
        if len(encoded) <= self.max_bytes and not has_tokens:
            if len(self) >= self.limit:
                self.clear()
            self[extra] = encoded
        return encoded


_CBOR_EXTRA = _CborExtra()


_HASH: dict[Algorithm, Callable[[bytes], bytes]] = {
    "sha256": _sha256,
    "sha256_cbor": _sha256,
    "xxhash": xxh3_128_digest,
    "xxhash_cbor": xxh3_128_digest,
    "warmroute": xxh3_64_digest,
}

_BLOCK_HASH: dict[Algorithm, Callable[[bytes, tuple[int, ...], _ExtraTuple], bytes]] = {
    "sha256": _sha256_pickle,
    "sha256_cbor": _sha256_cbor,
    "xxhash": _xxhash_pickle,
    "xxhash_cbor": _xxhash_cbor,
    "warmroute": _warmroute,
}
