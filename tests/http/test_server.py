"""router.http.server and its connections, on raw sockets: limits, time-outs, what is not HTTP."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from socket import create_connection
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest
from aiohttp import web

from router import config
from router import run as running
from router.assembly import Router
from router.base.errors import ConfigError
from router.http import server
from router.http.server import Connection
from router.run import run
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import (
    PATIENCE_S,
    SECRET,
    SLOW,
    STUCK,
    Engines,
    RawClient,
    Stage,
    chat,
    num_running,
    on_stage,
    streamed,
    words,
)

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
LONG = {"max_tokens": 2000, "ignore_eos": True}
NO_REDIS = "redis://127.0.0.1:9"  # configured, and nobody listens there


def posted(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def ready(stage: Stage) -> int:
    return (await stage.ask(None, "/readyz", method="GET")).status


def ended(stage: Stage, reason: str) -> float:
    return stage.metric("warmroute_connections_ended_total", reason=reason)


def connections(stage: Stage) -> list[Connection]:
    return list(stage.router.listeners[0].connections)


# -- the end of a router -------------------------------------------------------------------------


async def test_a_router_that_ends_is_not_ready_first_and_serves_on() -> None:
    """New connections, and old ones: each answer is then its connection's last."""
    async with Engines(1) as (engine,):
        async with on_stage(engine, listen__drain_grace_s=60.0) as stage:
            async with RawClient.connected(stage.url) as client:
                await client.send(b"GET /readyz HTTP/1.1\r\nHost: r\r\n\r\n")
                assert await client.status() == 200
                stage.stop.set()
                await stage.until(lambda: stage.router.draining.reason)

                assert await ready(stage) == 503
                served = await stage.ask(chat(words(1)))
                assert (served.status, served.headers["Connection"]) == (200, "close")
                body = orjson.dumps(chat(words(1)))
                await client.send(posted(body))
                head = await client.head()
                assert b" 200 " in head
                assert b"Connection: close" in head
                await client.rest()
            stage.router.draining.end_now()


class Front:
    """What a front end does: it probes, chooses a ready router, and repeats what was not sent."""

    def __init__(self, stages: list[Stage]) -> None:
        self._stages = stages
        self._num_missed = dict.fromkeys((stage.url for stage in stages), 0)
        self.answered: list[tuple[int, str]] = []

    async def probe(self) -> None:
        async with aiohttp.ClientSession() as client:
            while True:
                for url in self._num_missed:
                    self._num_missed[url] += 1
                    with suppress(aiohttp.ClientError):
                        async with client.get(url + "/readyz") as answer:
                            if answer.status == 200:
                                self._num_missed[url] = 0
                await asyncio.sleep(0.05)

    async def send(self, client: aiohttp.ClientSession, number: int) -> None:
        urls = sorted(self._num_missed, key=lambda url: self._num_missed[url] >= 2)
        if self._num_missed[urls[1]] < 2:
            urls = urls[number % 2 :] + urls[: number % 2]
        for url in urls:
            with suppress(aiohttp.ClientConnectorError):  # nothing was sent
                async with client.post(
                    url + "/v1/chat/completions", json=chat(words(number))
                ) as answer:
                    await answer.read()
                    self.answered.append((answer.status, url))
                    return
        raise AssertionError("no router took it")


async def test_a_router_that_ends_behind_a_front_end_loses_no_request() -> None:
    """Clients on kept connections go on meanwhile; then all is at the other router."""
    async with Engines(1) as engines, on_stage(*engines) as other:
        async with on_stage(*engines, listen__drain_grace_s=1.0) as ending:
            front = Front([ending, other])

            async def talk(first: int) -> None:
                async with aiohttp.ClientSession() as client:
                    number = first
                    while has_ended.is_set() is False or number < first + 5:
                        await front.send(client, number)
                        number += 1

            has_ended = asyncio.Event()
            async with asyncio.TaskGroup() as tg:
                probing = tg.create_task(front.probe())
                talking = [tg.create_task(talk(1000 * n)) for n in range(4)]
                await ending.until(lambda: len({url for _, url in front.answered}) == 2)
                ending.stop.set()
                await ending.until(lambda: ending.router.draining.reason)
                await ending.until(lambda: not ending.router.listeners[0].is_listening)
                await ending.until(lambda: not connections(ending))
                has_ended.set()
                for task in talking:
                    await task
                probing.cancel()

    assert {status for status, _ in front.answered} == {200}
    assert front.answered[-1][1] == other.url


