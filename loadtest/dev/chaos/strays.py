"""What comes on a kept connection though nobody asked for it: answers, of all kinds.

The sender is a load balancer that ends idle connections, an engine that answers twice, or a server
that counts the bytes of an answer wrong.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

TEXT: Final = "This answer is nobody's."


def _answer(status: str, kind: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
    return head % (status.encode(), kind, len(body)) + body


def _json(body: dict[str, Any]) -> bytes:
    return _answer("200 OK", b"application/json", orjson.dumps(body))


def _stream(*events: bytes) -> bytes:
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    return head + chunks + b"0\r\n\r\n"


_CHAT: Final = {
    "id": "chatcmpl-stray",
    "object": "chat.completion",
    "created": 0,
    "model": "tiny",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18},
}
_CHUNK: Final = {
    "id": "chatcmpl-stray",
    "object": "chat.completion.chunk",
    "created": 0,
    "model": "tiny",
    "choices": [{"index": 0, "delta": {"content": TEXT}, "finish_reason": "stop"}],
}
_MESSAGE: Final = {
    "id": "msg_stray",
    "type": "message",
    "role": "assistant",
    "model": "tiny",
    "content": [{"type": "text", "text": TEXT}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 9, "output_tokens": 9},
}

STRAYS: Final = (
    _json(_CHAT),
    _stream(b"data: %b\n\n" % orjson.dumps(_CHUNK), b"data: [DONE]\n\n"),
    _answer("408 Request Timeout", b"text/html", b"<html>408 Request Timeout</html>"),
    _json(_MESSAGE),
    _json(_CHAT) + _json(_CHAT),
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{",
    b"0\r\n\r\n",
)
"""Late answers and streams, a 408 that stays open, two at once, half of one, a framing fault."""
