"""router.upstream against a real server: phases, errors by name, nothing left open."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest
from aiohttp import web
from multidict import CIMultiDict

from router.base.errors import (
    ConnectTimeout,
    NotAsked,
    OutOfConnections,
    UpstreamBroken,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.config import ForwardConfig
from router.discovery.engine_api import EngineApi
from router.upstream import Answer, Upstream, end_to_end
from router.upstream import client as module
from tests.conftest import Serve
from tests.faults.hanging import no_accept, no_answer
from tests.ports import free_port


def test_hop_by_hop_headers_stay_here() -> None:
    """Also those that Connection names; everything else goes on, twice if it came twice."""
    kept = end_to_end(
        [
            ("Connection", "close, X-Private"),
            ("x-private", "1"),
            ("Transfer-Encoding", "chunked"),
            ("Host", "a"),
            ("X-A", "1"),
            ("x-a", "2"),
            ("X-Warmroute-Arm", "e/a"),
        ],
        drop_prefix="x-warmroute-",
        drop=frozenset({"host"}),
    )

    assert list(kept.items()) == [("X-A", "1"), ("x-a", "2")]


@pytest.mark.parametrize("size", [0, 10, 3 * 1024 * 1024])
async def test_the_body_and_the_query_arrive_as_they_are(serve: Serve, size: int) -> None:
    """Byte for byte, with a declared length, large bodies in pieces."""
    sent = bytes(range(256)) * (size // 256 + 1)
    got: dict[str, object] = {}

    async def handler(request: web.Request) -> web.Response:
        got["body"] = await request.read()
        got["path"] = request.raw_path
        got["length"] = request.headers.get("Content-Length")
        got["agent"] = request.headers.get("User-Agent")
        return web.Response(body=b"ok")

    url = await serve(handler)
    async with Upstream(ForwardConfig()) as upstream:
        answer = await upstream.open(
            "r1", f"{url}/a%20b?x=%2F&y", method="POST", headers=CIMultiDict(), body=sent
        )
        await answer.gather(1 << 20)
        answer.close()

    assert got == {
        "body": sent,
        "path": "/a%20b?x=%2F&y",
        "length": str(len(sent)),
        "agent": None,
    }
    assert (answer.status, answer.first, answer.complete) == (200, b"ok", True)


@pytest.mark.parametrize("may_resend", [True, False])
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("ends_by", ["connect_timeout_s", "first_byte_timeout_s"])
async def test_a_connection_that_hangs_is_a_connect_timeout(
    may_resend: bool, scheme: str, ends_by: str
) -> None:
    """TCP or TLS, whichever deadline ends it: nothing was sent, and the error says so."""
    limits = {"connect_timeout_s": 60.0, "first_byte_timeout_s": 60.0} | {ends_by: 0.2}
    hanging = no_accept if scheme == "http" else no_answer
    with hanging() as port:
        async with Upstream(ForwardConfig(**limits)) as upstream:
            with pytest.raises(ConnectTimeout, match="did not accept a connection in time"):
                await upstream.open(
                    "r1",
                    f"{scheme}://127.0.0.1:{port}/",
                    method="POST",
                    headers=CIMultiDict(),
                    body=b"{}",
                    may_resend=may_resend,
                )


async def test_an_answer_may_take_longer_than_its_idle_deadline(serve: Serve) -> None:
    """What counts is the wait for the next piece."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(5):
            await response.write(b"a")
            await asyncio.sleep(0.3)
        return response

    url = await serve(handler)
    async with Upstream(ForwardConfig(idle_timeout_s=1.2)) as upstream:
        answer = await upstream.open("r1", url, method="GET", headers=CIMultiDict(), body=None)
        await answer.gather(100)
        answer.close()

    assert answer.first == b"aaaaa"


async def ask(upstream: Upstream, url: str, *, may_resend: bool = True) -> Answer:
    """Send a small POST and read its answer; the connection is kept if it may be."""
    answer = await upstream.open(
        "r1",
        url,
        method="POST",
        headers=CIMultiDict(),
        body=b"{}",
        may_resend=may_resend,
    )
    await answer.gather(1 << 20)
    answer.close()
    return answer


