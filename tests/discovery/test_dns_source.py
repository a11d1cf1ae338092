"""router.discovery.dns_source against a DNS server on loopback whose answers are scripted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest

from router.base.errors import ConfigError, DiscoveryError
from router.config import load
from router.discovery.dns_source import DnsSource
from tests.discovery.dns_server import Records, Server, serving
from tests.faults.stage import Engines, chat, on_stage, words


async def found(server: Server, name: str, lifetime_s: float = 60.0) -> list[str]:
    files = ThreadPoolExecutor(1)
    source = DnsSource(
        name, servers=[server.address], pause_s=1.0, files=files, lifetime_s=lifetime_s
    )
    try:
        return [each.replica.url for each in await source.look()]
    finally:
        files.shutdown()


@pytest.mark.parametrize(
    ("records", "name", "urls"),
    [
        (
            {("vllm.x", "A"): ["10.0.0.2", "10.0.0.1"]},
            "vllm.x:8000",
            ["http://10.0.0.1:8000", "http://10.0.0.2:8000"],
        ),
        ({("vllm.x", "AAAA"): ["fd00::1"]}, "vllm.x:8000", ["http://[fd00::1]:8000"]),
        (  # dual stack: each engine once
            {("vllm.x", "A"): ["10.0.0.1"], ("vllm.x", "AAAA"): ["fd00::1"]},
            "vllm.x:8000",
            ["http://10.0.0.1:8000"],
        ),
        ({("vllm.x", "TXT"): ['"none"']}, "vllm.x:8000", []),
        (
            {
                ("_http._tcp.x", "SRV"): ["0 50 8000 a.x.", "9 50 8001 b.x.", "0 1 8000 gone.x."],
                ("a.x", "A"): ["10.0.0.1"],
                ("b.x", "A"): ["10.0.0.2"],
            },
            "_http._tcp.x",
            ["http://10.0.0.1:8000", "http://10.0.0.2:8001"],
        ),
        ({("_http._tcp.x", "SRV"): ["0 0 0 ."]}, "_http._tcp.x", []),
    ],
)
async def test_each_address_is_a_replica(records: Records, name: str, urls: list[str]) -> None:
    async with serving(records) as server:
        assert await found(server, name) == urls


@pytest.mark.parametrize(
    ("rcode", "reason"),
    [
        (dns.rcode.NXDOMAIN, "NXDOMAIN"),
        (dns.rcode.SERVFAIL, "no server could answer"),
        (dns.rcode.REFUSED, "no server could answer"),
        (None, "no answer in"),
    ],
)
async def test_no_answer_is_a_failure(rcode: dns.rcode.Rcode | None, reason: str) -> None:
    async with serving({}) as server:
        server.rcode = rcode
        with pytest.raises(DiscoveryError, match=reason):
            await found(server, "vllm.x:8000", 0.3)


@pytest.mark.parametrize("damage", [lambda data: data[:12], lambda data: b"", lambda data: b"\xff"])
async def test_garbage_is_a_failure(damage: Callable[[bytes], bytes]) -> None:
    async with serving({("vllm.x", "A"): ["10.0.0.1"]}) as server:
        server.damage = damage
        with pytest.raises(DiscoveryError):
            await found(server, "vllm.x:8000", 0.3)


async def test_replicas_come_and_go_with_their_records() -> None:
    async with (
        Engines(1) as (engine,),
        serving({("vllm.x", "A"): ["127.0.0.1", "169.254.169.254"]}) as server,
    ):
        port = engine.url.rpartition(":")[2]
        settings = {"discovery__dns": [f"vllm.x:{port}"], "discovery__dns_s": 0.02}
        settings |= {"discovery__dns_servers": [server.address], "ready": False}  # type: ignore[dict-item]
        async with on_stage(**settings) as stage:
            await stage.ready()
            server.rcode = dns.rcode.SERVFAIL
            await stage.until(lambda: stage.metric("warmroute_discovery_failing") == 1)
            assert (await stage.ask(chat(words(1)))).replica == f"127.0.0.1-{port}"

            server.records = {("vllm.x", "A"): ["127.0.0.2"]}
            server.rcode = dns.rcode.NOERROR
            await stage.until(
                lambda: [e.name for e in stage.router.registry.entries] == [f"127.0.0.2-{port}"]
            )
            assert "'169.254.169.254' is not in discovery.hosts" in stage.log


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"dns": ["vllm"]}, r"discovery.dns\[0\]: 'vllm' is not HOST:PORT"),
        ({"dns": ["a:1", "http://a:1"]}, r"discovery.dns\[1\]"),
        ({"dns": ["a:70000"]}, r"discovery.dns\[0\]"),
        ({"dns": ["_http.vllm"]}, "is not _SERVICE._tcp.NAME"),
        ({"dns": ["a:1"], "dns_servers": ["ns.example:53"]}, "'ns.example' is not an address"),
        ({"dns": ["a:1"], "dns_servers": ["1.1.1.1"]}, "is not ADDRESS:PORT"),
    ],
)
def test_what_is_no_name_is_refused_at_the_start(flags: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(flags={("discovery", key): value for key, value in flags.items()})
