"""router.base.host_names: which addresses a name has; every client of the router asks it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from aiohttp import web
from multidict import CIMultiDict

from loadtest.emulator.pool import EmulatedPool, PoolMaster
from router.base import host_names as module
from router.base.errors import (
    HostUnknown,
    PoolGone,
    StoreRefused,
    StoreUnavailable,
    UpstreamUnreachable,
)
from router.base.host_names import Names
from router.config import ForwardConfig
from router.discovery.engine_api import EngineApi
from router.discovery.kubernetes_api import KubernetesApi
from router.kv_events.subscriber import EngineEvents
from router.pool.master import MasterApi
from router.upstream import Upstream
from tests.cluster.redis_stores import opened
from tests.conftest import Serve
from tests.discovery.fake_kubernetes import endpoint, kubernetes, slice_of
from tests.http.certificates import Authority
from tests.kv_events.publisher import Publisher
from tests.redis_servers import RedisServer, start_tls
from tests.resolver import AGAIN, NO_NAME, Resolver, resolver
from tests.waiting import until

HOST = "engine.test"


@pytest.fixture
def system() -> Iterator[Resolver]:
    """Answer for the system, at first with one address."""
    with resolver() as made:
        made.hosts[HOST] = ["127.0.0.1"]
        yield made


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every answer be old at once."""
    for pace in ("FRESH_S", "DOUBT_S"):
        monkeypatch.setattr(module, pace, 0.0)


def named(url: str) -> str:
    return url.replace("127.0.0.1", HOST)


# -- names ---------------------------------------------------------------------------------------


async def test_addresses_are_asked_for_once_in_a_while(system: Resolver) -> None:
    names = Names()
    system.hosts[HOST] = ["127.0.0.1", "127.0.0.2"]

    found = [await names.addresses(HOST) for _ in range(3)]

    assert found == [["127.0.0.1", "127.0.0.2"], ["127.0.0.2", "127.0.0.1"], found[0]]
    assert system.num_asked[HOST] == 1
    assert [await names.addresses(host) for host in ("10.1.2.3", "fd00::1")] == [
        ["10.1.2.3"],
        ["fd00::1"],
    ]


