"""router.cluster.redis_connection: ways to the server, and what is said where there is none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import redis
from aiohttp import web
from redis.asyncio.connection import AbstractConnection

from router.base.errors import StoreError, StoreRefused, StoreUnavailable
from router.base.messages import Alive
from router.cluster.redis_connection import RedisConnection
from router.cluster.redis_store import RedisStore, Written
from tests.cluster.redis_stores import R1, blocks, config, opened, stored
from tests.conftest import Serve
from tests.redis_servers import (
    RedisServer,
    Start,
    binary,
    make_certificate,
    start_sentinel,
    start_tls,
)
from tests.waiting import until

SECRET = "hunter2"


async def refused(url: str | None, password: str | None = None, **options: object) -> str:
    """Open in vain; give the message, which never holds the password."""
    with pytest.raises(StoreRefused) as caught:
        async with opened(url, password=password, **options):
            pass
    assert SECRET not in caught.value.message
    return caught.value.message


@asynccontextmanager
async def listening(answer: bytes, *, to: bytes = b"") -> AsyncIterator[int]:
    """Listen, and give `answer` to one command, or at once; gives the port."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if not to:
            writer.write(answer)
        while data := await reader.read(10_000):
            if to:
                writer.write(b"+OK\r\n" * data.count(b"SETINFO") + answer * (to in data))

    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()
            await writer.wait_closed()


# -- passwords, TLS, sockets ---------------------------------------------------------------------


@pytest.mark.parametrize("version", ["6.2", "7"])
async def test_a_password_is_needed_and_hinted_at(start_redis: Start, version: str) -> None:
    """Missing, wrong, right, or given where none is wanted."""
    server = start_redis(version, requirepass=SECRET)

    assert "WARMROUTE_REDIS_PASSWORD or redis.password_file" in await refused(server.url)
    assert "wrong password" in await refused(server.url, "hunter3")
    assert "wrong password" in await refused(server.url, SECRET, username="unknown")
    async with opened(server.url, password=SECRET) as store:
        assert (await store.beat(b"")).routers == {"router-1"}
    assert "no password, but one is configured" in await refused(start_redis(version).url, SECRET)


@pytest.mark.parametrize("version", ["6.2", "7"])
async def test_an_acl_user_with_few_rights_will_do(start_redis: Start, version: str) -> None:
    """Those that the message about a missing right names."""
    server = start_redis(version)
    rights = (
        "~{wr:* resetchannels &{wr:* +@read +@write +@scripting +@connection +@pubsub +info +time"
    ).split()
    server.client.execute_command("ACL", "SETUSER", "router", "on", f">{SECRET}", *rights)
    server.client.execute_command("ACL", "SETUSER", "poor", "on", f">{SECRET}", "+@connection")

    async with opened(server.url, password=SECRET, username="router") as store:
        await store.hold([R1])
        assert await store.write([stored(R1, [1])]) == [Written.OK]
        assert await blocks(store, [R1]) == {(R1, "gpu"): {1}}
        await (await store.subscribe()).close()
        await store.publish([Alive()])
    assert "lacks a right" in await refused(server.url, SECRET, username="poor")


async def test_a_user_without_the_right_to_info_is_served(start_redis: Start) -> None:
    """What happens when its memory is full is not known then."""
    server = start_redis()
    rights = "~{wr:* +@read +@write +@scripting +@connection".split()
    server.client.execute_command("ACL", "SETUSER", "router", "on", f">{SECRET}", *rights)
    async with opened(server.url, password=SECRET, username="router"):
        pass


@pytest.fixture(scope="module")
def tls_redis(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RedisServer, Path]]:
    """Give a server that speaks TLS alone, and its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = make_certificate(folder)
    server = start_tls(folder, certificate, key, ca=certificate)
    yield server, certificate
    server.stop()


async def test_tls_with_a_ca_of_ones_own(tls_redis: tuple[RedisServer, Path]) -> None:
    """Trusted by `redis.ca_file`, and not without."""
    server, certificate = tls_redis
    url = f"rediss://127.0.0.1:{server.port}/0"

    async with opened(url, ca_file=certificate) as store:
        assert (await store.beat(b"")).routers == {"router-1"}
        assert await _published(store)
    assert "see redis.ca_file" in await refused(url)


async def test_tls_on_one_side_only_is_named(
    tls_redis: tuple[RedisServer, Path], start_redis: Start
) -> None:
    """The server's side, or ours."""
    with pytest.raises(StoreUnavailable):
        async with opened(f"redis://127.0.0.1:{tls_redis[0].port}/0"):
            pass
    plain = start_redis()
    with pytest.raises(StoreError, match="speak TLS"):  # it waits for the end of a line, or not
        async with opened(f"rediss://127.0.0.1:{plain.port}/0", timeout_s=2.0):
            pass


