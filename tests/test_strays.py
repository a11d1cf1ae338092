"""router.upstream.session: one answer belongs to one request, or the connection ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from multidict import CIMultiDict

from router.base.errors import AnswerUnreadable, PoolError, UpstreamBroken
from router.config import ForwardConfig
from router.discovery.engine_api import EngineApi
from router.pool.master import MasterApi
from router.upstream import Answer, Upstream
from router.upstream.session import MAX_HEADER_BYTES, MAX_HEADERS, Strays
from tests.raw_http import Part, playing, stream, whole
from tests.waiting import until


async def ask(upstream: Upstream, url: str, body: bytes, request_id: str | None = None) -> Answer:
    """Send a request and read the whole answer."""
    headers = CIMultiDict({"X-Request-Id": request_id} if request_id else {})
    answer = await upstream.open("r1", url, method="POST", headers=headers, body=body)
    try:
        await answer.gather(1 << 20)
    finally:
        answer.close()
    return answer


_STRAY = whole(b"somebody else's")
_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"


def echo(body: bytes) -> bytes:
    return whole(b"for " + body)


@pytest.mark.parametrize(
    "after",
    [
        [0.05, _STRAY],
        [0.05, _STRAY, _STRAY],
        [0.05, stream(b"data: 1\n\n", b"data: [DONE]\n\n")],
        [0.05, _TIMEOUT],
        [0.05, b"HTTP/1.0 408 Request Time-out\r\nConnection: close\r\n\r\n<html/>"],
        [0.05, b"HTTP/1.1 100 Continue\r\n\r\n"],
        [0.05, b"\r\n"],
        [0.05, _STRAY[:20]],
        [0.05, _STRAY[:20], 0.05, _STRAY[20:]],
        [0.05, b"no HTTP"],
    ],
    ids=lambda after: repr(after[1][:18]) + str(len(after)),
)
async def test_bytes_on_an_idle_connection_belong_to_no_request(after: list[Part]) -> None:
    """The next request goes out on another connection and gets its own answer."""
    strays: list[str] = []
    async with (
        playing(lambda number, body: [echo(body), *(after if number == 0 else [])]) as player,
        Upstream(ForwardConfig(), strays=Strays(strays.append)) as upstream,
    ):
        for number, name in enumerate((b"a", b"b", b"c"), 1):
            answer = await ask(upstream, player.url, name)
            assert answer.first == b"for " + name
            await until(lambda number=number: len(strays) == number)  # type: ignore[misc]

    assert player.requests == [b"a", b"b", b"c"]  # nothing was sent twice
    assert player.num_connections == 3
    assert strays == ["r1"] * 3


@pytest.mark.parametrize("stray", [_STRAY, _TIMEOUT, stream(b"data: 1\n\n")])
async def test_the_same_for_what_comes_in_one_piece_with_the_answer(stray: bytes) -> None:
    """Two answers in one piece: the first one is the request's."""
    strays: list[str] = []
    async with (
        playing(lambda _, body: [echo(body) + stray]) as player,
        Upstream(ForwardConfig(), strays=Strays(strays.append)) as upstream,
    ):
        for name in (b"a", b"b"):
            assert (await ask(upstream, player.url, name)).first == b"for " + name

    assert (player.num_connections, strays) == (2, ["r1", "r1"])


