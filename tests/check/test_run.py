"""router.check from end to end: emulated engines and their faults, a real Redis, a master."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import TINY_MODEL
from loadtest.emulator.pool import PoolMaster
from router import config
from router.check import check
from router.cluster.redis_store import RedisStore
from router.messages import ReplicaRecord
from tests.check.checking import checked, finding, prompted, settings, wrong
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import Engines, chat, on_stage, words
from tests.ports import free_port
from tests.redis_servers import Start

PATIENCE_S = 60.0  # of a loaded machine; nothing here takes a second


# -- replicas ------------------------------------------------------------------------------------


async def test_two_replicas_as_they_should_be() -> None:
    """One that has computed something is EXACT; a fresh one will be."""
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


async def test_every_rank_is_looked_at() -> None:
    """Each has its own stream."""
    async with Engines(1, data_parallel_size=2) as (engine,):
        await prompted(engine)
        await prompted(engine)
        report = await checked(engine)

    assert wrong(report) == []
    assert [rank.rank for rank in report.replicas[0].ranks] == [0, 1]
    assert "2 data-parallel ranks" in finding(report, "replica r1", "engine").text


async def test_nothing_reachable_is_reported() -> None:
    """At a free port, at a server that is no engine, and at an engine with a key of its own."""
    async with FakeEngine() as other, FakeEngine() as locked:
        other.pages["/v1/models"] = (200, "<html>")
        locked.pages["/v1/models"] = (401, "no key")
        report = await checked(f"http://127.0.0.1:{free_port()}", other.url, locked.url)

    assert not report.is_well
    found = [finding(report, f"replica r{number}", "reachable") for number in (1, 2, 3)]
    assert "refused the connection" in found[0].text
    assert "is there a firewall" in found[0].hint
    assert "not an OpenAI-compatible server" in found[1].text
    assert found[1].hint == ""
    assert "answered 401" in found[2].text
    assert found[2].hint == "--engine-api-key-file FILE"
    assert [replica.error is not None for replica in report.replicas] == [True, True, True]


async def test_an_engine_that_hangs_ends_with_the_patience() -> None:
    """Everything else is reported; what is awaited is reported meanwhile."""
    awaited: list[list[str]] = []
    left = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        left.set()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        report = await check(
            settings(f"http://127.0.0.1:{port}"), wait_s=8.0, on_waiting=awaited.append
        )
        await left.wait()

    assert "was silent" in finding(report, "replica r1", "reachable").text
    assert awaited == [["r1"]]
    assert finding(report, "router", "listen port").level == "ok"


@pytest.mark.parametrize(
    ("options", "about", "text"),
    [
        ({"events": False}, "events", "BLIND: started without KV events"),
        ({"enable_prefix_caching": False}, "prefix caching", "off: "),
    ],
)
async def test_an_engine_started_without_something_is_reported(
    options: dict[str, Any], about: str, text: str
) -> None:
    """With the flag that it lacks."""
    async with Engines(1, **options) as (engine,):
        report = await checked(engine)

    found = finding(report, "replica r1", about)
    assert found.level == "warning"
    assert found.text.startswith(text)
    assert found.hint


async def test_kv_groups_are_listed() -> None:
    """Of a hybrid model: kinds, windows, block sizes."""
    async with Engines(1, sliding_window=64, num_window_groups=2) as (engine,):
        await prompted(engine)
        report = await checked(engine)

    found = finding(report, "replica r1", "kv groups")
    assert wrong(report) == []
    assert found.text == (
        "full_attention, blocks of 16; 2 x sliding_window of 64 tokens, blocks of 16"
    )


async def test_history_that_is_lost_is_reported() -> None:
    """The engine has forgotten its first batches: DEGRADED, with what to set."""
    async with Engines(1, buffer_steps=1) as (engine,):
        await prompted(engine)
        await prompted(engine, number=2)
        report = await checked(engine)

    found = finding(report, "replica r1", "state")
    assert found.text == "DEGRADED: history before the router joined is lost"
    assert "buffer_steps" in found.hint


async def test_a_seed_of_the_engines_own_is_found_with_its_flag() -> None:
    """And without it, it is at least not called exact."""
    async with Engines(1, hash_seed="of-its-own") as (engine,):
        await prompted(engine, number=77)  # engines in one process share what they know of prompts
        without = await checked(engine)
        given = await checked(engine, hash__seeds=["of-its-own"])

    assert "--hash-seeds" in finding(without, "replica r1", "state").hint
    assert finding(given, "replica r1", "state").text.startswith("EXACT")
    assert "seed 'of-its-own'" in finding(given, "replica r1", "hashes").text


async def test_endpoints_that_are_configured_wrongly_are_reported() -> None:
    """A free port, a port of another server, no replay, an unknown host."""
    async with Engines(1) as (engine,), FakeEngine() as other:
        await prompted(engine)
        rank = engine.replica.ranks[0]
        assert rank.publisher is not None
        events, _ = rank.publisher.ports
        http = other.url.rpartition(":")[2]
        endpoints = [
            (f"tcp://127.0.0.1:{free_port()}", []),
            (f"tcp://127.0.0.1:{http}", []),
            (f"tcp://127.0.0.1:{events}", []),
            ("tcp://nowhere.invalid:5557", []),
            (f"tcp://127.0.0.1:{events}", [f"tcp://127.0.0.1:{free_port()}"]),
        ]
        found = []
        for endpoint, replay in endpoints:
            replica = {"url": engine.url, "events": [endpoint], "replay": replay}
            tree = config.load(
                flags={("replicas",): [replica], ("listen", "port"): 0, ("admin", "port"): 0}
            )
            found.append(await check(tree, wait_s=PATIENCE_S))

    assert finding(found[0], "replica r1", "event ports").level == "note"
    assert "nothing listens at" in finding(found[0], "replica r1", "events").text
    assert "not an event publisher" in finding(found[1], "replica r1", "events").text
    assert finding(found[2], "replica r1", "replay").text.startswith("none: ")
    assert "is unknown" in finding(found[3], "replica r1", "events").text
    assert "(refused)" in finding(found[4], "replica r1", "replay").text


async def test_nonsense_that_an_engine_reports_of_its_events_is_reported() -> None:
    """An endpoint that is none, a path of something else, events that are thrown away, no JSON."""
    pages: list[tuple[object, str]] = [
        ({"0": {"endpoint": "nonsense"}}, "is not tcp://HOST:PORT"),
        ({"0": {"endpoint": "ipc:///"}}, "not an event publisher"),
        ({"0": {"endpoint": "tcp://*:1", "publisher": "null"}}, '"publisher": "null"'),
        ((200, "nonsense"), "does not report its event endpoints"),
    ]
    async with FakeEngine() as engine:
        for page, said in pages:
            engine.pages["/kv_event_sources"] = page
            report = await checked(engine.url)

            found = finding(report, "replica r1", "events")
            assert said in found.text, page
            assert found.level in ("error", "warning")


async def test_a_replay_without_history_is_reported() -> None:
    """What listens there is no publisher."""
    async with Engines(1) as (engine,), FakeEngine() as other:
        rank = engine.replica.ranks[0]
        assert rank.publisher is not None
        replica = {
            "url": engine.url,
            "events": [f"tcp://127.0.0.1:{rank.publisher.ports[0]}"],
            "replay": [other.url.replace("http", "tcp")],
        }
        flags = {
            ("replicas",): [replica],
            ("listen", "port"): 0,
            ("admin", "port"): 0,
            ("events", "replay_timeout_s"): 0.2,
        }
        report = await check(config.load(flags=flags), wait_s=PATIENCE_S)

    assert "returns no history" in finding(report, "replica r1", "replay").text


async def test_what_is_slower_than_the_deadline_is_reported() -> None:
    """A tokenizer, a Redis and a master; nothing fails."""
    async with Engines(1) as (engine,), PoolMaster() as master:
        master.fault = "hang"
        report = await check(
            settings(
                engine,
                redis__url=f"redis://127.0.0.1:{free_port()}/0",
                mooncake__master=master.url,
            ),
            wait_s=0.01,
        )

    assert not report.is_well
    assert {f.subject for f in report.findings} >= {"replica r1", "redis", "pool", "router"}


async def test_a_model_without_a_tokenizer_of_its_own_is_no_fault(tmp_path: Path) -> None:
    """Nor is an engine without /tokenize; a template that refuses what the engine takes is one."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('not like this') }}")
    async with Engines(1) as (engine,), FakeEngine() as plain:
        refused = await checked(engine, tokens__chat_templates={"tiny": str(template)})
        without = await checked(plain.url)

    assert "the template here refuses" in finding(refused, "replica r1", "tokenizer").text
    assert finding(refused, "replica r1", "tokenizer").level == "error"
    assert "not compared" in finding(without, "replica r1", "tokenizer").text