async def test_a_unix_socket_will_do(start_redis: Start, tmp_path: Path) -> None:
    """With a database."""
    path = tmp_path / "redis.sock"
    server = start_redis(unixsocket=str(path))

    async with opened(f"unix://{path}?db=3") as store:
        facts = await store.open()
        assert await _published(store)

    assert facts.address == str(path)
    server.client.select(3)
    assert redis.Redis(unix_socket_path=str(path), db=3).keys() == [b"{wr:default}:meta"]


# -- wrong servers -------------------------------------------------------------------------------


async def test_what_is_not_redis_is_named(serve: Serve) -> None:
    """A web server, or anything that answers otherwise."""

    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    url = await serve(hello)
    assert "is not Redis" in await refused(url.replace("http:", "redis:"))
    async with listening(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        assert "is not Redis" in await refused(f"redis://127.0.0.1:{port}")
    async with listening(b":1\r\n", to=b"HELLO") as port:
        assert "is version 0" in await refused(f"redis://127.0.0.1:{port}")
    async with listening(b"-ERR unknown command 'HELLO'\r\n", to=b"HELLO") as port:
        assert "no Redis of version 6.2" in await refused(f"redis://127.0.0.1:{port}")


async def test_an_old_redis_is_refused() -> None:
    """With the version it has."""
    fields = {"server": "redis", "version": "6.0.16", "mode": "standalone", "role": "master"}
    words = [word for pair in fields.items() for word in pair]
    answer = f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
    async with listening(answer.encode(), to=b"HELLO") as port:
        assert "is version 6.0.16; 6.2 is the oldest" in await refused(f"redis://127.0.0.1:{port}")


async def test_a_node_of_a_cluster_is_refused(start_redis: Start) -> None:
    """With what to use, also if the URL names a database, which a Cluster lacks."""
    node = start_redis(cluster_enabled="yes")
    for url in (node.url, node.url.replace("/0", "/1")):
        assert "use a Redis of its own" in await refused(url)


@pytest.mark.parametrize(
    "reply", ["MOVED 3999 127.0.0.1:6381", "ASK 3999 127.0.0.1:6381", "CLUSTERDOWN x"]
)
async def test_an_answer_of_a_cluster_is_a_refusal(reply: str) -> None:
    async with listening(f"-{reply}\r\n".encode(), to=b"HELLO") as port:
        assert "use a Redis of its own" in await refused(f"redis://127.0.0.1:{port}")


async def test_a_replica_is_refused(start_redis: Start) -> None:
    """Its master must be named; the same when it becomes one later."""
    master, replica = start_redis(), start_redis()
    async with opened(replica.url) as store:
        replica.client.execute_command("REPLICAOF", "127.0.0.1", master.port)

        with pytest.raises(StoreRefused, match=r"name its master in redis\.url"):
            await store.beat(b"")
    assert "name its master in redis.url" in await refused(replica.url)


async def test_no_server_at_the_address_is_unavailable(start_redis: Start) -> None:
    """Refused, silent, or not ready yet."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        store = RedisStore(
            config(f"redis://127.0.0.1:{deaf.getsockname()[1]}"), router="r", password=None
        )
        with pytest.raises(StoreUnavailable, match=r"refused|Connect"):
            await store.open()
        deaf.listen()
        silent = config(f"redis://127.0.0.1:{deaf.getsockname()[1]}", timeout_s=0.2)
        store = RedisStore(silent, router="r", password=None)
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await store.open()
    async with listening(b"-LOADING soon\r\n", to=b"HELLO") as port:
        with pytest.raises(StoreUnavailable, match="soon"):
            async with opened(f"redis://127.0.0.1:{port}"):
                pass


async def test_commands_in_flight_fail_when_the_server_dies(start_redis: Start) -> None:
    """With a StoreUnavailable each, not with what the others' clean-up does to its connection."""
    server = start_redis()
    async with opened(server.url) as store:

        async def wait(number: int) -> str:
            try:
                await (_next_note(store) if number % 2 else _beat_on(store))
            except StoreUnavailable:
                return "unavailable"
            return "done"

        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(wait(number)) for number in range(12)]
            await until(lambda: server.client.info("clients")["connected_clients"] > 6)
            server.stop()

        assert {task.result() for task in waiting} == {"unavailable"}