class Kept:
    """A server that closes a kept connection when the second request comes on it."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.connections: dict[int, int] = {}  # -> requests that came on it

    async def handle(self, request: web.Request) -> web.Response:
        await request.read()
        self.num_requests += 1
        assert request.transport is not None
        key = id(request.transport)
        self.connections[key] = self.connections.get(key, 0) + 1
        if self.connections[key] == 2:
            request.transport.abort()
        return web.Response(body=b"ok")


async def test_a_kept_connection_that_was_closed_costs_nothing(serve: Serve) -> None:
    """What was sent on it is sent again on a new one, to the same replica."""
    kept = Kept()
    url = await serve(kept.handle)
    async with Upstream(ForwardConfig()) as upstream:
        answers = [await ask(upstream, url) for _ in range(2)]

    assert [answer.first for answer in answers] == [b"ok", b"ok"]
    assert kept.num_requests == 3


async def test_what_breaks_off_later_was_being_worked_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not sent again here: whether it may be is for the caller to say."""
    monkeypatch.setattr(module, "STALE_S", 0.0)
    kept = Kept()
    url = await serve(kept.handle)
    async with Upstream(ForwardConfig()) as upstream:
        await ask(upstream, url)
        with pytest.raises(UpstreamBroken):
            await ask(upstream, url)

    assert kept.num_requests == 2


async def test_what_may_not_be_sent_twice_goes_on_a_new_connection(serve: Serve) -> None:
    """Then there is nothing to send again."""
    kept = Kept()
    url = await serve(kept.handle)
    async with Upstream(ForwardConfig()) as upstream:
        for may_resend in (True, False, False):
            await ask(upstream, url, may_resend=may_resend)

    assert kept.num_requests == 3


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)  # the lowest that is free
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_descriptors_used_up_are_ours(serve: Serve) -> None:
    """No replica is said to have refused anything, neither by a request nor by a probe."""

    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=b"ok")

    url = await serve(handler)
    async with Upstream(ForwardConfig()) as upstream, EngineApi(timeout_s=5.0) as api:
        with no_descriptors():
            with pytest.raises(OutOfConnections, match="EMFILE"):
                await ask(upstream, url)
            with pytest.raises(NotAsked, match="EMFILE"):
                await api.ping("r1", url)
        assert (await ask(upstream, url)).first == b"ok"


async def test_requests_at_replicas_are_capped(serve: Serve) -> None:
    """Beyond it none is opened; what ends makes room, however it ends."""
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def handler(_: web.Request) -> web.Response:
        reached.set()
        await go_on.wait()
        return web.Response(body=b"ok")

    url = await serve(handler)
    async with Upstream(ForwardConfig(max_connections=1)) as upstream:
        async with asyncio.TaskGroup() as tg:
            first = tg.create_task(ask(upstream, url))
            await reached.wait()
            with pytest.raises(OutOfConnections, match="max_connections"):
                await ask(upstream, url)
            go_on.set()
        assert first.result().first == b"ok"
        with pytest.raises(UpstreamUnreachable):
            await ask(upstream, f"http://127.0.0.1:{free_port()}/")
        assert (await ask(upstream, url)).first == b"ok"


async def _letters(request: web.Request) -> web.StreamResponse:
    """Write a, b, c, each by itself, then what the query says: end, abort or sleep."""
    response = web.StreamResponse()
    await response.prepare(request)
    for letter in (b"a", b"b", b"c"):
        await response.write(letter)
        await asyncio.sleep(0.02)
    if request.query_string == "abort":
        assert request.transport is not None
        request.transport.abort()
    elif request.query_string == "sleep":
        await asyncio.sleep(60)
    return response


async def _get(upstream: Upstream, url: str) -> Answer:
    return await upstream.open("r1", url, method="GET", headers=CIMultiDict(), body=None)


async def test_a_body_is_poured_as_it_comes(serve: Serve) -> None:
    """Piece by piece; the connection then serves other requests as if nothing had been."""
    url = await serve(_letters)
    async with Upstream(ForwardConfig()) as upstream:
        for _ in range(3):
            answer = await _get(upstream, url)
            pieces = [answer.first]

            def take(piece: bytes, _: bytes | None, pieces: list[bytes] = pieces) -> bool:
                pieces.append(piece)
                return True

            await answer.pour(take)
            assert answer.complete
            assert b"".join(pieces) == b"abc"
            answer.close()


