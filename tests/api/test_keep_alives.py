from __future__ import annotations

import pytest

from router.upstream.answer import MAX_BYTES, KeepAlives

ONLY = [
    b": keep-alive\n\n",
    b":\r\n\r\n",
    b": a\r\r: b\r\r",
    b"\n\n\n",
    b"data:\n\n",
    b"data: \n\ndata\n\n",
    b'event: ping\ndata: {"type": "ping"}\n\n',
    b'event: ping\r\ndata: {"type":"ping"}\r\n\r\n',
    ": wäre\n\n".encode(),
    b": data: no event\n\n",
    b"id: 1\n\nid:2\r\n\r\n",
    b"retry: 1000\n\n",
]
EVENTS = [
    b"data: [DONE]\n\n",
    b'data: {"choices":[]}\n\n',
    b"event: message_start\ndata: {}\n\n",
    b"id: 1\ndata: x\n\n",
    b'data: {"type": "pinged"}\n\n',
    b'data: {"error": 1}\n\n',
]


@pytest.mark.parametrize("keep_alives", ONLY)
@pytest.mark.parametrize("step", [1, 2, 3, 1000])
def test_what_says_nothing_is_told_wherever_it_is_cut(keep_alives: bytes, step: int) -> None:
    for event in EVENTS:
        told = KeepAlives()
        pieces = [keep_alives[at : at + step] for at in range(0, len(keep_alives), step)]

        assert all(told.are_all(piece) for piece in pieces)
        assert told.unfinished == b""
        assert not told.are_all(event)
        assert told.are_all(keep_alives)
        assert not told.are_all(keep_alives + event)
        assert not told.are_all(event + keep_alives)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_an_event_is_told_by_the_end_of_its_first_line(event: bytes, step: int) -> None:
    told = KeepAlives()
    pieces = [event[at : at + step] for at in range(0, len(event), step)]

    assert False in [told.are_all(piece) for piece in pieces]


def test_the_rest_of_an_event_is_no_comment() -> None:
    """JSON may be cut where a comment could begin."""
    told = KeepAlives()

    assert not told.are_all(b'data: {"a"')
    assert not told.are_all(b': "b", ')
    assert not told.are_all(b'"c": 1}\n')
    assert told.are_all(b"\n: d\n\n")


def test_what_is_unfinished_is_kept_whole_and_within_bounds() -> None:
    told = KeepAlives()

    assert told.are_all(b": a\n\n: b")
    assert told.unfinished == b": b"
    assert not told.are_all(b"b" * MAX_BYTES)
    assert told.unfinished == b""