async def _published(store: RedisStore) -> bytes:
    """Publish a note, and receive it."""
    notes = await store.subscribe()
    try:
        await store.publish([Alive()])
        async with asyncio.timeout(30.0):
            return await notes.next()
    finally:
        await notes.close()


async def _next_note(store: RedisStore) -> None:
    notes = await store.subscribe()
    try:
        await notes.next()
    finally:
        await notes.close()


async def _beat_on(store: RedisStore) -> None:
    while True:
        await store.beat(b"")


# -- Sentinel -------------------------------------------------------------------------------------


async def test_a_sentinel_is_distinguished_from_a_master(
    start_redis: Start, tmp_path: Path
) -> None:
    """In the URL it is wrong; and a service that it does not know is named."""
    sentinel = start_sentinel(binary("6.2"), tmp_path / "sentinel", start_redis(), "main")
    try:
        assert "name it in redis.sentinels" in await refused(sentinel.url)
        with pytest.raises(StoreUnavailable, match="no master 'other' at"):
            async with opened(
                None, sentinels=(f"127.0.0.1:{sentinel.port}",), sentinel_service="other"
            ):
                pass
    finally:
        sentinel.stop()


async def test_a_close_that_is_cancelled_cuts_all_the_same(start_redis: Start) -> None:
    """No other code knows those connections: they would stay open for as long as the process."""
    redis = start_redis()
    connection = RedisConnection(config(redis.url), password=None)
    async with asyncio.TaskGroup() as tg:
        for _ in range(3):
            tg.create_task(connection.ask("PING"))
    async with asyncio.TaskGroup() as tg:
        task = tg.create_task(connection.close())
        await asyncio.sleep(0)  # it has begun
        task.cancel()

    await until(lambda: len(redis.client.client_list()) == 1)


async def test_a_connection_that_closes_under_a_command_is_a_lost_connection(
    start_redis: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop raises RuntimeError for a write to a transport that has just closed."""

    async def write(self: AbstractConnection, command: object) -> None:
        raise RuntimeError("unable to perform operation; the handler is closed")

    async with opened(start_redis("7").url) as store:
        monkeypatch.setattr(AbstractConnection, "send_packed_command", write)
        with pytest.raises(StoreUnavailable):
            await store.beat(b"")

        monkeypatch.undo()
        assert (await store.beat(b"")).routers == {"router-1"}


# -- replies -------------------------------------------------------------------------------------


@asynccontextmanager
async def between(server: RedisServer) -> AsyncIterator[tuple[int, list[asyncio.StreamWriter]]]:
    """Stand between clients and a server; gives the port, and what writes to each client."""
    clients: list[asyncio.StreamWriter] = []

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.append(writer)
        served.append(asyncio.current_task())
        there, back = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.TaskGroup() as tg:
            tg.create_task(pipe(reader, back))
            tg.create_task(pipe(there, writer))

    served: list[asyncio.Task[None] | None] = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as proxy:
        yield proxy.sockets[0].getsockname()[1], clients
        for client in clients:
            client.close()
        await asyncio.gather(*[task for task in served if task is not None])


async def test_a_reply_that_no_command_asked_for_ends_its_connection(start_redis: Start) -> None:
    """Else each command would get the reply of the one before it."""
    async with between(start_redis()) as (port, clients):
        connection = RedisConnection(config(f"redis://127.0.0.1:{port}/0"), password=None)
        for name in (b"a", b"b", b"c"):
            assert await connection.ask("ECHO", name) == name
            num_connections = len(clients)
            clients[-1].write(b"$5\r\nstray\r\n")
            await clients[-1].drain()
            await asyncio.sleep(0.05)
            assert await connection.ask("ECHO", b"after " + name) == b"after " + name
            assert len(clients) == num_connections + 1
        await connection.close()