async def test_an_engine_that_tokenizes_otherwise_is_reported(tmp_path: Path) -> None:
    """With a chat template of its own, for example."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    async with Engines(1) as (engine,):
        wrong_template = await checked(engine, tokens__chat_templates={"tiny": str(template)})
        nowhere = await checked(engine, tokens__models={"tiny": str(tmp_path)})

    assert finding(wrong_template, "replica r1", "tokenizer").level == "error"
    assert finding(nowhere, "replica r1", "tokenizer").level == "warning"
    assert "over HTTP" in finding(nowhere, "replica r1", "tokenizer").text


# -- the router itself ---------------------------------------------------------------------------


async def test_a_port_in_use_is_reported_and_a_router_there_is_known() -> None:
    """Another server's is an error; a router's is not, and reports what it has audited."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        await stage.ask(chat(words(1)))
        ports = [int(url.rpartition(":")[2]) for url in (stage.url, stage.admin_url)]
        known = await checked(*engines, listen__port=ports[0], admin__port=ports[1])
        taken = await checked(*engines, listen__port=int(engines[0].url.rpartition(":")[2]))

    assert finding(known, "router", "listen port").text.endswith("is in use by another router")
    assert finding(known, "router", "admin port").text.endswith("is in use by another router")
    assert finding(known, "router", "audit").text == "1 predictions audited so far"
    assert finding(taken, "router", "listen port").level == "error"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "admin-token"
    file.write_text("s3same")
    return file


