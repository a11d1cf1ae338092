"""The route `/v1/realtime`, its error event, and the frames that carry it.

Messages pass as bytes and are not read. Frames are followed, so that messages can be counted and a
last one added between two of them. As in OpenAI's API the query names the model: `?model=`.

Source: RFC 6455 section 5; vLLM 0.32.0, entrypoints/speech_to_text/realtime (protocol.py).
"""

from __future__ import annotations

from typing import Final

import orjson

PATH: Final = "/v1/realtime"

SWITCHING_PROTOCOLS: Final = 101
"""Status of a connection that became a WebSocket, also in records."""

GOING_AWAY: Final = 1001
FAILED: Final = 1011
RESTARTS: Final = 1012
"""Close codes. Source: RFC 6455 section 7.4.1; 1012: IANA's registry."""

FAILURES: Final = frozenset({1011, 1012, 1013, 1014})
"""Codes with which an engine says that it failed."""

_TEXT, _CLOSE = 0x1, 0x8
_LAST, _MASKED = 0x80, 0x80  # bits of a head's first byte, and of its second
_LENGTHS: Final = {126: 2, 127: 8}  # further bytes of the length
_MASK_BYTES: Final = 4
_CODE_BYTES: Final = 2
_SHORT: Final = 125


class Frames:
    """Follows the frames of one direction.

    code: With which its sender closed. None: it has not. 0: without a code, or the sender is a
        client, which masks it.
    """

    __slots__ = ("_head", "_left", "_within_message", "code")

    def __init__(self) -> None:
        self.code: int | None = None
        self._head = bytearray()  # of the next frame, as far as it has come
        self._left = 0  # bytes of a payload that are still to come
        self._within_message = False  # more frames of a message are to come

    def take(self, data: bytes) -> int:
        """Follow the next bytes; return how many messages have their last frame there."""
        num_messages = at = 0
        while at < len(data):
            if self._left:
                num_bytes = min(self._left, len(data) - at)
                self._left -= num_bytes
                at += num_bytes
                continue
            self._head.append(data[at])
            at += 1
            num_messages += self._begin()
        return num_messages

    def _begin(self) -> bool:
        """Begin a frame if its head is whole; return whether it is the last of a message."""
        head = self._head
        if len(head) < 2:
            return False
        opcode, length, is_masked = head[0] & 0xF, head[1] & 0x7F, head[1] & _MASKED
        more = _LENGTHS.get(length, 0)
        size = 2 + more + (_MASK_BYTES if is_masked else 0)
        num_code = _CODE_BYTES if opcode == _CLOSE and length >= _CODE_BYTES else 0
        if len(head) < size + num_code:
            return False
        self._left = (int.from_bytes(head[2 : 2 + more]) if more else length) - num_code
        code = head[size:]
        self._head = bytearray()
        if opcode == _CLOSE:
            self.code = int.from_bytes(code) if code and not is_masked else 0
            return False
        if opcode > _CLOSE:  # ping, pong
            return False
        self._within_message = not head[0] & _LAST
        return not self._within_message

    def last(self, code: int, message: str, error: str) -> bytes:
        """Return what an engine would write at its end: an error event, and the closing frame.

        Nothing inside a frame, or if the end has been written.
        """
        if self._head or self._left or self.code is not None:
            return b""
        event = b"" if self._within_message else _frame(_TEXT, error_event(message, error))
        reason = message.encode()[: _SHORT - _CODE_BYTES].decode(errors="ignore").encode()
        return event + _frame(_CLOSE, code.to_bytes(_CODE_BYTES) + reason)


def error_event(message: str, code: str) -> bytes:
    """Write an error as the engine does."""
    return orjson.dumps({"type": "error", "error": message, "code": code})


def _frame(opcode: int, payload: bytes) -> bytes:
    """Write a server's frame, of less than 64 KiB."""
    size = len(payload)
    length = bytes((size,)) if size <= _SHORT else b"\x7e" + size.to_bytes(2)
    return bytes((_LAST | opcode,)) + length + payload
