"""Decoding what other processes wrote: whatever is wrong with it is a `ValueError`.

Engines, the Mooncake master and Redis are other processes, of other releases, and may be broken or
hostile. A decoder in C raises more than its own errors: `RecursionError` where brackets have no
end (no `ValueError`), `UnicodeDecodeError`, `OverflowError`, `MemoryError` where a length is a lie.
A reader that names some of them dies of the next one; here they have one name.

Bounds of what is read of Redis, so that nothing there breaks arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")

UNDECODABLE: Final = (
    msgspec.MsgspecError,
    ValueError,  # UnicodeDecodeError among them
    RecursionError,
    OverflowError,
    MemoryError,
    TypeError,
)


def strict(decode: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """Make a decoder raise nothing but ValueError, which does not quote what it read."""

    def decode_strictly(data: bytes) -> T:
        try:
            return decode(data)
        except UNDECODABLE as exc:
            raise ValueError(f"not decodable: {type(exc).__name__}") from exc

    return decode_strictly


def decoder(kind: type[T], wire: Literal["json", "msgpack"]) -> Callable[[bytes], T]:
    """Make a decoder of one type that raises nothing but ValueError."""
    made: Callable[[bytes], T] = (
        msgspec.json.Decoder(kind).decode
        if wire == "json"
        else msgspec.msgpack.Decoder(kind).decode
    )
    return strict(made)


Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]  # or milliseconds; no NaN is in it
Text = Annotated[str, Meta(max_length=1_024)]
Keys = Annotated[bytes, Meta(max_length=16 * 1024 * 1024)]
