"""KV events: both wire shapes, tolerance where engines differ, refusal where a guess would hurt."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.kv_events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    UnknownEvent,
    WireShape,
    decode,
    encode,
)

pack = msgspec.msgpack.encode
unpack = msgspec.msgpack.decode

STORED = BlockStored(
    block_hashes=[2**64 - 1, 7],
    parent_block_hash=5,
    token_ids=[1, 2, 3, 4],
    block_size=2,
    medium="GPU",
)


@pytest.mark.parametrize("shape", ["map", "array"])
def test_both_shapes_survive_a_round_trip(shape: WireShape) -> None:
    """What is encoded comes back, whatever the shape."""
    events = [STORED, BlockRemoved(block_hashes=[b"\x01" * 32], medium="cpu"), AllBlocksCleared()]
    batch = EventBatch(ts=1.5, events=list(events), dp_rank=3)

    assert decode(encode(batch, shape=shape), with_tokens=True) == batch


def test_map_shape_is_vllms_own() -> None:
    """The first seven fields are always written, group and spec kind if they are set."""
    bare = BlockStored(block_hashes=[1])
    full = BlockStored(block_hashes=[1], group_idx=0, kv_cache_spec_kind="full_attention")
    removed = BlockRemoved(block_hashes=[1])

    ts, events, rank = unpack(encode(EventBatch(ts=1.0, events=[bare, full, removed], dp_rank=0)))

    seven = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 0,
        "lora_id": None,
        "medium": None,
        "lora_name": None,
    }
    assert events[0] == seven
    assert events[1] == {**seven, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    assert events[2] == {"type": "BlockRemoved", "block_hashes": [1], "medium": None}
    assert (ts, rank) == (1.0, 0)


def test_array_shape_is_the_older_releases_own() -> None:
    """Arrays start with the tag and hold the fields in order."""
    batch = EventBatch(ts=1.0, events=[STORED, AllBlocksCleared(), UnknownEvent("New")], dp_rank=0)

    _, events, _ = unpack(encode(batch, shape="array"))

    assert events == [
        ["BlockStored", [2**64 - 1, 7], 5, [1, 2, 3, 4], 2, None, "GPU", None, None],
        ["AllBlocksCleared"],
        ["New"],
    ]


@pytest.mark.parametrize("shape", ["map", "array"])
def test_tokens_are_skipped_on_request(shape: WireShape) -> None:
    """Without tokens the rest of the event is the same and still a BlockStored."""
    payload = encode(EventBatch(ts=1.0, events=[STORED]), shape=shape)

    (event,) = decode(payload, with_tokens=False).events

    assert isinstance(event, BlockStored)
    assert event.token_ids == []
    assert (event.block_hashes, event.parent_block_hash) == ([2**64 - 1, 7], 5)
    assert (event.block_size, event.medium) == (2, "GPU")


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"type": "BlockStored", "block_hashes": [1]}, BlockStored(block_hashes=[1])),
        (["BlockStored", [1]], BlockStored(block_hashes=[1])),
        (
            ["BlockStored", [1], None, [], 16, None],
            BlockStored(block_hashes=[1], block_size=16),
        ),
        (
            ["BlockStored", [1], None, [], 16, None, "GPU", None, [["s"]], 0, "surplus"],
            BlockStored(block_hashes=[1], block_size=16, medium="GPU", extra_keys=[["s"]]),
        ),
        (["BlockRemoved", [b"x" * 32]], BlockRemoved(block_hashes=[b"x" * 32])),
        (["BlockRemoved", [1], "GPU", 0], BlockRemoved(block_hashes=[1], medium="GPU")),
        (
            {"type": "BlockRemoved", "block_hashes": [1], "ownership": "fs", "group_idx": 1},
            BlockRemoved(block_hashes=[1], group_idx=1),
        ),
        ({"type": "AllBlocksCleared", "why": "reset"}, AllBlocksCleared()),
        (["AllBlocksCleared", 1], AllBlocksCleared()),
        ({"type": "BlockMoved", "to": "disk"}, UnknownEvent("BlockMoved")),
        (["BlockMoved", "disk"], UnknownEvent("BlockMoved")),
        ({"type": "UnknownEvent"}, UnknownEvent("UnknownEvent")),
    ],
)
def test_missing_and_surplus_fields_and_unknown_types_are_tolerated(
    event: Any, expected: Any, with_tokens: bool
) -> None:
    """Neither an older nor a newer release of the engine stops the stream."""
    payload = pack([1, [event, {"type": "Novel"}], None, "surplus"])

    decoded = decode(payload, with_tokens=with_tokens).events

    assert [msgspec.to_builtins(e) for e in decoded] == [
        _builtins_like(decoded[0], expected),
        msgspec.to_builtins(UnknownEvent("Novel")),
    ]


def _builtins_like(decoded: Any, expected: Any) -> Any:
    """Spell `expected` as `decoded` spells itself: a skipped field has another name there."""
    builtins = msgspec.to_builtins(expected)
    if "-" in msgspec.to_builtins(decoded):
        builtins["-"] = builtins.pop("token_ids")
    return builtins


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        pack({}),
        pack("text"),
        pack([1.0]),
        pack([1.0, {}]),
        pack([1.0, [3]]),
        pack([1.0, [[]]]),
        pack([1.0, [[3]]]),
        pack([1.0, [{"block_hashes": [1]}]]),
        pack([1.0, [{"type": "BlockStored"}]]),
        pack([1.0, [{"type": "BlockStored", "block_hashes": ["text"]}]]),
        pack([1.0, [{"type": "BlockRemoved", "block_hashes": None}]]),
        pack([1.0, [["BlockStored"]]]),
        pack([1.0, [["BlockRemoved", 1]]]),
    ],
)
def test_garbage_is_a_value_error(payload: bytes) -> None:
    """What would corrupt the index is refused, with one kind of error."""
    with pytest.raises(ValueError, match=r"not (msgpack|a KV event batch)"):
        decode(payload, with_tokens=False)


def test_tokens_of_the_wrong_type_are_refused_where_they_are_read() -> None:
    """A skipped field is not looked at, a read one is checked, in arrays as in maps."""
    payload = pack([1.0, [["BlockStored", [1], None, "tokens", 16]]])

    assert len(decode(payload, with_tokens=False).events) == 1
    with pytest.raises(ValueError, match="Expected `array`"):
        decode(payload, with_tokens=True)


def test_long_arrays_are_recognised() -> None:
    """An event array with more than 15 entries has another first byte."""
    long = ["BlockStored", [1], None, [], 16, *[None] * 20]

    assert decode(pack([1.0, [long]]), with_tokens=False).events == [
        BlockStored(block_hashes=[1], block_size=16)
    ]