async def test_a_router_has_nothing_to_log_of_a_check_beside_it(token: Path) -> None:
    """Neither with its admin token nor without, where its public port shows what it is."""
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=token) as stage:
        ports = [int(url.rpartition(":")[2]) for url in (stage.url, stage.admin_url)]
        tree = settings(*engines, listen__port=ports[0], admin__port=ports[1])
        await stage.ask(chat(words(1)))
        await stage.until(lambda: stage.state("r1") == "exact")
        await stage.settled(*engines)
        logged = len(stage.log)
        reports = [
            await check(tree, admin_token=admin_token, wait_s=PATIENCE_S)
            for admin_token in ("s3same", None)
        ]

        assert '"level":"warning"' not in stage.log[logged:]
    for report in reports:
        for port in ("listen port", "admin port"):
            assert finding(report, "router", port).text.endswith("is in use by another router")


def endpoints(engine: Emulator) -> dict[str, list[str]]:
    """Configure an engine's event endpoints."""
    publisher = engine.replica.ranks[0].publisher
    assert publisher is not None
    events, replay = (f"tcp://127.0.0.1:{port}" for port in publisher.ports)
    return {"events": [events], "replay": [replay]}


async def test_events_of_another_replica_are_reported() -> None:
    """One that has them by mistake, and two that have each other's; not as EXACT."""
    async with Engines(2) as (first, second):
        await prompted(first)
        await prompted(second)
        slip = [{"url": first.url}, {"url": second.url} | endpoints(first)]
        exchanged = [
            {"url": first.url} | endpoints(second),
            {"url": second.url} | endpoints(first),
        ]
        one, both = [
            await check(settings(replicas=replicas), wait_s=PATIENCE_S)
            for replicas in (slip, exchanged)
        ]

    assert [(subject, about) for subject, about, _ in wrong(one)] == [("replica r2", "events")]
    assert "is an event endpoint of r1, too" in finding(one, "replica r2", "events").text
    assert finding(one, "replica r1", "state").text.startswith("EXACT: ")
    assert [(subject, about) for subject, about, _ in wrong(both)] == [
        ("replica r1", "events"),
        ("replica r2", "events"),
    ]


