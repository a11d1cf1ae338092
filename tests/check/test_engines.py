"""router.check in front of emulated engines, in good order and with faults."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from loadtest.emulator.pool import PoolMaster
from router.check import check
from tests.check.running import checked, endpoints, finding, nowhere, prompted, settings, wrong
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import Engines
from tests.ports import free_port


async def test_two_replicas_in_good_order_are_well() -> None:
    """A replica that has computed something is EXACT; a fresh one is not yet."""
    async with Engines(2) as (busy, fresh):
        await prompted(busy)
        report = await checked(busy, fresh)

    assert wrong(report) == []
    assert report.is_well
    assert finding(report, "replica r1", "state").text.startswith("EXACT: ")
    assert "sha256" in finding(report, "replica r1", "hashes").text
    assert "have the engine's token ids" in finding(report, "replica r1", "tokenizer").text
    assert finding(report, "replica r2", "state").level == "note"
    assert [replica.ranks[0].num_batches > 0 for replica in report.replicas] == [True, False]
    assert [replica.takes_tools for replica in report.replicas] == [True, True]


async def test_every_rank_has_its_own_stream() -> None:
    async with Engines(1, data_parallel_size=2) as (engine,):
        await prompted(engine)
        await prompted(engine)
        report = await checked(engine)

    assert wrong(report) == []
    assert [rank.rank for rank in report.replicas[0].ranks] == [0, 1]
    assert "2 data-parallel ranks" in finding(report, "replica r1", "engine").text


async def test_replicas_that_do_not_answer_are_reported() -> None:
    """A free port, a server that is not an engine, and an engine with a key."""
    async with FakeEngine() as other, FakeEngine() as locked:
        other.pages["/v1/models"] = (200, "<html>")
        locked.pages["/v1/models"] = (401, "no key")
        report = await checked(nowhere(), other.url, locked.url)

    assert not report.is_well
    found = [finding(report, f"replica r{number}", "reachable") for number in (1, 2, 3)]
    assert "refused the connection" in found[0].text
    assert "is there a firewall" in found[0].hint
    assert "not an OpenAI-compatible server" in found[1].text
    assert found[1].hint == ""
    assert "answered 401" in found[2].text
    assert found[2].hint == "--set engine.api_key_file=FILE"
    assert [replica.facts for replica in report.replicas] == [None, None, None]


@asynccontextmanager
async def behind_one_address(*engines: FakeEngine) -> AsyncIterator[str]:
    """Hand connections to engines in turn, as a Kubernetes Service does."""
    turns = itertools.cycle([int(engine.url.rpartition(":")[2]) for engine in engines])

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine = await asyncio.open_connection("127.0.0.1", next(turns))
        await asyncio.gather(copy(reader, engine[1]), copy(engine[0], writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_several_engines_behind_one_address_are_an_error() -> None:
    """One engine over as many connections is none."""
    pages = [(200, f"process_start_time_seconds {number}\n") for number in (1, 2)]
    async with FakeEngine(metrics=pages[0]) as one, FakeEngine(metrics=pages[1]) as other:
        async with behind_one_address(one, other) as several, behind_one_address(one) as single:
            report = await checked(several, single)

    found = finding(report, "replica r1", "address")
    assert found.level == "error"
    assert found.text.startswith("2 engines answer at http://127.0.0.1:")
    assert not [each for each in report.of("replica r2") if each.about == "address"]


async def test_an_engine_that_hangs_is_awaited_for_a_bounded_time() -> None:
    """The rest is reported."""
    left = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        left.set()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        report = await check(settings(url, health__timeout_s=60.0), wait_s=1.0)
        await left.wait()

    assert finding(report, "replica r1", "reachable").text == f"{url} did not answer"
    assert finding(report, "router", "listen port").level == "ok"


async def test_systems_slower_than_the_deadline_are_reported() -> None:
    """A tokenizer, a Redis and a master of a pool."""
    async with Engines(1) as (engine,), PoolMaster() as master:
        master.fault = "hang"
        redis = nowhere().replace("http", "redis")
        tree = settings(engine, redis__url=f"{redis}/0", mooncake__master=master.url)
        report = await check(tree, wait_s=0.01)

    assert not report.is_well
    assert {f.subject for f in report.findings} >= {"replica r1", "redis", "pool", "router"}


@pytest.mark.parametrize(
    ("options", "about", "text"),
    [
        ({"events": False}, "events", "BLIND: started without KV events"),
        ({"enable_prefix_caching": False}, "prefix caching", "off: "),
    ],
)
async def test_a_missing_flag_of_an_engine_is_reported(
    options: dict[str, Any], about: str, text: str
) -> None:
    async with Engines(1, **options) as (engine,):
        report = await checked(engine)

    found = finding(report, "replica r1", about)
    assert found.level == "warning"
    assert found.text.startswith(text)
    assert found.hint


# -- events --------------------------------------------------------------------------------------


async def test_kv_groups_are_listed() -> None:
    """Kinds, windows and block sizes of a hybrid model."""
    async with Engines(1, sliding_window=64, num_window_groups=2) as (engine,):
        await prompted(engine)
        report = await checked(engine)

    assert wrong(report) == []
    assert finding(report, "replica r1", "kv groups").text == (
        "full_attention, blocks of 16; 2 x sliding_window of 64 tokens, blocks of 16"
    )


async def test_lost_history_is_reported() -> None:
    """The engine has dropped its first batches."""
    async with Engines(1, buffer_steps=1) as (engine,):
        await prompted(engine)
        await prompted(engine, number=2)
        report = await checked(engine)

    found = finding(report, "replica r1", "state")
    assert found.text == "DEGRADED: history before the router joined is lost"
    assert "buffer_steps" in found.hint


async def test_an_unknown_hash_seed_is_reported_with_its_flag() -> None:
    """With the flag the replica is EXACT."""
    async with Engines(1, hash_seed="of-its-own") as (engine,):
        await prompted(engine, number=77)  # engines in one process share what they know of prompts
        without = await checked(engine)
        given = await checked(engine, hash__seeds=["of-its-own"])

    assert "--set hash.seeds" in finding(without, "replica r1", "state").hint
    assert finding(given, "replica r1", "state").text.startswith("EXACT")
    assert "seed 'of-its-own'" in finding(given, "replica r1", "hashes").text


async def test_wrong_event_endpoints_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A free port, other servers' ports, no replay, an unknown host."""
    monkeypatch.setattr("router.check.events.REPLAY_TIMEOUT_S", 0.2)
    async with Engines(1) as (engine,), FakeEngine() as other:
        await prompted(engine)
        (events,) = endpoints(engine)["events"]
        free, http = f"tcp://127.0.0.1:{free_port()}", other.url.replace("http", "tcp")

        async def about(part: str, event: str, *replay: str) -> str:
            replica = {"url": engine.url, "events": [event], "replay": replay}
            report = await checked(replicas=[replica])
            return finding(report, "replica r1", part).text

        assert "and its engine reports port" in await about("event ports", free)
        assert "nothing listens at" in await about("events", free)
        assert "not an event publisher" in await about("events", http)
        assert "is unknown" in await about("events", "tcp://nowhere.invalid:5557")
        assert (await about("replay", events)).startswith("none: ")
        assert "(refused)" in await about("replay", events, free)
        assert "returns no history" in await about("replay", events, http)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ({"0": {"endpoint": "nonsense"}}, "is not tcp://HOST:PORT"),
        ({"0": {"endpoint": "ipc:///"}}, "not an event publisher"),
        ({"0": {"endpoint": "tcp://*:1", "publisher": "null"}}, '"publisher": "null"'),
        ((200, "nonsense"), "does not report its event endpoints"),
    ],
)
async def test_an_odd_list_of_event_sources_is_reported(page: object, text: str) -> None:
    async with FakeEngine() as engine:
        engine.pages["/kv_event_sources"] = page
        report = await checked(engine.url)

    found = finding(report, "replica r1", "events")
    assert text in found.text
    assert found.level in ("error", "warning")