async def test_a_router_that_is_not_ready_takes_nothing_of_a_shared_port() -> None:
    """It has the port and an admin port, and listens once there is something to route to."""
    shared: dict[str, Any] = {"listen__shared": True, "redis__url": NO_REDIS}
    async with Engines(1) as engines, on_stage(*engines, **shared) as ready:
        flags: dict[tuple[str, ...], Any] = {
            ("listen", "port"): urlsplit(ready.url).port,
            ("listen", "shared"): True,
            ("admin", "port"): 0,
            ("redis", "url"): NO_REDIS,
            ("replicas",): ["http://127.0.0.1:1"],
        }
        late = Router(config.load(flags=flags), peer_name=None, redis_password=None)
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tg:
            tg.create_task(run(late, stop, lambda *_: None))
            await ready.until(lambda: late.listeners and late.listeners[1].is_listening)
            statuses = [(await ready.ask(chat(words(number)))).status for number in range(20)]
            stop.set()

        assert statuses == [200] * 20
        assert ready.metric("warmroute_requests_total") == 20


async def test_a_port_that_is_not_shared_is_had_by_one() -> None:
    """Whichever of the two came first."""
    async with Engines(1) as engines:
        for has in (False, True):
            redis: dict[str, Any] = {"redis__url": NO_REDIS}
            async with on_stage(*engines, listen__shared=has, **redis) as stage:
                port = urlsplit(stage.url).port
                refused = pytest.RaisesExc(ConfigError, match=f"cannot listen on 127.0.0.1:{port}")
                with pytest.RaisesGroup(refused, flatten_subgroups=True):
                    async with on_stage(
                        *engines, listen__port=port, listen__shared=not has, **redis
                    ):
                        pass


async def test_streams_end_before_the_router_does() -> None:
    """Nothing new is accepted meanwhile; an idle connection is closed."""
    async with Engines(1, time_model=SLOW) as (engine,):
        async with on_stage(engine, is_idle=False) as stage:
            async with RawClient.connected(stage.url) as idle, asyncio.TaskGroup() as tg:
                await idle.send(b"GET /readyz HTTP/1.1\r\nHost: r\r\n\r\n")
                assert await idle.status() == 200
                body = streamed(chat(words(1), max_tokens=50, ignore_eos=True))
                asked = tg.create_task(stage.ask(body))
                await stage.until(lambda: num_running(engine))
                stage.stop.set()
                assert await idle.rest() == b""
                try:
                    await asyncio.open_connection("127.0.0.1", int(stage.url.rpartition(":")[2]))
                except ConnectionRefusedError:
                    refused = True

    assert refused
    assert asked.result().events[-1] == "[DONE]"


async def test_clients_learn_what_is_cut_at_the_end() -> None:
    """A stream by an error event, a whole answer by a 503, as soon as `drain_s` is over."""
    async with Engines(2, time_model=SLOW) as engines:
        async with on_stage(*engines, listen__drain_s=0.1, is_idle=False) as stage:
            async with asyncio.TaskGroup() as tg:
                stream = tg.create_task(stage.ask(streamed(chat(words(1), **LONG))))
                whole = tg.create_task(stage.ask(chat(words(2), **LONG)))
                await stage.until(lambda: sum(map(num_running, engines)) == 2)
                stage.stop.set()

    assert stream.result().status == 200
    assert stream.result().events[-1]["error"]["code"] == 503
    assert whole.result().status == 503
    assert whole.result().headers["Retry-After"] == "1"
    assert whole.result().error["type"] == "ServiceUnavailableError"
    assert not any(map(num_running, engines))


