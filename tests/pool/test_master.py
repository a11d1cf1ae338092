"""router.pool.master against masters that answer well, late, half, nonsense, or not at all."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from yarl import URL

from loadtest.emulator.pool import EmulatedPool, PoolMaster
from router.errors import PoolError, PoolGone, PoolLate
from router.pool.master import MasterApi, MasterFigures, _url
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


async def listed(api: MasterApi) -> list[str]:
    keys: list[str] = []
    assert await api.list_keys(keys.extend) == len(keys)
    return keys


async def test_lists_all_keys_in_slices(master: PoolMaster, api: MasterApi) -> None:
    """However many; an empty pool has none."""
    assert await listed(api) == []
    master.pool = EmulatedPool()
    keys = [f"tiny@tp_rank:0@{number:064x}" for number in range(5_000)]
    master.pool.put(keys)
    slices: list[int] = []
    await api.list_keys(lambda some: slices.append(len(some)))

    assert sum(slices) == 5_000
    assert max(slices) <= 1_000
    assert await listed(api) == keys


async def test_the_last_line_need_not_end(serve: Serve) -> None:
    """Nor are empty lines keys."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="a@1\n\nb@2")

    async with MasterApi(await serve(handler)) as api:
        keys: list[str] = []
        await api.list_keys(keys.extend)
        assert keys == ["a@1", "b@2"]


async def test_lists_which_objects_are_there(master: PoolMaster, api: MasterApi) -> None:
    """Names go over as they are; one that cannot be asked for is not answered for."""
    master.pool.put(["org/tiny@tp_rank:0@ab", "b%2B+c@x"])
    asked = ["org/tiny@tp_rank:0@ab", "b%2B+c@x", "gone@1", "a,b@1"]

    assert await api.places(asked, timeout_s=5) == {
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
async def test_what_is_on_disk_only_is_told_apart(
    serve: Serve, lists: dict[str, object], place: str
) -> None:
    """By the lists that are not empty; one that says nothing has memory only."""

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"success": True, "data": {"k@1": {"ok": True, **lists}}})

    async with MasterApi(await serve(handler)) as api:
        assert await api.places(["k@1"], timeout_s=5) == {"k@1": place}


async def test_older_masters_are_understood(serve: Serve) -> None:
    """They do not decode what they look up, and say less."""
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.raw_path)
        return web.Response(text='{"success":true,"data":{"m@a:0@1":{"ok":true,"values":[]}}}')

    async with MasterApi(await serve(handler)) as api:
        assert await api.places(["m@a:0@1"], timeout_s=5) == {"m@a:0@1": "memory"}
    assert seen == ["/batch_query_keys?keys=m@a:0@1"]


async def test_reads_how_full_it_is(master: PoolMaster, api: MasterApi) -> None:
    """What there is, what was evicted, and an object's mean size."""
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
    master.pool.restart()
    assert (await api.figures()).bytes_per_object is None


async def test_lists_the_memory_that_engines_give(api: MasterApi) -> None:
    assert await api.segments() == ["127.0.0.1:12345"]


@pytest.mark.parametrize("fault", ["garbage", "error", "half", "hang"])
async def test_every_failure_is_a_pool_error(
    fault: str, master: PoolMaster, api: MasterApi
) -> None:
    """That names the route, for each question."""
    master.pool.put([f"k@{number:016x}" for number in range(50)])
    master.fault = fault  # type: ignore[assignment]
    for question, path in (
        (api.figures, "/metrics"),
        (lambda: listed(api), "/get_all_keys"),
        (lambda: api.places(["k@1"], timeout_s=5), "/batch_query_keys"),
    ):
        with pytest.raises(PoolError, match=path):
            await question()
    master.fault = "none"
    assert len(await listed(api)) == 50


async def test_a_deadline_of_ours_is_no_failure_of_its(master: PoolMaster, api: MasterApi) -> None:
    """Late is late."""
    master.fault = "hang"
    with pytest.raises(PoolLate):
        await api.places(["k@1"], timeout_s=0.01)


