"""vLLM's KV events on the wire: both shapes in, one shape out; and back, for the emulator.

A message is three ZMQ frames: topic, sequence (8 bytes, big-endian), msgpack payload
`[ts, [event, ...], dp_rank]`. Events are maps tagged `type`, or arrays with the tag first (older
releases). Source: vllm/distributed/kv_events.py, 0.33.0 (maps) and 0.17 (arrays).

Decoding is tolerant where engines differ (missing and surplus fields, unknown event types) and
strict where a guess would corrupt an index (no hashes, wrong types): those raise `ValueError`.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct, field
from msgspec.msgpack import Decoder, Encoder

from router.base.decoding import UNDECODABLE

MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024
"""The largest message: some 1.5 million new tokens of five bytes; real steps have some 10,000."""

MAX_BLOCKS: Final = 1 << 17
"""Blocks of one message, stored and removed: it is applied in one piece, in 0.1 s at most."""

MAX_EVENTS: Final = 1 << 16

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)

ExternalHash = int | bytes


def _null() -> None:
    """Default of a field that is nullable but always written (a factory is never omitted)."""


def _no_tokens() -> list[int]:
    return []


class BlockStored(Struct, tag=True, omit_defaults=True, gc=False, kw_only=True):
    """Blocks that became reusable, in chain order behind `parent_block_hash`.

    `token_ids` is empty where the decoder skips it, `lookahead_token_ids` is None then.
    `block_size` 0: not given (the offloading connector's placeholders). `medium` None means GPU
    (old engines). `group_idx` None means the only group. As in vLLM the first seven are always
    written, the others if set.
    """

    block_hashes: list[ExternalHash]
    parent_block_hash: ExternalHash | None = field(default_factory=_null)
    token_ids: list[int] = field(default_factory=_no_tokens)
    block_size: int = field(default_factory=int)
    lora_id: int | None = field(default_factory=_null)
    medium: str | None = field(default_factory=_null)
    lora_name: str | None = field(default_factory=_null)
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    lookahead_token_ids: list[list[int]] | None = None  # tokens behind each block (0.33)


class BlockRemoved(Struct, tag=True, omit_defaults=True, gc=False, kw_only=True):
    """Blocks that are gone from `medium`; one event per copy the engine had.

    `remaining_copy_counts`: copies that it still has of each (vllm-project/vllm#48933, open in
    September 2026); None: it does not say.
    """

    block_hashes: list[ExternalHash]
    medium: str | None = field(default_factory=_null)
    group_idx: int | None = None
    remaining_copy_counts: list[int | None] | None = None


class AllBlocksCleared(Struct, tag=True, gc=False):
    """Everything is gone, from every medium of this rank."""


class UnknownEvent(Struct, tag=True, gc=False):
    """An event of a type this release does not know; counted, never applied."""

    type: str = field(name="unknown_type")  # `type` on the wire is the tag


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent
WireShape = Literal["map", "array"]


class EventBatch(Struct, array_like=True, gc=False):
    """The changes of one engine step."""

    ts: float
    events: list[KvEvent]
    dp_rank: int | None = None


def decode(payload: bytes, *, with_tokens: bool) -> EventBatch:
    """Decode one message's payload, in either shape.

    Args:
        payload: The third frame, msgpack.
        with_tokens: False leaves every `token_ids` empty; they are skipped without being built.

    Raises:
        ValueError: Not an event batch, an event of a known type without what it needs, too deep
            or too large.
    """
    try:
        batch = _decode_any(payload, with_tokens)
    except UNDECODABLE as exc:
        raise ValueError(f"not a KV event batch: {exc}") from exc
    if len(payload) > MAX_EVENTS:  # a block and an event take a byte or more: smaller ones fit
        _check_sizes(payload, batch)
    return batch


def encode(batch: EventBatch, *, shape: WireShape = "map") -> bytes:
    """Encode a batch as vLLM does: `map` as 0.32, `array` as 0.17."""
    if shape == "map":
        return _ENCODER.encode(batch)
    events = [_as_array(event) for event in batch.events]
    return _ENCODER.encode([batch.ts, events, batch.dp_rank])


def _decode_any(payload: bytes, with_tokens: bool) -> EventBatch:
    try:
        return (_MAPS if with_tokens else _MAPS_BARE).decode(payload)
    except msgspec.ValidationError:
        return _decode_each(payload, with_tokens)


def _check_sizes(payload: bytes, batch: EventBatch) -> None:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"{len(payload)} bytes, the limit is {MAX_PAYLOAD_BYTES}")
    num_blocks = sum(
        len(event.block_hashes)
        for event in batch.events
        if isinstance(event, BlockStored | BlockRemoved)
    )
    if num_blocks > MAX_BLOCKS or len(batch.events) > MAX_EVENTS:
        raise ValueError(f"{num_blocks} blocks in {len(batch.events)} events are too many")


# -- map shape: the fast path ------------------------------------------------------------------


class _BareStored(BlockStored, tag="BlockStored", omit_defaults=True, gc=False, kw_only=True):
    """BlockStored whose tokens are never on the wire, so that C skips the real ones."""

    token_ids: list[int] = field(default_factory=_no_tokens, name="-")
    lookahead_token_ids: list[list[int]] | None = field(default=None, name="--")


class _BareBatch(EventBatch, array_like=True, gc=False):
    events: list[_BareStored | BlockRemoved | AllBlocksCleared | UnknownEvent]  # type: ignore[assignment]


_MAPS = Decoder(EventBatch)
_MAPS_BARE = Decoder(_BareBatch)
_ENCODER = Encoder()


# -- array shape, mixtures and unknown events --------------------------------------------------


class _ArrayStored(Struct, tag="BlockStored", array_like=True, gc=False):
    """Fields in wire order; releases before 0.17 lack some of the last ones."""

    block_hashes: list[ExternalHash]
    parent_block_hash: ExternalHash | None = None
    token_ids: Raw = Raw(b"\x90")
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None


class _ArrayRemoved(Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: list[ExternalHash]
    medium: str | None = None


class _ArrayCleared(Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _RawBatch(Struct, array_like=True, gc=False):
    ts: float
    events: list[Raw]
    dp_rank: int | None = None


class _Tag(Struct, gc=False):
    type: str


class _ArrayTag(Struct, array_like=True, gc=False):
    type: str


_RAW = Decoder(_RawBatch)
_MAP = Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_MAP_BARE = Decoder(_BareStored | BlockRemoved | AllBlocksCleared)
_ARRAY = Decoder(_ArrayStored | _ArrayRemoved | _ArrayCleared)
_TOKENS = Decoder(list[int])
_MAP_TAG: Decoder[_Tag] = Decoder(_Tag)
_ARRAY_TAG: Decoder[_ArrayTag] = Decoder(_ArrayTag)
_KNOWN = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def _decode_each(payload: bytes, with_tokens: bool) -> EventBatch:
    batch = _RAW.decode(payload)
    if len(batch.events) > MAX_EVENTS:
        raise ValueError(f"{len(batch.events)} events are too many")
    events = [_decode_event(raw, with_tokens) for raw in batch.events]
    return EventBatch(ts=batch.ts, events=events, dp_rank=batch.dp_rank)


def _decode_event(raw: Raw, with_tokens: bool) -> KvEvent:
    try:
        if not _is_array(raw):
            event: KvEvent = (_MAP if with_tokens else _MAP_BARE).decode(raw)
            return event
        return _from_array(_ARRAY.decode(raw), with_tokens)
    except msgspec.ValidationError:
        tag = _tag(raw)
        if tag in _KNOWN:
            raise
        return UnknownEvent(tag)


def _is_array(raw: Raw) -> bool:
    first = bytes(memoryview(raw)[:1])[0]
    return first & 0xF0 == 0x90 or first in (0xDC, 0xDD)


def _tag(raw: Raw) -> str:
    return (_ARRAY_TAG if _is_array(raw) else _MAP_TAG).decode(raw).type


def _from_array(event: _ArrayStored | _ArrayRemoved | _ArrayCleared, with_tokens: bool) -> KvEvent:
    if isinstance(event, _ArrayCleared):
        return AllBlocksCleared()
    if isinstance(event, _ArrayRemoved):
        return BlockRemoved(block_hashes=event.block_hashes, medium=event.medium)
    return BlockStored(
        block_hashes=event.block_hashes,
        parent_block_hash=event.parent_block_hash,
        token_ids=_TOKENS.decode(event.token_ids) if with_tokens else [],
        block_size=event.block_size,
        lora_id=event.lora_id,
        medium=event.medium,
        lora_name=event.lora_name,
        extra_keys=event.extra_keys,
    )


def _as_array(event: KvEvent) -> Any:
    match event:
        case BlockStored():
            return _ArrayStored(
                block_hashes=event.block_hashes,
                parent_block_hash=event.parent_block_hash,
                token_ids=Raw(_ENCODER.encode(event.token_ids)),
                block_size=event.block_size,
                lora_id=event.lora_id,
                medium=event.medium,
                lora_name=event.lora_name,
                extra_keys=event.extra_keys,
            )
        case BlockRemoved():
            return _ArrayRemoved(block_hashes=event.block_hashes, medium=event.medium)
        case AllBlocksCleared():
            return _ArrayCleared()
    return [event.type]
