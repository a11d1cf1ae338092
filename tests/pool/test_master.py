"""router.pool.master against masters that answer well, late, in part, nonsense, or not at all.

router.pool.master and its follower: several masters of one pool, of which one serves.
"""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web
from yarl import URL

from loadtest.emulator.pool import EmulatedPool, PoolMaster
from router.base.errors import PoolError, PoolGone, PoolLate
from router.pool.master import MasterApi, MasterFigures, _url, find_leader
from tests.conftest import Serve
from tests.fuzz.samples import DEEP_JSON
from tests.ports import free_port


@pytest.fixture
async def master() -> AsyncIterator[PoolMaster]:
    async with PoolMaster(EmulatedPool(capacity_bytes=1 << 20, bytes_per_object=1024)) as running:
        yield running


@pytest.fixture
async def api(master: PoolMaster) -> AsyncIterator[MasterApi]:
    async with MasterApi(master.url + "/", timeout_s=1.0) as asking:
        yield asking


Answering = Callable[..., Any]


@pytest.fixture
def answering(serve: Serve) -> Answering:
    """Create a master that gives one answer to everything."""

    @asynccontextmanager
    async def answer(body: Any, **headers: str) -> AsyncIterator[MasterApi]:
        async def handler(request: web.Request) -> web.Response:
            content = body if isinstance(body, bytes) else orjson.dumps(body)
            return web.Response(body=content, headers=headers)

        async with MasterApi(await serve(handler)) as asking:
            yield asking

    return answer


async def listed(api: MasterApi) -> list[str]:
    keys: list[str] = []
    assert await api.list_keys(keys.extend) == len(keys)
    return keys


async def places(api: MasterApi, *keys: str) -> dict[str, Any]:
    return dict(await api.places(keys, timeout_s=5))


# -- good answers --------------------------------------------------------------------------------


async def test_all_keys_are_listed_in_slices(master: PoolMaster, api: MasterApi) -> None:
    assert await listed(api) == []
    master.pool = EmulatedPool()
    keys = [f"tiny@tp_rank:0@{number:064x}" for number in range(5_000)]
    master.pool.put(keys)
    slices: list[int] = []
    await api.list_keys(lambda some: slices.append(len(some)))

    assert sum(slices) == 5_000
    assert max(slices) <= 1_000
    assert await listed(api) == keys


async def test_the_last_line_may_lack_its_end(answering: Answering) -> None:
    async with answering(b"a@1\n\nb@2") as api:
        keys: list[str] = []
        await api.list_keys(keys.extend)

    assert keys == ["a@1", "b@2"]


async def test_objects_are_looked_up_by_their_names(master: PoolMaster, api: MasterApi) -> None:
    """Names are sent as they are; a name with a comma cannot be asked for."""
    master.pool.put(["org/tiny@tp_rank:0@ab", "b%2B+c@x"])

    assert await places(api, "org/tiny@tp_rank:0@ab", "b%2B+c@x", "gone@1", "a,b@1") == {
        "org/tiny@tp_rank:0@ab": "memory",
        "b%2B+c@x": "memory",
        "gone@1": "nowhere",
    }


@pytest.mark.parametrize(
    ("lists", "place"),
    [
        ({"values": [{"size_": 1}]}, "memory"),
        ({"values": [{"size_": 1}], "local_disk_values": [{"object_size": 1}]}, "memory"),
        ({"values": [], "local_disk_values": [{"client_id": "1-2"}]}, "disk"),
        ({"values": [], "disk_values": [{"file_path": "/a"}]}, "disk"),
        ({"values": None, "nof_values": [{}]}, "disk"),
        ({"values": [], "local_disk_values": []}, "memory"),
        ({"values": 3, "disk_values": {}}, "memory"),
        ({}, "memory"),
    ],
)
async def test_an_object_is_on_disk_if_only_a_list_of_disks_has_it(
    answering: Answering, lists: dict[str, object], place: str
) -> None:
    """Answers for keys that were not asked for are ignored."""
    data = {"k@1": {"ok": True, **lists}, "other@2": {"ok": True}}
    async with answering({"success": True, "data": data}) as api:
        assert await places(api, "k@1") == {"k@1": place}