async def test_no_server_at_the_address_has_an_error_of_its_own() -> None:
    """Engines will find nothing there either."""
    async with MasterApi(f"http://127.0.0.1:{free_port()}") as api:
        with pytest.raises(PoolGone, match="/metrics"):
            await api.figures()


@pytest.mark.parametrize(
    "body",
    [b"\xff\xfe\n", b"x" * 5000, b"master is busy now\n", b"a@1\n<b>\n", b"\x00@1\n"],
)
async def test_what_is_no_list_of_keys(body: bytes, serve: Serve) -> None:
    """Is refused, not indexed."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body)

    async with MasterApi(await serve(handler)) as api:
        with pytest.raises(PoolError, match="get_all_keys"):
            await listed(api)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"success":false,"error":"no"}', '{"success":true,"data":[1]}']
)
async def test_what_is_no_answer(text: str, serve: Serve) -> None:
    """Is named."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=text)

    async with MasterApi(await serve(handler)) as api:
        with pytest.raises(PoolError, match="batch_query_keys"):
            await api.places(["k@1"], timeout_s=5)


async def test_figures_that_are_no_numbers(serve: Serve) -> None:
    """Count as not said; a page of another kind is refused."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="master_key_count nan\nmaster_allocated_bytes 5\n")

    async with MasterApi(await serve(handler)) as api:
        figures = await api.figures()
    assert (figures.num_keys, figures.allocated_bytes, figures.num_evicted_keys) == (None, 5, None)


async def test_pages_without_end_and_not_of_text(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Are not read to the end, or not taken for text."""
    monkeypatch.setattr("router.pool.master._MAX_PAGE_BYTES", 1000)
    body = b"x" * 2000

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body)

    async with MasterApi(await serve(handler)) as api:
        with pytest.raises(PoolError, match="without end"):
            await api.figures()
        body = b"\xff\xff"
        with pytest.raises(PoolError, match="not text"):
            await api.segments()


async def test_brackets_without_end_are_a_pool_error(serve: Serve) -> None:
    """In every answer that is JSON: RecursionError is no ValueError."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=b'{"data":' + DEEP_JSON + b"}")

    async with MasterApi(await serve(handler)) as api:
        with pytest.raises(PoolError, match="not understood"):
            await api.places(["a@1"], timeout_s=5)


async def test_answers_for_keys_that_were_not_asked_are_left_out(serve: Serve) -> None:
    """A million of them, too."""

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(
            {"success": True, "data": {"a@1": {"ok": True}, "b@2": {"ok": True}}}
        )

    async with MasterApi(await serve(handler)) as api:
        assert await api.places(["a@1"], timeout_s=5) == {"a@1": "memory"}


async def test_compressed_answers_are_refused(serve: Serve) -> None:
    """None was asked for, and a kilobyte may be a gigabyte."""

    async def handler(request: web.Request) -> web.Response:
        bomb = gzip.compress(bytes(10_000_000))
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    async with MasterApi(await serve(handler)) as api:
        with pytest.raises(PoolError, match="compressed"):
            await api.figures()


async def test_an_answer_that_drips_has_an_end(serve: Serve) -> None:
    """Each byte comes in time; the whole does not."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"a")
            await asyncio.sleep(0.02)

    async with MasterApi(await serve(handler), timeout_s=0.1) as api:
        with pytest.raises(PoolError, match="drips"):
            await api.figures()


@pytest.mark.parametrize("value", ["-1", "NaN", "inf", "1e300", "x", ""])
async def test_figures_that_are_none_are_left_out(serve: Serve, value: str) -> None:
    """No count is negative, or larger than any memory."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=f"master_key_count {value}\nmaster_allocated_bytes 5\n")

    async with MasterApi(await serve(handler)) as api:
        figures = await api.figures()

    assert (figures.num_keys, figures.allocated_bytes) == (None, 5)


def test_questions_are_not_remembered() -> None:
    """Of a URL given as text yarl keeps the last 128: 30 MiB of questions about 512 objects."""
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
def test_an_address_is_what_is_written(base: str, path: str) -> None:
    """To the byte: some masters do not decode what they look up."""
    assert str(_url(base, path)) == base + path
    assert _url(base, path).raw_path_qs == URL(base + path, encoded=True).raw_path_qs