async def test_pouring_stops_where_no_more_is_wanted_and_goes_on(serve: Serve) -> None:
    """What comes in between waits; the deadline does not run meanwhile."""
    url = await serve(_letters)
    async with Upstream(ForwardConfig(idle_timeout_s=0.4)) as upstream:
        answer = await _get(upstream, url)
        pieces = [answer.first]

        def take(piece: bytes, _: bytes | None) -> bool:
            pieces.append(piece)
            return False

        while not answer.complete:
            await answer.pour(take)
            await asyncio.sleep(0.5)  # longer than the deadline
        answer.close()

    assert b"".join(pieces) == b"abc"


@pytest.mark.parametrize(("end", "error"), [("abort", UpstreamBroken), ("sleep", UpstreamTimeout)])
async def test_what_is_poured_breaks_off(
    serve: Serve, end: str, error: type[UpstreamBroken] | type[UpstreamTimeout]
) -> None:
    """By name, after all that came before."""
    url = await serve(_letters)
    async with Upstream(ForwardConfig(idle_timeout_s=1.0)) as upstream:
        answer = await _get(upstream, f"{url}?{end}")
        pieces = [answer.first]

        def take(piece: bytes, _: bytes | None) -> bool:
            pieces.append(piece)
            return True

        with pytest.raises(error):
            await answer.pour(take)
        answer.close()

    assert b"".join(pieces) == b"abc"


async def test_who_takes_may_fail(serve: Serve) -> None:
    """Its error is the caller's, and the replica's connection is not to blame."""
    url = await serve(_letters)
    async with Upstream(ForwardConfig()) as upstream:
        answer = await _get(upstream, url)

        def take(piece: bytes, _: bytes | None) -> bool:
            raise ConnectionResetError("the client disconnected")

        with pytest.raises(ConnectionResetError, match="the client disconnected"):
            await answer.pour(take)
        answer.close()


@asynccontextmanager
async def raw_server(answer: bytes) -> AsyncIterator[str]:
    """Serve bytes once a request has begun; then close its connection."""
    served: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        with suppress(ConnectionError):  # the client disconnected
            await reader.readexactly(1)
            writer.write(answer)
            await writer.drain()
            writer.write_eof()
            while await reader.read(1 << 16):  # a reset would take the answer with it
                pass
            writer.close()
            await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}/"
        await asyncio.gather(*[task for task in served if task is not None])


_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" + _OK,
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + _OK,
        b"HTTP/1.0 200 OK\r\n\r\nok",
    ],
)
async def test_an_answer_is_read_as_http_has_it(answer: bytes) -> None:
    """What comes before the final head is passed over; without a length its end is the end."""
    async with raw_server(answer) as url, Upstream(ForwardConfig()) as upstream:
        got = await ask(upstream, url)

    assert (got.status, got.first, got.complete) == (200, b"ok", True)


async def test_the_answer_to_a_head_has_no_body() -> None:
    """Though its length is declared."""
    async with raw_server(_OK.removesuffix(b"ok")) as url, Upstream(ForwardConfig()) as upstream:
        answer = await upstream.open("r1", url, method="HEAD", headers=CIMultiDict(), body=None)
        answer.close()

    assert (answer.status, answer.first, answer.complete) == (200, b"", True)
    assert answer.headers["Content-Length"] == "2"


async def test_what_is_no_http_is_broken() -> None:
    """As an answer that broke off is."""
    async with raw_server(b"SSH-2.0-OpenSSH_9.6\r\n") as url, Upstream(ForwardConfig()) as upstream:
        with pytest.raises(UpstreamBroken):
            await ask(upstream, url)


async def test_an_answer_may_come_before_all_of_a_large_body_was_read() -> None:
    """It is the answer: what was wrong stands in it."""
    refusal = b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno"
    async with raw_server(refusal) as url, Upstream(ForwardConfig()) as upstream:
        answer = await upstream.open(
            "r1", url, method="POST", headers=CIMultiDict(), body=bytes(8 << 20)
        )
        await answer.gather(1 << 20)
        answer.close()

    assert (answer.status, answer.first) == (413, b"no")
