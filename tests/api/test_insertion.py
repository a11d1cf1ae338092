"""router.api.insertion: one event gets a member more, every other byte stays."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.api.insertion import Insertion

START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"m1","usage":{"a":1}}}'
)
FILLED = START[:-2] + b',"diagnostics":null}}'
PING = b"event: ping\ndata: {}\n\n"
REST = b'event: content_block_delta\ndata: {"delta":"\\n\\nevent: message_start\\n"}\n\n'


def insertion(*seen: Any) -> Insertion:
    """Put a member in, and add to `seen`, a list, what it was asked for."""

    def members(value: bytes) -> dict[str, Any]:
        for each in seen:
            each.append(value)
        return {"diagnostics": None}

    return Insertion(("message_start",), "message", members)


def passed(stream: bytes, *cuts: int) -> bytes:
    """Pass a stream in pieces."""
    through, at = insertion(), 0
    out = b""
    for cut in (*cuts, len(stream)):
        out += through.take(stream[at:cut])
        at = cut
    return out + through.end()


@pytest.mark.parametrize("before", [b"", b"\n", b": keep-alive\n\n", PING, b": a\n\n\n\n" + PING])
def test_a_stream_may_be_cut_anywhere(before: bytes) -> None:
    """At every byte, at two places at once, and in single bytes."""
    stream = before + START + b"\n\n" + REST + REST
    wanted = before + FILLED + b"\n\n" + REST + REST
    far = len(before) + len(START) + 4

    assert passed(stream) == wanted
    assert passed(stream, *range(1, len(stream))) == wanted
    for cut in range(len(stream)):
        assert passed(stream, cut) == wanted
        assert passed(stream, min(cut, far), max(cut, far)) == wanted


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        REST,
        START,  # without an end
        START.replace(b"\n", b"\r\n") + b"\r\n\r\n",
        START[:-1] + b"\n\n" + REST,
        b'event: message_start\ndata: {"type":"message_start"}\n\n',
        b'event: message_start\ndata: {"message":"{"}\n\n',
        b'event: message_start\ndata: {"message":[{"id":"m1"}]}\n\n',
        b'event: message_start\ndata: {"message":\ndata: {"id":"m1"}}\n\n',
        b"event: message_start\ndata: [DONE]\n\n",
        b"event: message_start\n\n",
        b"event: message_startled\n" + START.partition(b"\n")[2] + b"\n\n",
        b'event: message_start\ndata: {"message":' + b"[" * 5000 + b"\n\n",
    ],
)
def test_what_cannot_be_read_stays(stream: bytes) -> None:
    assert passed(stream) == stream
    assert passed(stream, *range(1, len(stream))) == stream


def test_other_events_wait_for_nothing() -> None:
    """Only what may become the event is kept, and the event itself."""
    through = insertion()

    assert through.take(b"event: message_sto") == b"event: message_sto"
    assert through.take(b"p\n\nevent: m") == b"p\n\n"
    assert through.take(b"essage_delta\ndata: {") == b"event: message_delta\ndata: {"
    assert through.take(b"}\n") == b"}\n"
    assert through.take(b"\nevent: message_start\nda") == b"\n"
    assert through.take(b'ta: {"message":{}}\n') == b""
    assert through.take(b"\n: hi").endswith(b'"diagnostics":null}}\n\n: hi')
    assert through.take(b"event: message_start\nda") == b"event: message_start\nda"


def test_the_members_are_asked_for_once() -> None:
    seen: list[bytes] = []
    through = insertion(seen)
    through.take((START + b"\n\n") * 2)

    assert seen == [b'{"id":"m1","usage":{"a":1}}']


def test_a_member_that_is_there_is_replaced() -> None:
    body = b'{"id":"m1","diagnostics":{"old":1},"n":1.10}'

    assert insertion().whole(body) == b'{"id":"m1","n":1.10,"diagnostics":null}'
    assert insertion().whole(b"{}") == b'{"diagnostics":null}'
    assert insertion().whole(b"no JSON") == b"no JSON"
    assert insertion().whole(b"[1]") == b"[1]"


@pytest.mark.parametrize("size", [1 << 16, 1 << 24])
def test_a_long_event_goes_on_as_it_came(size: int) -> None:
    """Above 1 MiB, in pieces and at once; and a whole answer."""
    body = orjson.dumps({"message": {"text": "x" * (2 << 20)}})
    stream = b"event: message_start\ndata: " + body + b"\n\n"

    assert passed(stream, *range(0, len(stream), size)) == stream
    assert insertion().whole(body) == body


def test_much_of_an_event_is_filled_in() -> None:
    """900 KB, in pieces of 100 bytes."""
    data = orjson.dumps({"message": {"text": "x" * 900_000}})
    stream = b"event: message_start\ndata: " + data + b"\n\n" + REST
    wanted = stream.replace(b'"}}\n', b'","diagnostics":null}}\n', 1)

    assert passed(stream, *range(0, len(stream), 100)) == wanted