async def test_event_endpoints_of_another_replica_are_reported() -> None:
    """One replica has them by mistake, or two have each other's. Neither is EXACT."""
    async with Engines(2) as (first, second):
        await prompted(first)
        await prompted(second)
        one = await checked(replicas=[first.url, {"url": second.url} | endpoints(first)])
        both = await checked(
            replicas=[
                {"url": first.url} | endpoints(second),
                {"url": second.url} | endpoints(first),
            ]
        )

    assert [(subject, about) for subject, about, _ in wrong(one)] == [("replica r2", "events")]
    assert "is an event endpoint of r1, too" in finding(one, "replica r2", "events").text
    assert finding(one, "replica r1", "state").text.startswith("EXACT: ")
    assert [(subject, about) for subject, about, _ in wrong(both)] == [
        ("replica r1", "events"),
        ("replica r2", "events"),
    ]


# -- tokenizer and tools -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ raise_exception('not like this') }}", "the template here refuses"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "token ids differ"),
    ],
)
async def test_another_template_than_the_engine_s_is_an_error(
    template: str, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    async with Engines(1) as (engine,):
        report = await checked(engine, tokens__chat_templates={"tiny": str(file)})

    found = finding(report, "replica r1", "tokenizer")
    assert found.level == "error"
    assert text in found.text


async def test_a_missing_tokenizer_is_a_warning(tmp_path: Path) -> None:
    """An engine without /tokenize is not compared, which is a note."""
    async with Engines(1) as (engine,), FakeEngine() as plain:
        missing = await checked(engine, tokens__models={"tiny": str(tmp_path)})
        unasked = await checked(plain.url)

    assert finding(missing, "replica r1", "tokenizer").level == "warning"
    assert "over HTTP" in finding(missing, "replica r1", "tokenizer").text
    assert "not compared" in finding(unasked, "replica r1", "tokenizer").text


@pytest.mark.parametrize(
    ("status", "message", "is_known"),
    [
        (400, '"auto" tool choice requires --enable-auto-tool-choice', True),
        (400, "something else", False),
        (404, "", False),
    ],
)
async def test_an_engine_without_a_tool_parser_is_reported(
    status: int, message: str, is_known: bool
) -> None:
    """Another refusal says nothing about tools."""
    async with FakeEngine() as engine:
        refusal = json.dumps({"error": {"message": message}})
        engine.pages["/v1/chat/completions"] = (status, refusal)
        report = await checked(engine.url)

    found = [each for each in report.of("replica r1") if each.about == "tools"]
    assert report.replicas[0].takes_tools is (False if is_known else None)
    assert [each.level for each in found] == (["warning"] if is_known else [])
    assert all("--tool-call-parser" in each.hint for each in found)
