"""Bytes that are wrong in ways that decoders have fallen to."""

from __future__ import annotations

import struct
from typing import Final

DEPTH: Final = 5_000

_TS: Final = b"\xcb" + struct.pack(">d", 1.0)
_DEEP: Final = b"\x81\xa1a" * DEPTH + b"\xc0"


def _text(value: str) -> bytes:
    encoded = value.encode()
    return bytes([0xA0 | len(encoded)]) + encoded


def _batch(*events: bytes) -> bytes:
    return b"\x93" + _TS + bytes([0x90 | len(events)]) + b"".join(events) + b"\x00"


DEEP_MAP_EVENT: Final = _batch(b"\x82" + _text("type") + _text("Later") + _text("more") + _DEEP)
"""An event that no release knows, nested 5,000 deep, in 15 KB."""

DEEP_ARRAY_EVENT: Final = _batch(b"\x92" + _text("Later") + b"\x91" * DEPTH + b"\xc0")
"""The same in the older shape, in 5 KB."""

DEEP_EXTRA_KEYS: Final = _batch(
    b"\x83"
    + _text("type")
    + _text("BlockStored")
    + _text("block_hashes")
    + b"\x91\x01"
    + _text("extra_keys")
    + b"\x91\x91"
    + _DEEP
)

BAD_TOKENS: Final = _batch(
    b"\x84"
    + _text("type")
    + _text("BlockStored")
    + _text("block_hashes")
    + b"\x91\x01"
    + _text("token_ids")
    + _text("none")
    + _text("block_size")
    + b"\x04"
)
"""Well formed as long as the tokens are not read."""

LYING_LENGTH: Final = b"\x93" + _TS + b"\xdd\xff\xff\xff\xff"
BAD_TEXT: Final = _batch(b"\x91\xa2\xff\xff")
HUGE_INT: Final = _batch(
    b"\x82" + _text("type") + _text("BlockStored") + _text("block_hashes") + b"\xcf" + b"\xff" * 8
)

POISONS: Final = {
    "deep map": DEEP_MAP_EVENT,
    "deep array": DEEP_ARRAY_EVENT,
    "deep extra keys": DEEP_EXTRA_KEYS,
    "lying length": LYING_LENGTH,
    "bad text": BAD_TEXT,
    "hash is no list": HUGE_INT,
    "empty": b"",
    "many events": b"\x93" + _TS + b"\xdd\x00\x10\x00\x00" + b"\x91\xa1X" * (1 << 20) + b"\x00",
    "many blocks": b"\x93"
    + _TS
    + b"\x91\x82"
    + _text("type")
    + _text("BlockRemoved")
    + _text("block_hashes")
    + b"\xdd\x00\x02\x00\x01"
    + b"\x01" * ((1 << 17) + 1)
    + b"\x00",
}
"""None of these is a batch."""

DEEP_MSGPACK: Final = b"\x91" * DEPTH + b"\xc0"
DEEP_JSON: Final = b'{"a":' * DEPTH + b"1" + b"}" * DEPTH