async def test_a_second_signal_ends_at_once() -> None:
    """Whatever phase it is in; what is cut gets an error all the same."""
    async with Engines(1, time_model=STUCK) as (engine,):
        async with on_stage(engine, listen__drain_s=600.0, is_idle=False) as stage:
            async with asyncio.TaskGroup() as tg:
                whole = tg.create_task(stage.ask(chat(words(1))))
                await stage.until(lambda: num_running(engine))
                stage.stop.set()
                await stage.until(lambda: stage.router.draining.reason)
                stage.router.draining.end_now()

    assert whole.result().status == 503


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_sigterm_within_a_moment_is_the_same_order(
    monkeypatch: pytest.MonkeyPatch, first: signal.Signals
) -> None:
    """Later, or by a person at the terminal, it means now."""
    handlers: dict[int, Callable[[], None]] = {}

    def add(number: int, call: Callable[..., None], *args: object) -> None:
        handlers[number] = partial(call, *args)

    def remove(number: int) -> bool:
        return handlers.pop(number, None) is not None

    async with Engines(1) as (engine,), on_stage(engine) as stage:
        loop = mock.Mock(add_signal_handler=add, remove_signal_handler=remove)
        loop.time.return_value = 10.0
        monkeypatch.setattr(running.asyncio, "get_running_loop", lambda: loop)
        stop = asyncio.Event()
        running._handle_signals(stage.router, stop, None)
        monkeypatch.undo()
        handlers[first]()
        assert stop.is_set()
        loop.time.return_value = 11.9
        handlers[signal.SIGTERM]()
        assert not stage.router.draining._now.is_set()
        loop.time.return_value = 12.1
        handlers[signal.SIGTERM]()
        assert stage.router.draining._now.is_set()
        assert signal.SIGINT not in handlers


async def test_a_body_that_arrives_during_the_drain_is_answered() -> None:
    """The request was there before the end began: its other half is read."""
    body = orjson.dumps(chat(words(1)))
    async with Engines(1) as (engine,), on_stage(engine, is_idle=False) as stage:
        async with RawClient.connected(stage.url) as client:
            await client.send(posted(body)[:-20])
            await stage.until(lambda: stage.metric("warmroute_connections") == 1)
            await stage.until(lambda: not any(c.is_idle for c in connections(stage)))
            stage.stop.set()
            await stage.until(lambda: stage.router.draining.reason)
            await client.send(body[-20:])
            assert b" 200 " in await client.head()
            await client.rest()


async def test_what_was_sent_before_the_end_is_answered() -> None:
    """On an open connection, and on one that only the kernel has accepted."""

    def received(client: socket.socket) -> bytes:
        return b"".join(iter(partial(client.recv, 65_536), b""))

    body = orjson.dumps(chat(words(1)))
    async with Engines(1) as (engine,), on_stage(engine, is_idle=False) as stage:
        listener = stage.router.listeners[0]
        address = urlsplit(stage.url).hostname, urlsplit(stage.url).port
        with create_connection(address) as kept, create_connection(address) as fresh:
            kept.sendall(b"GET /healthz HTTP/1.1\r\nHost: r\r\n\r\n")
            assert b" 200 " in await asyncio.to_thread(kept.recv, 65_536)
            with create_connection(address) as queued:
                for client in (kept, fresh, queued):  # the loop sees none of it
                    client.sendall(posted(body))
                listener.take_queued()
                listener.close()
                num_busy = listener.close_idle()

                answers = [asyncio.to_thread(received, each) for each in (kept, fresh, queued)]
                assert [b" 200 " in each[:20] for each in await asyncio.gather(*answers)] == [
                    True
                ] * 3
    assert num_busy == 3


# -- connections ---------------------------------------------------------------------------------


