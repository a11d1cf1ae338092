"""vLLM's KV events on the wire: both shapes in, one shape out; and back, for the emulator.

A message is three ZMQ frames: topic, sequence (8 bytes, big-endian), msgpack payload
`[ts, [event, ...], dp_rank]`. Events are maps tagged `type` (vLLM >= 0.2x) or arrays with the tag
first (before). Source: vllm/distributed/kv_events.py, 0.32.0 (maps) and 0.17 (arrays).

Decoding is tolerant where engines differ (missing and surplus fields, unknown event types) and
strict where a guess would corrupt an index (no hashes, wrong types): those raise `ValueError`.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)

ExternalHash = int | bytes


class BlockStored(Struct, tag=True, omit_defaults=True, gc=False, kw_only=True):
    """Blocks that became reusable, in chain order behind `parent_block_hash`.

    `token_ids` is empty where the decoder was told to skip it. `medium` None means GPU (old
    engines). `group_idx` None means the only group.
    """

    block_hashes: list[ExternalHash]
    parent_block_hash: ExternalHash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(Struct, tag=True, omit_defaults=True, gc=False, kw_only=True):
    """Blocks that are gone from `medium`; one event per copy the engine had."""

    block_hashes: list[ExternalHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(Struct, tag=True, gc=False):
    """Everything is gone, from every medium of this rank."""


class UnknownEvent(Struct, gc=False):
    """An event of a type this release does not know; counted, never applied."""

    type: str


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent


class EventBatch(Struct, gc=False):
    """What one engine step changed."""

    ts: float
    events: list[KvEvent]
    dp_rank: int | None = None