async def test_files_are_tried(tmp_path: Path) -> None:
    """Those that are there, and those that are not; none is made."""
    token, empty, binary = tmp_path / "token", tmp_path / "empty", tmp_path / "binary"
    token.write_text("secret")
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe")
    gone = tmp_path / "gone"
    template = TINY_MODEL / "chat_template.jinja"
    url = f"http://127.0.0.1:{free_port()}"
    good = await checked(
        url,
        admin__token_file=token,
        log__decisions=tmp_path / "new.jsonl",
        tokens__chat_templates={"m": str(template)},
    )
    bad = await checked(
        url,
        admin__token_file=empty,
        engine__api_key_file=gone,
        redis__password_file=binary,
        redis__ca_file=gone,
        forward__ca_file=token,
        log__decisions=gone / "decisions.jsonl",
        tokens__chat_templates={"m": str(gone)},
    )
    folder = await checked(url, log__decisions=tmp_path)
    again = await checked(url, log__decisions=token)

    assert [f.level for f in good.of("router") if f.about != "audit"] == ["ok"] * 5
    assert not (tmp_path / "new.jsonl").exists()
    texts = {f.about: f.text.rpartition(": ")[2] for f in bad.of("router") if f.level == "error"}
    assert texts == {
        "admin.token_file": "the file is empty",
        "engine.api_key_file": "No such file or directory",
        "redis.password_file": "not UTF-8",
        "redis.ca_file": "No such file or directory",
        "forward.ca_file": "it has no certificates",
        "log.decisions": "its directory does not exist",
        "tokens.chat_templates.m": "it is not a file",
    }
    assert finding(folder, "router", "log.decisions").text.endswith("a directory")
    assert finding(again, "router", "log.decisions").level == "ok"
    assert "secret" not in str(good.as_json())


# -- redis ---------------------------------------------------------------------------------------


@asynccontextmanager
async def stored(url: str, **records: ReplicaRecord) -> AsyncIterator[RedisStore]:
    """A router that lives in Redis, and orders that operators gave."""
    store = RedisStore(config.load(flags={("redis", "url"): url}).redis, router="a", password=None)
    await store.open()
    try:
        for name, record in records.items():
            await store.records.put_replica(name, record)
        await store.beat(b"")
        yield store
    finally:
        await store.close()


async def test_redis_is_read_and_nothing_is_written(start_redis: Start) -> None:
    """A new one stays empty: no key, no script, no write was sent."""
    server = start_redis()
    async with Engines(1) as (engine,):
        report = await checked(engine, redis__url=server.url)

    assert report.redis is not None
    assert (report.redis.mode, report.redis.schema) == ("standalone", None)
    assert finding(report, "redis", "namespace").text.endswith("the first router creates it")
    assert server.client.dbsize() == 0
    commands = server.client.info("commandstats")
    assert isinstance(commands, dict)
    sent = {name.removeprefix("cmdstat_").partition("|")[0] for name in commands}
    assert not sent & {"eval", "evalsha", "script", "set", "hset", "xadd", "zadd", "del"}


async def test_a_shared_redis_is_described(start_redis: Start) -> None:
    """Routers and leaders of streams; replicas that operators added are looked at, too."""
    server = start_redis()
    async with Engines(2) as (one, other):
        await prompted(one)
        added = {"added": ReplicaRecord(url=other.url)}
        async with (
            stored(server.url, **added) as store,
            on_stage(one, redis__url=server.url) as stage,
        ):
            await stage.until(lambda: stage.metric("warmroute_feeds", role="leading") == 2)
            await store.beat(b"")  # it counts for a few seconds
            report = await checked(one, redis__url=server.url)
            alone = await checked(redis__url=server.url)

    assert wrong(report) == []
    assert report.redis is not None
    assert report.redis.schema == "1"
    assert len(report.redis.routers) == 2
    streams = {stream.id: stream for stream in report.redis.feeds}
    assert streams.keys() == {f"{one.url}#0", "added#0"}  # type: ignore[comparison-overlap]
    assert all(stream.leader is not None for stream in streams.values())
    assert "added at an admin API" in finding(report, "replica added", "reachable").text
    assert [replica.name for replica in alone.replicas] == ["added"]