@pytest.mark.parametrize("excess", [b"more than its length said", b"\x00", b"{}"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_body_longer_than_its_length_is_cut_there(excess: bytes, is_stream: bool) -> None:
    """In one piece with the answer. The answer is delivered, the connection is closed."""
    strays: list[str] = []

    def play(_: int, body: bytes) -> list[Part]:
        return [(stream(b"data: " + body + b"\n\n") if is_stream else echo(body)) + excess]

    async with (
        playing(play) as player,
        Upstream(ForwardConfig(), strays=Strays(strays.append)) as upstream,
    ):
        for name in (b"a", b"b"):
            expected = b"data: " + name + b"\n\n" if is_stream else b"for " + name
            assert (await ask(upstream, player.url, name)).first == expected

    assert player.requests == [b"a", b"b"]
    assert (player.num_connections, strays) == (2, ["r1", "r1"])


@pytest.mark.parametrize("stray", [_STRAY, b""])
async def test_what_was_not_read_yet_is_seen_when_the_connection_is_taken(stray: bytes) -> None:
    """The loop had no turn between the bytes, or the connection's end, and the next request."""
    strays: list[str] = []
    is_read, is_sent = threading.Event(), threading.Event()
    server = socket.create_server(("127.0.0.1", 0))
    host, port = server.getsockname()

    def serve() -> None:
        for number in range(2):
            with server.accept()[0] as connection, suppress(ConnectionError):
                connection.settimeout(10.0)
                body = connection.recv(1 << 16).rpartition(b"\r\n\r\n")[2]
                connection.sendall(echo(body))
                is_read.wait(10.0)
                if stray and number == 0:
                    connection.sendall(stray)
                    is_sent.set()
                    while connection.recv(1 << 16):
                        pass
            is_sent.set()

    with ThreadPoolExecutor() as threads, server:
        served = threads.submit(serve)
        async with Upstream(ForwardConfig(), strays=Strays(strays.append)) as upstream:
            url = f"http://{host}:{port}/"
            assert (await ask(upstream, url, b"a")).first == b"for a"
            is_read.set()
            is_sent.wait(10.0)
            assert (await ask(upstream, url, b"b")).first == b"for b"
        served.result(10.0)

    assert strays == (["r1"] if stray else [])


@pytest.mark.parametrize(
    "begins",
    [
        b'{"id":"chatcmpl-%b","object":"chat.completion"}',
        b'{"id":"cmpl-%b","object":"text_completion"}',
    ],
)
async def test_an_answer_that_names_an_earlier_request_is_not_passed_on(begins: bytes) -> None:
    """It comes when the next request is under way already: engines name the request in it."""
    strays: list[str] = []

    def play(number: int, body: bytes) -> list[Part]:
        """Answer the first request of a connection once more, 50 ms later."""
        answer = whole(begins % body)
        return [answer, 0.05, answer] if number == 0 else [0.1, answer]

    async with (
        playing(play) as player,
        Upstream(ForwardConfig(), strays=Strays(strays.append)) as upstream,
    ):
        for name in ("a1", "b2", "c3"):
            answer = await ask(upstream, player.url, name.encode(), name)
            assert answer.first == begins % name.encode()

    assert strays == ["r1"]


@pytest.mark.parametrize("late", [_TIMEOUT, b"no HTTP at all\r\n\r\n"])
async def test_nobodys_bytes_meet_a_request_that_was_just_sent(late: bytes) -> None:
    """Nothing in them is an answer to it: it is sent again on a new connection."""
    strays: list[str] = []

    def play(number: int, body: bytes) -> list[Part]:
        return [echo(body)] if number == 0 else [late, None]

    async with (
        playing(play) as player,
        Upstream(ForwardConfig(), strays=Strays(strays.append)) as upstream,
    ):
        for name in (b"a", b"b"):
            assert (await ask(upstream, player.url, name)).first == b"for " + name

    assert strays == ["r1"]


async def test_a_408_on_a_new_connection_is_the_answer() -> None:
    """The client's, as before."""
    async with playing(lambda *_: [_TIMEOUT]) as player, Upstream(ForwardConfig()) as upstream:
        assert (await ask(upstream, player.url, b"a")).status == 408


async def test_a_server_that_closes_after_its_answer_is_no_fault() -> None:
    """Idle connections end; nothing is counted."""
    strays: list[str] = []
    async with (
        playing(lambda _, body: [echo(body), 0.02, None]) as player,
        Upstream(ForwardConfig(), strays=Strays(strays.append)) as upstream,
    ):
        for name in (b"a", b"b"):
            assert (await ask(upstream, player.url, name)).first == b"for " + name
            await asyncio.sleep(0.1)

    assert strays == []


@pytest.mark.parametrize("size", [8_191, MAX_HEADER_BYTES - len("X-Long")])
async def test_a_long_header_is_passed_on(size: int) -> None:
    async with (
        playing(lambda *_: [whole(b"ok", "X-Long: " + "a" * size)]) as player,
        Upstream(ForwardConfig()) as upstream,
    ):
        answer = await ask(upstream, player.url, b"")

    assert (answer.first, len(answer.headers["X-Long"])) == (b"ok", size)


async def test_many_headers_are_passed_on() -> None:
    """Two of them are Content-Type and Content-Length."""
    many = [f"X-{number}: 1" for number in range(MAX_HEADERS - 2)]
    async with (
        playing(lambda *_: [whole(b"ok", *many)]) as player,
        Upstream(ForwardConfig()) as upstream,
    ):
        answer = await ask(upstream, player.url, b"")

    assert (answer.first, len(answer.headers)) == (b"ok", MAX_HEADERS)


@pytest.mark.parametrize(
    "headers",
    [
        ["X-Long: " + "a" * (MAX_HEADER_BYTES + 1)],
        [f"X-{number}: 1" for number in range(MAX_HEADERS)],
        ["no header"],
    ],
    ids=["long", "many", "odd"],
)
async def test_a_head_that_cannot_be_read_was_an_answer(headers: list[str]) -> None:
    """On a new and on a kept connection: it has a name, and is sent once."""
    async with (
        playing(lambda number, body: [whole(b"ok", *(headers if body else []))]) as player,
        Upstream(ForwardConfig()) as upstream,
    ):
        for body in (b"a", b"", b"b"):
            if body:
                with pytest.raises(AnswerUnreadable):
                    await ask(upstream, player.url, body)
            else:
                await ask(upstream, player.url, body)

    assert player.requests == [b"a", b"", b"b"]


async def test_an_answer_that_comes_while_a_body_is_sent_is_passed_on_at_once() -> None:
    """The server reads no further, and keeps the connection open."""
    refusal, has_ended = whole(b"no", status="413 Payload Too Large"), asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(refusal)
        await has_ended.wait()  # and reads no more: the buffers are full
        writer.transport.abort()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0, limit=1 << 16) as server:
        host, port = server.sockets[0].getsockname()
        async with Upstream(ForwardConfig()) as upstream, asyncio.timeout(5):
            answer = await ask(upstream, f"http://{host}:{port}/", bytes(64 << 20))
        has_ended.set()
        await asyncio.sleep(0)

    assert (answer.status, answer.first) == (413, b"no")


async def test_an_upgrade_that_nobody_asked_for_is_no_answer() -> None:
    """Its connection is closed, and what came on it is nobody's."""
    strays: list[str] = []
    upgrade = (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
        b"\x81\x01a\r\n\r\nHTTP/1.1 "
    )

    def play(number: int, body: bytes) -> list[Part]:
        return [echo(body)] if body == b"last" else [upgrade, 10.0]

    async with (
        playing(play) as player,
        Upstream(ForwardConfig(), strays=Strays(strays.append)) as upstream,
        asyncio.timeout(5),
    ):
        with pytest.raises(UpstreamBroken):
            await ask(upstream, player.url, b"first")
        assert (await ask(upstream, player.url, b"last")).first == b"for last"

    assert (player.num_connections, strays) == (2, [])


# ---------------------------------------------------------------- the other kept connections


async def test_a_probe_does_not_read_a_stray_answer() -> None:
    """Of the engine API: the 503 on the idle connection is no answer to the next probe."""
    strays: list[str] = []
    stray = whole(b"{}", status="503 Service Unavailable")

    async with (
        playing(lambda *_: [whole(b""), 0.02, stray]) as player,
        EngineApi(timeout_s=5.0, strays=Strays(strays.append)) as api,
    ):
        for number in (1, 2, 3):
            await api.ping("r1", player.url.rstrip("/"))
            await until(lambda number=number: len(strays) == number)  # type: ignore[misc]

    assert (player.num_connections, strays) == (3, ["r1"] * 3)


async def test_a_probe_is_repeated_where_a_stray_answer_met_it() -> None:
    """A question may be asked twice; an order may not."""
    late = [b"no HTTP at all\r\n\r\n", None]

    async with (
        playing(lambda number, _: late if number else [whole(b"")]) as player,
        EngineApi(timeout_s=5.0) as api,
    ):
        url = player.url.rstrip("/")
        await api.ping("r1", url)
        await api.ping("r1", url)
        assert player.num_connections == 2
        order = {"method": "POST", "query": {}, "body": b"", "timeout_s": 5.0}
        with pytest.raises(UpstreamBroken):
            await api.order("r1", f"{url}/sleep", **order)

    assert player.num_connections == 2


async def test_a_master_s_page_is_no_stray_one() -> None:
    """The page of another question on the idle connection would count other objects."""
    strays: list[str] = []
    page = b"master_key_count 7\nmaster_allocated_bytes 70\n"
    other = whole(page.replace(b"7", b"9"), kind="text")

    async with (
        playing(lambda *_: [whole(page, kind="text"), 0.02, other]) as player,
        MasterApi(player.url.rstrip("/"), strays=Strays(strays.append)) as master,
    ):
        for number in (1, 2, 3):
            assert (await master.figures()).num_keys == 7
            await until(lambda number=number: len(strays) == number)  # type: ignore[misc]

    assert strays == ["Mooncake master"] * 3


async def test_a_master_s_stray_bytes_are_a_pool_error_at_most() -> None:
    """They come when the next question is under way."""
    page = whole(b"master_key_count 7\nmaster_allocated_bytes 70\n", kind="text")

    async with (
        playing(lambda number, _: [b"no HTTP\r\n\r\n", None] if number else [page]) as player,
        MasterApi(player.url.rstrip("/")) as master,
    ):
        assert (await master.figures()).num_keys == 7
        with pytest.raises(PoolError):
            await master.figures()
