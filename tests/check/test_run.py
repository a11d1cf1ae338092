"""router.check on the router itself, a real Redis, pools, and sources of replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.emulator.pool import PoolMaster
from router.base.errors import ConfigError
from router.base.messages import SCHEMA
from router.check import check, mooncake
from tests.check.running import PATIENCE_S, checked, finding, prompted, settings, wrong
from tests.discovery.dns_server import serving
from tests.faults.fake_engine import FakeEngine
from tests.faults.several import has_written
from tests.faults.stage import Engines, Stage, chat, on_stage, words
from tests.ports import free_port
from tests.redis_servers import Start

# -- the router itself ---------------------------------------------------------------------------


def ports(stage: Stage) -> dict[str, Any]:
    """Where a router listens, as flags of a check."""
    listen, admin = (int(url.rpartition(":")[2]) for url in (stage.url, stage.admin_url))
    return {"listen__port": listen, "admin__port": admin}


async def test_a_running_router_is_named_and_logs_nothing_about_a_check(tmp_path: Path) -> None:
    """Whether its admin port wants a token or not. A port of another server is an error."""
    token = tmp_path / "admin-token"
    token.write_text("s3same")
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=token) as stage:
        await stage.ask(chat(words(1)))
        await stage.until(lambda: stage.state("r1") == "exact")
        await stage.settled(*engines)
        logged = len(stage.log)
        report = await checked(*engines, **ports(stage))
        taken = await checked(*engines, listen__port=int(engines[0].url.rpartition(":")[2]))

        assert '"level":"warning"' not in stage.log[logged:]
    for port in ("listen port", "admin port"):
        found = finding(report, "router", port)
        assert found.level == "note"
        assert found.text.endswith(" is in use by a running router")
        assert "`warmroute status` describes it" in found.hint
    found = finding(taken, "router", "listen port")
    assert (found.level, found.text.startswith("cannot listen on 127.0.0.1:")) == ("error", True)


async def test_a_file_that_serve_would_refuse_is_refused(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    for key in ("engine__api_key_file", "forward__ca_file"):
        with pytest.raises(ConfigError, match=f"{key.replace('__', '.')}.*No such file"):
            await checked("http://127.0.0.1:1", **{key: gone})


# -- redis ---------------------------------------------------------------------------------------


async def test_redis_is_read_and_nothing_is_written(start_redis: Start) -> None:
    """A new one stays empty: no key, no script, no write was sent."""
    server = start_redis()
    async with Engines(1) as (engine,):
        report = await checked(engine, redis__url=server.url)

    assert report.redis is not None
    assert report.redis.server is not None
    assert report.redis.server.startswith("redis ")
    assert report.redis.schema is None
    assert finding(report, "redis", "namespace").text.endswith("the first router creates it")
    assert server.client.dbsize() == 0
    commands = server.client.info("commandstats")
    assert isinstance(commands, dict)
    sent = {name.removeprefix("cmdstat_").partition("|")[0] for name in commands}
    assert not sent & {"eval", "evalsha", "script", "set", "hset", "xadd", "zadd", "del"}


async def test_replicas_that_other_routers_follow_are_compared(start_redis: Start) -> None:
    """Routers name a replica by its name, or else its URL."""
    server = start_redis()
    async with Engines(2) as (one, other):
        for engine in (one, other):
            await prompted(engine)
        async with on_stage(one, other, redis__url=server.url) as stage:
            await stage.until(lambda: stage.metric("warmroute_feeds", role="leading") == 2)
            await stage.until(lambda: has_written(stage))  # a lease precedes the first write
            same = await checked(one, other, redis__url=server.url)
            fewer = await checked(one, redis__url=server.url)

    assert wrong(same) == []
    assert same.redis is not None
    assert same.redis.schema == str(SCHEMA)
    assert [f.text.rpartition(" ")[2] for f in fewer.complaints()] == [other.url]


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
    """Its contents, its keys and its members."""
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
    """Each has its own members, and is judged alone."""
    async with PoolMaster() as master, Engines(1, pool=master.url) as (engine,):
        await prompted(engine)
        report = await checked(
            replicas=[
                {"url": engine.url, "pool": "here"},
                {"url": f"http://127.0.0.1:{free_port()}", "pool": "gone"},
            ],
            mooncake__pools=[
                {"name": "here", "master": master.url},
                {"name": "gone", "master": f"http://127.0.0.1:{free_port()}"},
            ],
        )

    assert [(pool.name, pool.error is None) for pool in report.pools] == [
        ("here", True),
        ("gone", False),
    ]
    assert finding(report, "pool here", "members").text == "take part: r1"
    assert finding(report, "pool here", "keys").text.startswith("tiny: ")
    assert finding(report, "pool gone", "reachable").level == "error"


async def test_different_weights_in_one_pool_are_reported() -> None:
    """Engines in dev mode report theirs. A replica outside the pool may differ."""

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
async def test_a_server_that_is_not_a_master_is_reported(
    fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "TIMEOUT_S", 0.3)
    async with PoolMaster() as master:
        master.fault = fault
        report = await check(
            settings(
                f"http://127.0.0.1:{free_port()}",
                mooncake__master=master.url,
            ),
            wait_s=PATIENCE_S,
        )

    assert finding(report, "pool", "reachable").level == "error"
    assert "--metrics_port" in finding(report, "pool", "reachable").hint


async def test_an_incomplete_listing_is_reported() -> None:
    async with FakeEngine() as master:
        master.pages["/metrics"] = (200, "master_key_count 3\nmaster_allocated_bytes 30\n")
        report = await checked(f"http://127.0.0.1:{free_port()}", mooncake__master=master.url)

    assert [pool.figures.num_keys for pool in report.pools if pool.figures] == [3]
    assert "not listed" in finding(report, "pool", "keys").text


async def test_replicas_that_a_source_finds_are_checked() -> None:
    """Ignored ones are reported with the reason. A source that fails is an error."""
    async with (
        Engines(1) as (engine,),
        serving({("vllm.x", "A"): ["127.0.0.1", "169.254.169.254"]}) as server,
    ):
        source: dict[str, Any] = {
            "discovery__dns": [f"vllm.x:{engine.url.rpartition(':')[2]}"],
            "discovery__dns_servers": [server.address],
        }
        found = await checked(**source)
        server.records = {}
        broken = await checked(engine, **source)

    assert [replica.url for replica in found.replicas] == [engine.url]
    good, left_out = found.of("discovery")
    assert (good.level, good.text) == ("ok", "1 replicas")
    assert "'169.254.169.254' is not in discovery.hosts" in left_out.text
    assert [f.level for f in broken.of("discovery")] == ["error"]
