"""router.api.realtime: frames are followed however their bytes come in pieces."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st

from router.api.realtime import FAILED, Frames

TEXT, BINARY, CLOSE, PING = 0x1, 0x2, 0x8, 0x9
MASK = b"\x01\x02\x03\x04"


def frame(opcode: int, payload: bytes, *, is_last: bool = True, is_masked: bool = False) -> bytes:
    size, bit = len(payload), 0x80 * is_masked
    if size < 126:
        length = bytes((bit | size,))
    elif size < 1 << 16:
        length = bytes((bit | 126,)) + size.to_bytes(2)
    else:
        length = bytes((bit | 127,)) + size.to_bytes(8)
    if is_masked:
        payload = bytes(each ^ MASK[at % 4] for at, each in enumerate(payload))
    return bytes((0x80 * is_last | opcode,)) + length + MASK * is_masked + payload


frames = st.tuples(
    st.sampled_from([0, TEXT, BINARY, PING]),
    st.binary(max_size=3) | st.sampled_from([b"x" * 125, b"x" * 126, b"x" * 70_000]),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(frames, max_size=8), st.lists(st.integers(1, 80_000), max_size=8))
def test_messages_are_counted_by_their_last_frames(
    sent: list[tuple[int, bytes, bool, bool]], cuts: list[int]
) -> None:
    data = b"".join(
        frame(opcode, payload, is_last=is_last or opcode == PING, is_masked=is_masked)
        for opcode, payload, is_last, is_masked in sent
    )
    followed, num_messages = Frames(), 0
    for size in (*cuts, len(data)):
        num_messages += followed.take(data[:size])
        data = data[size:]

    assert num_messages == sum(is_last for opcode, _, is_last, _ in sent if opcode != PING)
    assert followed.code is None
    assert followed.last(FAILED, "gone", "broken").endswith(frame(CLOSE, b"\x03\xf3gone"))


@given(st.binary(max_size=300))
def test_what_is_no_frame_harms_nothing(data: bytes) -> None:
    whole, pieces = Frames(), Frames()
    whole.take(data)
    for at in range(len(data)):
        pieces.take(data[at : at + 1])

    assert whole.code == pieces.code
    assert whole.last(FAILED, "", "") == pieces.last(FAILED, "", "")


def test_an_end_is_an_error_and_a_closing_frame() -> None:
    """As an engine would write them; a long reason is cut between two characters."""
    last = Frames().last(FAILED, "ä" * 70, "broken")
    event = orjson.dumps({"type": "error", "error": "ä" * 70, "code": "broken"})

    assert last == frame(TEXT, event) + frame(CLOSE, b"\x03\xf3" + "ä".encode() * 61)


def test_an_end_is_not_written_into_a_frame_or_message() -> None:
    """Between two frames of a message the closing frame may stand, and no other message."""
    followed, text = Frames(), frame(TEXT, b"hello")
    followed.take(text[:1])
    assert followed.last(FAILED, "gone", "broken") == b""
    followed.take(text[1:-1])
    assert followed.last(FAILED, "gone", "broken") == b""
    followed.take(text[-1:] + frame(TEXT, b"he", is_last=False))
    assert followed.last(FAILED, "gone", "broken") == frame(CLOSE, b"\x03\xf3gone")
    followed.take(frame(PING, b""))
    assert followed.last(FAILED, "gone", "broken") == frame(CLOSE, b"\x03\xf3gone")


def test_who_has_closed_is_known_with_the_code() -> None:
    """Nothing may follow. A client's code is masked, and one may close without any."""
    codes = []
    for closing in (
        frame(CLOSE, b"\x0f\xa1reason"),
        frame(CLOSE, b""),
        frame(CLOSE, b"\x03\xe8", is_masked=True),
    ):
        followed = Frames()
        for at in range(len(closing)):
            assert followed.code is None or at > 3
            followed.take(closing[at : at + 1])
        codes.append(followed.code)
        assert followed.last(FAILED, "gone", "broken") == b""

    assert codes == [4001, 0, 0]