@pytest.mark.parametrize("failure", [AGAIN, NO_NAME])
@pytest.mark.usefixtures("stale")
async def test_the_last_addresses_stay_while_the_resolver_fails(
    system: Resolver, failure: socket.gaierror, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that is said not to exist is kept, too; the log says it once, and when it is over."""
    caplog.set_level("INFO")
    names = Names()
    await names.addresses(HOST)
    system.failure = failure

    assert [await names.addresses(HOST) for _ in range(4)] == [["127.0.0.1"]] * 4
    assert system.num_asked[HOST] >= 2
    assert names.failing == [HOST]
    system.answer()
    system.hosts[HOST] = ["127.0.0.2"]
    await until(lambda: moved(names))
    assert names.failing == []
    assert [record.message for record in caplog.records] == [
        "host name does not resolve: its last addresses are used on",
        "host name resolves again",
    ]


@pytest.mark.usefixtures("stale")
async def test_a_silent_resolver_delays_one_connection(system: Resolver) -> None:
    """The first one waits, and the name is not asked for twice."""
    names = Names()
    await names.addresses(HOST)
    system.hang()

    begun_s = time.monotonic()
    assert [await names.addresses(HOST) for _ in range(100)] == [["127.0.0.1"]] * 100
    assert time.monotonic() - begun_s < 5.0  # not a hundred times as long
    assert system.num_asked[HOST] == 2
    system.answer()


async def moved(names: Names) -> bool:
    return await names.addresses(HOST) == ["127.0.0.2"]


async def known(names: Names) -> bool:
    with suppress(socket.gaierror):
        return await names.addresses(HOST) == ["127.0.0.1"]
    return False


async def test_a_silent_resolver_is_named_where_no_address_is_known(
    system: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another name is not held up, and an answer that comes late counts."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    names = Names()
    system.hang()

    for _ in range(2):
        with pytest.raises(socket.gaierror, match="the resolver does not answer"):
            await names.addresses(HOST)
    assert system.num_asked[HOST] == 1
    assert await names.addresses("localhost")
    system.answer()
    await until(lambda: known(names))
    assert names.failing == []


async def test_after_a_failed_connection_a_name_is_asked_for_once_a_second(
    system: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names()
    await names.addresses(HOST)
    names.doubt(HOST)
    await names.addresses(HOST)
    assert system.num_asked[HOST] == 1

    monkeypatch.setattr(module, "DOUBT_S", 0.0)
    names.doubt(HOST)
    names.doubt("unknown.test")
    for _ in range(3):
        await names.addresses(HOST)
    assert system.num_asked[HOST] == 2


async def test_what_is_no_name_is_unknown(system: Resolver) -> None:
    for host in ("nowhere.test", "a" * 300, "bad\0name"):
        with pytest.raises(socket.gaierror):
            await Names().addresses(host)


async def test_names_are_bounded(system: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 2)
    names = Names()
    system.hosts |= {f"engine-{number}.test": ["127.0.0.1"] for number in range(3)}
    for number in range(3):
        await names.addresses(f"engine-{number}.test")

    await names.addresses("engine-2.test")
    await names.addresses("engine-0.test")
    assert [system.num_asked[f"engine-{number}.test"] for number in range(3)] == [2, 1, 1]


async def test_a_machine_without_threads_is_a_failure(
    system: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more than that: the next one asks again."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    names = Names()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(socket.gaierror, match="can't start new thread"):
            await names.addresses(HOST)
    assert await names.addresses(HOST) == ["127.0.0.1"]


# -- connections ---------------------------------------------------------------------------------


async def answered(upstream: Upstream, url: str) -> bytes:
    answer = await upstream.open("r1", url, method="GET", headers=CIMultiDict(), body=None)
    answer.close()
    return answer.first


async def page(_: web.Request) -> web.Response:
    return web.Response(body=b"ok", headers={"Connection": "close"})


@pytest.mark.usefixtures("stale")
async def test_requests_and_probes_use_the_last_addresses(system: Resolver, serve: Serve) -> None:
    """A name that one of them has resolved the other needs not."""
    url, names = named(await serve(page)), Names()
    async with (
        EngineApi(timeout_s=5.0, names=names) as api,
        Upstream(ForwardConfig(), names=names) as upstream,
    ):
        await api.ping("r1", url)
        system.failure = AGAIN
        await api.ping("r1", url)
        assert await answered(upstream, f"{url}/") == b"ok"


@pytest.mark.usefixtures("stale")
async def test_a_host_that_moved_is_found_by_the_next_connection(
    system: Resolver, serve: Serve
) -> None:
    url = named(await serve(page))
    system.hosts[HOST] = ["127.0.0.9"]  # nothing listens there
    async with Upstream(ForwardConfig()) as upstream:
        with pytest.raises(UpstreamUnreachable, match="refused the connection"):
            await answered(upstream, f"{url}/")
        system.hosts[HOST] = ["127.0.0.1"]
        assert await answered(upstream, f"{url}/") == b"ok"


async def test_a_host_with_several_addresses_is_reached_by_one_that_listens(
    system: Resolver, serve: Serve
) -> None:
    url = named(await serve(page))
    system.hosts[HOST] = ["127.0.0.9", "127.0.0.1"]
    async with Upstream(ForwardConfig()) as upstream:
        assert [await answered(upstream, f"{url}/") for _ in range(4)] == [b"ok"] * 4


async def test_a_host_without_an_address_is_unknown(system: Resolver) -> None:
    async with Upstream(ForwardConfig()) as upstream:
        with pytest.raises(HostUnknown, match="host name does not resolve"):
            await answered(upstream, "http://nowhere.test:1/")


@pytest.mark.usefixtures("stale")
async def test_a_pools_master_is_asked_at_its_last_address(system: Resolver) -> None:
    async with PoolMaster(EmulatedPool(capacity_bytes=1 << 20, bytes_per_object=1024)) as master:
        names = Names()
        async with MasterApi(named(master.url), names=names) as api:
            await api.figures()
        system.failure = AGAIN
        async with MasterApi(named(master.url), names=names) as api:  # a new connection
            await api.figures()
        async with MasterApi(named(master.url)) as api:
            with pytest.raises(PoolGone):
                await api.figures()


@pytest.mark.usefixtures("stale")
async def test_an_api_server_is_asked_at_its_last_address(system: Resolver, tmp_path: Path) -> None:
    """Each LIST is a connection of its own; the certificate is the name's."""
    files = ThreadPoolExecutor(1)
    async with kubernetes(tmp_path, names=f"DNS:{HOST}") as server:
        server.set(slice_of(endpoint("10.0.0.1", "a")))
        api = KubernetesApi(named(server.url), tmp_path, files)
        for failure in (None, AGAIN):
            system.failure = failure
            slices, _ = await api.list_slices("prod", "vllm")
            assert len(slices) == 1
    files.shutdown()


# -- event streams -------------------------------------------------------------------------------


async def link(source: EngineEvents, is_up: bool) -> None:
    async with asyncio.timeout(60):
        while (await source.receive(0.2)).is_up is not is_up:
            pass


@pytest.mark.usefixtures("stale")
async def test_an_event_stream_comes_back_without_a_resolver(system: Resolver) -> None:
    """Its history, too, which has a connection for each question."""
    with Publisher() as first:
        source = EngineEvents(named(first.endpoint), named(first.replay_endpoint), "kv")
        await link(source, True)
        system.failure = AGAIN
        first.close()
        await link(source, False)
        with Publisher(ports=(first.ports[0], first.ports[1])) as again:
            await link(source, True)
            again.lose(b"batch")
            async with asyncio.timeout(60):
                messages: list[tuple[int, bytes]] = []
                while not messages:
                    async with source.replay(0) as replies:
                        messages = await replies.receive()
            assert messages == [(0, b"batch")]
        source.close()


@pytest.mark.usefixtures("stale")
async def test_an_event_stream_follows_a_host_that_moved(system: Resolver) -> None:
    with Publisher() as publisher:
        system.hosts[HOST] = ["127.0.0.9"]
        source = EngineEvents(named(publisher.endpoint), None, "kv")
        assert (await source.receive(0.1)).is_up is None
        system.hosts[HOST] = ["127.0.0.1"]
        await link(source, True)
        source.close()


@pytest.mark.parametrize("is_silent", [False, True])
async def test_an_event_stream_says_that_its_host_is_unknown(
    system: Resolver, is_silent: bool
) -> None:
    """It goes on asking; a history that cannot be asked for has the reason."""
    with Publisher() as publisher:
        system.failure = AGAIN
        if is_silent:
            system.hang()
        source = EngineEvents(named(publisher.endpoint), named(publisher.replay_endpoint), "kv")
        received = await source.receive(0.1)
        assert received.why_unheard is not None
        assert received.why_unheard.startswith("the host name of its event endpoint does not")
        with pytest.raises(UpstreamUnreachable, match="host name does not resolve"):
            async with source.replay(0):
                pass
        system.answer()
        await link(source, True)
        assert (await source.receive(0.0)).why_unheard is None
        source.close()


# -- Redis ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stale")
async def test_redis_is_reached_at_its_last_address(
    system: Resolver, start_redis: Callable[..., RedisServer]
) -> None:
    """Its connections are made again after each failure."""
    server = start_redis()
    system.hosts[HOST] = ["127.0.0.9", "127.0.0.1"]
    async with opened(named(server.url)) as store:
        system.failure = AGAIN
        await store.close()
        assert (await store.beat(b"")).routers == {"router-1"}
    with pytest.raises(StoreUnavailable):
        async with opened(named(server.url)):
            pass


@pytest.mark.usefixtures("stale")
async def test_redis_with_tls_is_reached_at_its_last_address(
    system: Resolver, tmp_path: Path
) -> None:
    """The certificate is the name's; one for the address will not do."""
    authority = Authority(tmp_path)
    for names, is_accepted in ((f"DNS:{HOST}", True), ("IP:127.0.0.1", False)):
        cert, key = authority.issue("redis", names=names)
        server = start_tls(tmp_path, cert, key, ca=authority.cert)
        try:
            url = f"rediss://{HOST}:{server.port}/0"
            if is_accepted:
                async with opened(url, ca_file=authority.cert) as store:
                    system.failure = AGAIN
                    await store.close()
                    assert (await store.beat(b"")).routers == {"router-1"}
                    system.failure = None
            else:
                with pytest.raises(StoreRefused, match=f"not valid for '{HOST}'"):
                    async with opened(url, ca_file=authority.cert):
                        pass
        finally:
            server.stop()