async def test_orders_of_operators_are_reported(start_redis: Start) -> None:
    """A configured replica that drains, one that was removed, an order that no router follows."""
    server = start_redis()
    async with Engines(2) as (one, other):
        records = {
            one.url: ReplicaRecord(url=one.url, draining=True),
            other.url: ReplicaRecord(url=other.url, removed=True),
            "bad name": ReplicaRecord(url="http://127.0.0.1:9"),
        }
        async with stored(server.url, **records):
            report = await checked(one, other, redis__url=server.url)

    assert "drains" in finding(report, "replica r1", "orders").text
    assert "removed it" in finding(report, "replica r2", "orders").text
    assert "bad name" in finding(report, "redis", "replicas").text


async def test_a_redis_that_will_not_do_is_reported(start_redis: Start) -> None:
    """A wrong password, one that may evict, another schema, none there."""
    locked = start_redis(requirepass="right")
    evicting = start_redis(maxmemory="50mb", maxmemory_policy="allkeys-lru")
    evicting.client.hset("{wr:default}:meta", "schema", "77")
    url = f"http://127.0.0.1:{free_port()}"
    wrong_password = await check(
        settings(url, redis__url=locked.url), redis_password="wrong", wait_s=PATIENCE_S
    )
    missing = await checked(url, redis__url=locked.url)
    other = await checked(url, redis__url=evicting.url)
    closed = await checked(url, redis__url=f"redis://127.0.0.1:{free_port()}/0")

    assert "wrong password" in finding(wrong_password, "redis", "reachable").text
    assert "right" not in str(wrong_password.as_json())
    assert "it requires a password" in finding(missing, "redis", "reachable").text
    assert "allkeys-lru" in finding(other, "redis", "memory").text
    assert "schema 77" in finding(other, "redis", "namespace").text
    assert "is it running?" in finding(closed, "redis", "reachable").hint


async def test_a_redis_that_hangs_ends_by_its_deadline(start_redis: Start) -> None:
    """It is reported as silent."""
    server = start_redis()
    server.pause()
    try:
        report = await checked(
            f"http://127.0.0.1:{free_port()}", redis__url=server.url, redis__timeout_s=0.3
        )
    finally:
        server.resume()

    assert "did not answer" in finding(report, "redis", "reachable").text


async def test_a_user_who_may_only_read_can_check(start_redis: Start) -> None:
    """INFO is not allowed to it: then memory is not known."""
    server = start_redis()
    server.client.execute_command(
        "ACL", "SETUSER", "reader", "on", ">pw", "~{wr:*", "+@read", "+@connection", "+time"
    )
    report = await check(
        settings(
            f"http://127.0.0.1:{free_port()}",
            redis__url=server.url,
            redis__username="reader",
        ),
        redis_password="pw",
        wait_s=PATIENCE_S,
    )

    assert finding(report, "redis", "reachable").level == "ok"
    assert "may not read its settings" in finding(report, "redis", "memory").text


# -- the pool ------------------------------------------------------------------------------------


async def test_a_pool_is_described() -> None:
    """How full it is, what its keys look like, who takes part."""
    async with PoolMaster() as master, Engines(1, pool=master.url) as (engine,):
        await prompted(engine)
        report = await checked(engine, mooncake__master=master.url)

    assert wrong(report) == []
    (pool,) = report.pools
    (model,) = pool.models
    assert model.layout is not None
    assert (model.name, model.layout.num_ranks) == ("tiny", 1)
    assert pool.figures is not None
    assert model.num_blocks == pool.figures.num_keys
    assert model.bytes_per_token
    assert finding(report, "pool", "members").text == "take part: r1"
    assert "tp_rank:0@" in finding(report, "pool", "keys").text


async def test_several_pools_are_described_each() -> None:
    """With their own members; one that does not answer is no fault of the others."""
    async with PoolMaster() as master, Engines(1, pool=master.url) as (engine,):
        await prompted(engine)
        report = await checked(
            replicas=[
                {"url": engine.url, "pool": "here"},
                {"url": f"http://127.0.0.1:{free_port()}", "pool": "gone"},
            ],
            mooncake__pools=[f"here={master.url}", f"gone=http://127.0.0.1:{free_port()}"],
        )

    assert [(pool.name, pool.error is None) for pool in report.pools] == [
        ("here", True),
        ("gone", False),
    ]
    assert finding(report, "pool here", "members").text == "take part: r1"
    assert finding(report, "pool here", "keys").text.startswith("tiny: ")
    assert finding(report, "pool gone", "reachable").level == "error"