async def test_a_client_that_reads_nothing_is_cut() -> None:
    """Within `limits.write_timeout_s`: the engine's work ends, the lease is given back."""

    async def writes(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: " + b"x" * 65_536 + b"\n\n")

    async with (
        FakeEngine(writes) as engine,
        on_stage(engine, limits__write_timeout_s=0.5) as stage,
        RawClient.connected(stage.url) as client,
    ):
        await client.send(posted(orjson.dumps(streamed(chat("a")))))
        async with asyncio.timeout(60):
            await engine.left.wait()

        assert ended(stage, "write_timeout") == 1
        await stage.until(lambda: not stage.leftovers())
        await stage.until(lambda: stage.metric("warmroute_connections") == 0)


def test_what_the_clients_kernel_takes_counts() -> None:
    """Though our own buffer looks as full as before: a slow reader is not cut."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        wire, _ = listening.accept()
    connection = Connection.__new__(Connection)
    connection._wire, connection._stalled_since_s, connection._acked = wire, None, -1
    connection.stream = mock.Mock()
    connection.stream.get_write_buffer_size.return_value = 65_536
    with client, wire:
        assert connection.stalled_s(0.0) == 0.0
        assert connection.stalled_s(5.0) == 5.0
        wire.sendall(bytes(1000))
        client.recv(1000)
        deadline_s = time.monotonic() + PATIENCE_S
        while connection.stalled_s(6.0) and time.monotonic() < deadline_s:  # until it is acked
            time.sleep(0.01)
        assert connection.stalled_s(9.0) == 3.0


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: r\r\nX-Slow: "])
async def test_a_client_that_sends_no_headers_is_cut(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None at all, or never the rest of them."""
    monkeypatch.setattr(server, "HEADER_TIMEOUT_S", 0.3)
    async with Engines(1) as engines, on_stage(*engines) as stage:
        async with RawClient.connected(stage.url) as client:
            await client.send(sent)
            assert await client.rest() == b""

        assert ended(stage, "header_timeout") == 1


async def test_an_idle_connection_is_closed() -> None:
    """Also one whose next headers never end."""
    async with Engines(1) as engines, on_stage(*engines, limits__keepalive_timeout_s=0.3) as stage:
        async with RawClient.connected(stage.url) as client:
            await client.send(b"GET /healthz HTTP/1.1\r\nHost: r\r\n\r\nGET /he")
            assert await client.status() == 200
            assert await client.rest() == b""


async def test_connections_beyond_the_limit_are_refused() -> None:
    """By a 503 in the API's shape; when one ends there is room again."""
    async with Engines(1) as engines, on_stage(*engines, limits__connections=2) as stage:
        async with RawClient.connected(stage.url) as first:
            async with RawClient.connected(stage.url) as second:
                for each in (first, second):
                    await each.send(b"GET /healthz HTTP/1.1\r\nHost: r\r\n\r\n")
                    assert await each.status() == 200
                refused = await stage.ask(None, "/healthz", method="GET")
            await stage.until(lambda: stage.metric("warmroute_connections") == 1)
            served = await stage.ask(None, "/healthz", method="GET")

        assert (refused.status, served.status) == (503, 200)
        assert refused.headers["Retry-After"] == "1"
        assert "limits.connections" in refused.error["message"]
        assert ended(stage, "limit") == 1


async def test_no_descriptor_left_is_survived() -> None:
    """What is open is served, new clients wait, nothing spins, no replica is blamed."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        async with RawClient.connected(stage.url) as old, AsyncExitStack() as stack:
            await old.send(b"GET /healthz HTTP/1.1\r\nHost: r\r\n\r\n")
            assert await old.status() == 200
            waiting = socket.socket()
            stack.callback(waiting.close)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            taken = os.dup(0)
            os.close(taken)
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken, limits[1]))
            waiting.connect(("127.0.0.1", int(stage.url.rpartition(":")[2])))
            await stage.until(lambda: ended(stage, "descriptors"))
            await old.send(b"GET /healthz HTTP/1.1\r\nHost: r\r\n\r\n")
            assert await old.status() == 200
            before = ended(stage, "descriptors")
            await asyncio.sleep(0.3)
            assert ended(stage, "descriptors") <= before + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            waiting.settimeout(0)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(waiting, b"GET /healthz HTTP/1.1\r\nHost: r\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                assert b" 200 " in await loop.sock_recv(waiting, 1000)

        assert stage.metric("warmroute_replica_healthy") == 1


# -- framing -------------------------------------------------------------------------------------


async def test_a_body_refused_by_its_length_is_not_asked_for() -> None:
    """`Expect: 100-continue`: 413 at once; within the limit 100, then the answer."""
    body = orjson.dumps(chat("a"))
    expects = POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    async with FakeEngine() as engine, on_stage(engine) as stage:
        async with RawClient.connected(stage.url) as client:
            await client.send(expects % 99_999_999_999)
            head = await client.head()
            assert b" 413 " in head
            assert b"Connection: close" in head
        async with RawClient.connected(stage.url) as client:
            await client.send(expects % len(body))
            assert b" 100 " in await client.head()
            await client.send(body)
            assert await client.status() == 200
        assert len(engine.received) == 1
        reply = await stage.ask(chat("a"), headers={"Expect": "200-maybe"})
        assert (reply.status, reply.error["param"]) == (400, "Expect")


@pytest.mark.parametrize(
    ("headers", "version"),
    [
        (b"Transfer-Encoding: gzip, chunked\r\n", b"1.1"),
        (b"Transfer-Encoding: gzip\r\n", b"1.1"),
        (b"Transfer-Encoding: chunked, gzip\r\n", b"1.1"),
        (b"Transfer-Encoding: identity\r\n", b"1.1"),
        (b"Transfer-Encoding: xchunked\r\n", b"1.1"),
        (b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n", b"1.1"),
        (b"Transfer-Encoding : chunked\r\n", b"1.1"),
        (b"Transfer-Encoding: chunked\r\n", b"1.0"),
        (b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", b"1.1"),
        (b"Content-Length: 3\r\nContent-Length: 4\r\n", b"1.1"),
        (b"Content-Length: +3\r\n", b"1.1"),
        (b"X-Folded: 1\r\n 2\r\nTransfer-Encoding: chunked\r\n", b"1.1"),
        (b"Host: other\r\nTransfer-Encoding: chunked\r\n", b"1.1"),
    ],
)
async def test_odd_framing_is_refused(headers: bytes, version: bytes) -> None:
    """Whatever another server could read differently: nothing of it reaches an engine."""
    body = orjson.dumps(chat("a"))
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    async with FakeEngine() as engine, on_stage(engine) as stage:
        async with RawClient.connected(stage.url) as client:
            await client.send(POST.replace(b"1.1", version) + headers + b"\r\n" + chunked)
            head = await client.head()
            said = await client.rest()

        assert b" 400 " in head
        assert orjson.loads(said)["error"]["code"] == 400
        assert engine.received == []


async def test_too_many_headers_are_refused() -> None:
    """More than 128, in the API's shape."""
    many = b"".join(b"X-%d: 1\r\n" % number for number in range(130))
    async with Engines(1) as engines, on_stage(*engines) as stage:
        async with RawClient.connected(stage.url) as client:
            await client.send(POST + many + b"\r\n")
            assert b" 431 " in await client.head()
            assert orjson.loads(await client.rest())["error"]["code"] == 431


async def test_a_flood_of_garbage_is_one_line_in_the_log() -> None:
    """Each is counted and answered; nothing is quoted."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        for _ in range(50):
            async with RawClient.connected(stage.url) as client:
                await client.send(SECRET.encode() + b" no http\r\n\r\n")
                assert b" 400 " in await client.head()

        assert ended(stage, "not_http") == 50
        assert stage.log.count("client connections refused or cut") == 2  # in both log forms
        assert "Traceback" not in stage.log