async def test_older_masters_get_keys_without_escapes(serve: Serve) -> None:
    """They do not decode what they look up."""
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.raw_path)
        return web.Response(text='{"success":true,"data":{"m@a:0@1":{"ok":true,"values":[]}}}')

    async with MasterApi(await serve(handler)) as api:
        assert await places(api, "m@a:0@1") == {"m@a:0@1": "memory"}
    assert seen == ["/batch_query_keys?keys=m@a:0@1"]


async def test_figures_are_read(master: PoolMaster, api: MasterApi) -> None:
    master.pool.put([f"k@{number}" for number in range(1100)])

    figures = await api.figures()
    assert figures == MasterFigures(
        num_keys=1024,
        allocated_bytes=1 << 20,
        capacity_bytes=1 << 20,
        num_evicted_keys=76,
        num_put_keys=1100,
    )
    assert figures.bytes_per_object == 1024
    assert await api.segments() == ["127.0.0.1:12345"]
    master.pool.restart()
    assert (await api.figures()).bytes_per_object is None


# -- bad answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["garbage", "error", "half", "hang"])
async def test_every_failure_is_a_pool_error(
    fault: str, master: PoolMaster, api: MasterApi
) -> None:
    """It names the route."""
    master.pool.put([f"k@{number:016x}" for number in range(50)])
    master.fault = fault  # type: ignore[assignment]
    for question, path in (
        (api.figures, "/metrics"),
        (lambda: listed(api), "/get_all_keys"),
        (lambda: places(api, "k@1"), "/batch_query_keys"),
    ):
        with pytest.raises(PoolError, match=path):
            await question()
    master.fault = "none"
    assert len(await listed(api)) == 50


async def test_a_late_answer_is_an_error_of_its_own(master: PoolMaster, api: MasterApi) -> None:
    master.fault = "hang"
    with pytest.raises(PoolLate):
        await api.places(["k@1"], timeout_s=0.01)


async def test_an_address_without_a_server_is_an_error_of_its_own() -> None:
    """Engines will find nothing there either."""
    async with MasterApi(f"http://127.0.0.1:{free_port()}") as api:
        with pytest.raises(PoolGone, match="/metrics"):
            await api.figures()


@pytest.mark.parametrize(
    "body",
    [b"\xff\xfe\n", b"x" * 5000, b"master is busy now\n", b"a@1\n<b>\n", b"\x00@1\n"],
)
async def test_an_answer_that_is_not_a_list_of_keys_is_refused(
    answering: Answering, body: bytes
) -> None:
    async with answering(body) as api:
        with pytest.raises(PoolError, match="get_all_keys"):
            await listed(api)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'{"success":false,"error":"no"}', b'{"success":true,"data":[1]}',
        b'{"data":' + DEEP_JSON + b"}",
    ],
)  # fmt: skip
async def test_an_answer_that_is_not_understood_is_a_pool_error(
    answering: Answering, body: bytes
) -> None:
    """Brackets without end included."""
    async with answering(body) as api:
        with pytest.raises(PoolError, match="batch_query_keys"):
            await places(api, "k@1")


@pytest.mark.parametrize("value", ["-1", "nan", "NaN", "inf", "1e300", "x", ""])
async def test_a_figure_that_is_not_a_count_is_left_out(answering: Answering, value: str) -> None:
    page = f"master_key_count {value}\nmaster_allocated_bytes 5\n"
    async with answering(page.encode()) as api:
        figures = await api.figures()

    assert (figures.num_keys, figures.allocated_bytes, figures.num_evicted_keys) == (None, 5, None)