async def test_other_weights_in_one_pool_are_reported() -> None:
    """Of engines in dev mode, which say which they have; those apart by configuration do not."""

    def page(dtype: str) -> dict[str, Any]:
        model = {"model": "m", "quantization": None, "dtype": dtype, "revision": None}
        store = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
        return {"vllm_config": {"model_config": model, "kv_transfer_config": store}}

    async with (
        PoolMaster() as master,
        FakeEngine(server_info=page("torch.bfloat16")) as one,
        FakeEngine(server_info=page("torch.bfloat16")) as same,
        FakeEngine(server_info=page("torch.float16")) as other,
    ):
        urls = [one.url, same.url, other.url]
        together = await checked(*urls, mooncake__master=master.url)
        alone = {"url": other.url, "pool": False}
        apart = await checked(replicas=[*urls[:2], alone], mooncake__master=master.url)

    found = finding(together, "pool", "weights")
    assert found.level == "error"
    assert "bfloat16 (r1, r2), float16 (r3)" in found.text
    assert [f.text for f in apart.of("pool") if f.about == "weights"] == []


@pytest.mark.parametrize("fault", ["garbage", "error", "hang"])
async def test_a_master_that_is_none_is_reported(fault: Any) -> None:
    """Whatever it answers, or if it does not."""
    async with PoolMaster() as master:
        master.fault = fault
        report = await check(
            settings(
                f"http://127.0.0.1:{free_port()}",
                mooncake__master=master.url,
                mooncake__timeout_s=0.3,
            ),
            wait_s=PATIENCE_S,
        )

    assert finding(report, "pool", "reachable").level == "error"
    assert "--metrics_port" in finding(report, "pool", "reachable").hint


async def test_a_listing_that_breaks_off_is_reported() -> None:
    """The rest is reported."""
    async with FakeEngine() as master:
        master.pages["/metrics"] = (200, "master_key_count 3\nmaster_allocated_bytes 30\n")
        report = await checked(f"http://127.0.0.1:{free_port()}", mooncake__master=master.url)

    assert [pool.figures.num_keys for pool in report.pools if pool.figures] == [3]
    assert "not listed" in finding(report, "pool", "keys").text


async def test_sources_of_replicas_are_asked_and_what_they_find_is_checked(tmp_path: Path) -> None:
    """What is left out is named with its reason; a file that cannot be used is an error."""
    file = tmp_path / "replicas.yaml"
    async with Engines(1) as (engine,):
        file.write_text(f"- {engine.url}\n- http://169.254.169.254\n")
        found = await checked(discovery__file=file)
        file.write_text("nothing")
        broken = await checked(engine, discovery__file=file)

    assert [replica.url for replica in found.replicas] == [engine.url]
    good, left_out = found.of("discovery")
    assert (good.level, good.text) == ("ok", "1 replicas")
    assert "'169.254.169.254' is not in discovery.hosts" in left_out.text
    assert [f.level for f in broken.of("discovery")] == ["error"]


@pytest.mark.parametrize(
    ("status", "said", "is_known"),
    [
        (400, '"auto" tool choice requires --enable-auto-tool-choice', True),
        (400, "something else", False),
        (404, "", False),
    ],
)
async def test_an_engine_without_a_tool_parser_is_reported(
    status: int, said: str, is_known: bool
) -> None:
    """In the words that agents get; what does not say so is not judged."""
    async with FakeEngine() as engine:
        refusal = json.dumps({"error": {"message": said}})
        engine.pages["/v1/chat/completions"] = (status, refusal)
        report = await checked(engine.url)

    found = [each for each in report.of("replica r1") if each.about == "tools"]
    assert report.replicas[0].takes_tools is (False if is_known else None)
    assert [each.level for each in found] == (["warning"] if is_known else [])
    assert all("--tool-call-parser" in each.hint for each in found)


async def test_an_engine_that_takes_tools_is_not_warned_of() -> None:
    """Nothing is computed to find out."""
    async with Engines(1) as (engine,):
        report = await checked(engine)

    assert report.replicas[0].takes_tools is True
    assert wrong(report) == []
