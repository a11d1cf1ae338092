"""Bodies in chunks, as they come: read without a parser where that is sure, and always right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate, pairwise
from typing import Final

import pytest
from multidict import CIMultiDict

from router.config import ForwardConfig
from router.upstream import Upstream
from router.upstream.answer import body_of_chunks, is_between_chunks

_HEAD: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


@pytest.mark.parametrize(
    ("piece", "body"),
    [
        (_chunk(b"data: a\n\n"), b"data: a\n\n"),
        (_chunk(b"a") + _chunk(b"b" * 300), b"a" + b"b" * 300),
        (_chunk(b"3\r\nabc\r\n"), b"3\r\nabc\r\n"),
        (_chunk(b"a" * 2047), b"a" * 2047),
        (_chunk(b"a" * 2048), None),  # as good with a parser
        (_chunk(b""), None),  # the last chunk
        (_chunk(b"a") + _chunk(b""), None),
        (b"", b""),
        (b"3\r\nab", None),
        (b"3\r\nabc", None),
        (b"3\r\nabc\r", None),
        (b"3\r\nabcd\r\n", None),
        (b"3\r\nabc\r\n3", None),
        (b"03\r\nabc\r\n", None),
        (b"A\r\n0123456789\r\n", None),
        (b"+3\r\nabc\r\n", None),
        (b"3 \r\nabc\r\n", None),
        (b"3;x=y\r\nabc\r\n", None),
        (b"3\nabc\r\n", None),
        (b"\r\nabc\r\n", None),
        (b"data: a\n\n", None),
    ],
)
def test_whole_chunks_as_servers_write_them_need_no_parser(
    piece: bytes, body: bytes | None
) -> None:
    """Everything else does."""
    assert body_of_chunks(piece) == body


@pytest.mark.parametrize(
    ("piece", "body", "is_between"),
    [
        (_chunk(b"data: a\n\n"), b"data: a\n\n", True),
        (b"\n\n\r\n", b"a\n\n\r\n", False),  # inside of a chunk
        (b"data: a\n\n\r\n", b"data: a\n\n\r\n", False),  # inside of a chunk
        (_chunk(b"data: a\n\n") + b"9\r\n", b"data: a\n\n", False),
        (_chunk(b"data: a\n\n")[:-1], b"data: a\n\n", False),
        (b"\r\n", b"", False),
    ],
)
def test_where_a_parser_stands(piece: bytes, body: bytes, is_between: bool) -> None:
    """Only where an event's end and a chunk's are the last it was fed."""
    assert is_between_chunks(piece, body) is is_between


@asynccontextmanager
async def _sending(pieces: Sequence[bytes]) -> AsyncIterator[str]:
    """Serve an answer in these pieces, each in its own turn of the loop."""

    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.001)
        await reader.read()  # until the client closes
        writer.close()
        over.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        await over.wait()


async def _poured(pieces: Sequence[bytes], *, stops: bool = False) -> tuple[bytes, int]:
    """Return the body as it was taken, and how much of it was parsed; `stops`: after each piece."""
    async with _sending(pieces) as url, Upstream(ForwardConfig()) as upstream:
        answer = await upstream.open("r", url, method="GET", headers=CIMultiDict(), body=None)
        taken = [answer.first]

        def take(piece: bytes, _: bytes | None) -> bool:
            taken.append(piece)
            return not stops

        while not answer.complete:
            await answer.pour(take)
        num_parsed = answer._response.content.total_bytes
        answer.close()
    return b"".join(taken), num_parsed


async def test_a_body_that_is_not_parsed_comes_with_its_chunks() -> None:
    """As they came; what a parser made has none."""
    events = [b"data: %d\n\n" % number for number in range(20)]
    pieces = [_HEAD, *(_chunk(events[n]) + _chunk(events[n + 1]) for n in range(0, 20, 2))]
    taken: list[tuple[bytes, bytes | None]] = []

    def take(piece: bytes, chunks: bytes | None) -> bool:
        taken.append((piece, chunks))
        return True

    async with _sending([*pieces, _chunk(b"")]) as url, Upstream(ForwardConfig()) as upstream:
        answer = await upstream.open("r", url, method="GET", headers=CIMultiDict(), body=None)
        first = answer.first
        while not answer.complete:
            await answer.pour(take)
        answer.close()

    assert first + b"".join(piece for piece, _ in taken) == b"".join(events)
    whole = [(piece, chunks) for piece, chunks in taken if chunks is not None]
    assert whole
    assert all(body_of_chunks(chunks) == piece for piece, chunks in whole)


async def test_events_in_chunks_of_their_own_are_not_parsed() -> None:
    """But for the first and the last ones, from which it is known where chunks begin."""
    events = [b"data: %d\n\n" % number for number in range(40)]

    body, num_parsed = await _poured([_HEAD, *map(_chunk, events), _chunk(b"")])

    assert body == b"".join(events)
    assert num_parsed < len(body) / 2


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("seed", range(6))
async def test_a_body_cut_anywhere_is_the_same(seed: int, stops: bool) -> None:
    """Chunks that look like events' ends, like chunks and like the last one among them."""
    drawn = random.Random(seed)
    tricky = [
        b"data: a\n\n",
        b"x\n\n\r\n",
        b"1\r\na\r\n",
        b"\r\n",
        b"0\r\n\r\n",
        b"\n\n",
        b"b" * 3000,
    ]
    chunks = [b"".join(drawn.choices(tricky, k=drawn.randint(1, 3))) for _ in range(60)]
    wire = [*map(_chunk, chunks), _chunk(b"")]
    ends = list(accumulate(map(len, wire)))
    cuts = {*drawn.sample(ends, 50), *drawn.choices(range(1, ends[-1]), k=20), ends[-1]}
    stream = b"".join(wire)
    pieces = [stream[start:end] for start, end in pairwise([0, *sorted(cuts)])]

    body, _ = await _poured([_HEAD, *pieces], stops=stops)

    assert body == b"".join(chunks)