async def test_pages_are_bounded_and_text(answering: Answering) -> None:
    async with answering(b"x" * (33 << 20)) as api:
        with pytest.raises(PoolError, match="without end"):
            await api.figures()
    async with answering(b"\xff\xff") as api:
        with pytest.raises(PoolError, match="not text"):
            await api.segments()


async def test_a_compressed_answer_is_refused(answering: Answering) -> None:
    """A kilobyte may be a gigabyte."""
    bomb = gzip.compress(bytes(10_000_000))
    async with answering(bomb, **{"Content-Encoding": "gzip"}) as api:
        with pytest.raises(PoolError, match="compressed"):
            await api.figures()


async def test_an_answer_that_drips_is_given_up(serve: Serve) -> None:
    """Each byte comes in time, but the whole answer does not."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"a")
            await asyncio.sleep(0.02)

    async with MasterApi(await serve(handler), timeout_s=0.1) as api:
        with pytest.raises(PoolError, match="drips"):
            await api.figures()


# -- addresses -----------------------------------------------------------------------------------


def test_long_questions_are_not_cached() -> None:
    """yarl keeps the last 128 URLs given as text: 30 MiB of questions about 512 objects."""
    tracemalloc.start()
    try:
        for number in range(20):
            assert len(_url("http://10.0.0.5:9003", f"/keys?{number}={'k' * 60_000}").path_qs)
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert size_bytes < 200_000


@pytest.mark.parametrize(
    "base", ["http://10.0.0.5:9003", "https://user:word@host:9003/behind/a/proxy", "http://[::1]:1"]
)
@pytest.mark.parametrize("path", ["/metrics", "/batch_query_keys?keys=a%20b@tp:0/1@2,c@3"])
def test_a_url_is_sent_as_it_is_written(base: str, path: str) -> None:
    """To the byte: some masters do not decode what they look up."""
    assert str(_url(base, path)) == base + path
    assert _url(base, path).raw_path_qs == URL(base + path, encoded=True).raw_path_qs


@asynccontextmanager
async def group(*states: str) -> AsyncIterator[tuple[MasterApi, PoolMaster, PoolMaster]]:
    """Create two masters with these states."""
    async with PoolMaster() as one, PoolMaster() as two:
        one.ha_status, two.ha_status = states
        async with MasterApi(f"{one.url}, {two.url}/", timeout_s=10.0) as api:
            yield api, one, two


async def test_the_master_that_serves_is_asked() -> None:
    """While it serves, the others are left alone."""
    async with group("standby", "serving") as (api, one, two):
        assert await find_leader(api) is False  # the first to be found is no change
        assert api.url == two.url
        assert await find_leader(api) is False
        assert (one.num_asked["/ha_status"], two.num_asked["/ha_status"]) == (1, 2)

        one.ha_status, two.ha_status = "serving", "standby"
        assert await find_leader(api) is True
        assert api.url == one.url


@pytest.mark.parametrize("state", ["standby", "candidate", "recovering", "", "x" * 1000])
async def test_without_a_leader_the_pool_is_gone(state: str) -> None:
    """The error has each master's state."""
    async with group(state, "standby") as (api, one, two):
        await two.stop()
        with pytest.raises(PoolGone, match="does not listen") as caught:
            await find_leader(api)

        assert f"{one.url} {state[:64]}" in caught.value.message


async def test_masters_that_both_serve_are_refused() -> None:
    """They are two pools, or an election is under way."""
    async with group("serving", "serving") as (api, one, two):
        with pytest.raises(PoolError, match="they are two pools") as caught:
            await find_leader(api)

        assert one.url in caught.value.message
        assert two.url in caught.value.message


async def test_a_standby_alone_is_reported_as_one() -> None:
    """Its figures look like those of an empty pool, but it refuses to list keys."""
    async with PoolMaster() as one:
        one.ha_status = "standby"
        async with MasterApi(one.url) as api:
            assert (await api.figures()).num_keys == 0
            with pytest.raises(PoolError, match="answered 503, as a standby does"):
                await api.list_keys(lambda keys: None)
