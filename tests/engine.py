"""A played engine: a block cache that writes vLLM's events, for conversations with a stream."""

from __future__ import annotations

from itertools import count

from router.base.contracts import NO_EXTRA, ExtraKeys, HashContract
from router.kv_events.wire import BlockRemoved, BlockStored, EventBatch, KvEvent, WireShape, encode

BLOCK_SIZE = 4
CONTRACT = HashContract(algorithm="sha256", block_size=BLOCK_SIZE)
_times = count(1)


def prompt(number: int, num_blocks: int = 3) -> list[int]:
    """Tokens of a prompt that shares nothing with another number's."""
    return [number * 1000 + position for position in range(num_blocks * BLOCK_SIZE)]


def hashes(
    tokens: list[int], contract: HashContract = CONTRACT, extra: ExtraKeys = NO_EXTRA
) -> list[int]:
    """The block hashes an engine publishes for a prompt: 64 bits of each digest."""
    digests = contract.digests(None, tokens, extra)
    return [int.from_bytes(digest[-8:], "big") for digest in digests]


def stored(
    tokens: list[int],
    *,
    contract: HashContract = CONTRACT,
    extra: ExtraKeys = NO_EXTRA,
    skip: int = 0,
    medium: str | None = "GPU",
    group: int | None = 0,
    kind: str | None = "full_attention",
) -> BlockStored:
    """The event that an engine writes after computing a prompt behind `skip` cached blocks."""
    names = hashes(tokens, contract, extra)
    lora = extra.lora[0] if extra.lora else None
    first = [key for key in (lora, extra.cache_salt) if key is not None]
    later = [lora] if lora else None
    keys = [first or None, *[later] * (len(names) - 1)]
    return BlockStored(
        block_hashes=list(names[skip:]),
        parent_block_hash=names[skip - 1] if skip else None,
        token_ids=tokens[skip * contract.block_size : len(names) * contract.block_size],
        block_size=contract.block_size,
        medium=medium,
        lora_name=lora,
        extra_keys=[list(key) if key else None for key in keys[skip:]],
        group_idx=group,
        kv_cache_spec_kind=kind,
    )


def removed(names: list[int], *, medium: str | None = "GPU", group: int | None = 0) -> BlockRemoved:
    """The event of an eviction."""
    return BlockRemoved(block_hashes=list(names), medium=medium, group_idx=group)


def batch(*events: KvEvent, shape: WireShape = "map") -> bytes:
    """One message's payload, with a time stamp of its own."""
    return encode(EventBatch(ts=float(next(_times)), events=list(events), dp_rank=0), shape=shape)
