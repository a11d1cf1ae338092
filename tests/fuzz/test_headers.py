"""Fuzz: whatever headers say, nothing breaks, and an engine gets of them what it may."""

from __future__ import annotations

import ipaddress

from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from router.api.body import PREFIX, Withheld
from router.api.sessions import FORWARDED, Clients
from router.upstream import HOP_BY_HOP, end_to_end

# As aiohttp reads them: bytes that are no UTF-8 become surrogates.
BYTES = st.binary(max_size=60).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
VALUES = BYTES | st.text("0123456789.:,[]% abcdef", max_size=40) | st.just("x" * 9000)
ADDRESSES = st.ip_addresses().map(str) | st.sampled_from(["127.0.0.1", "::1", "10.0.0.1"])
NAMES = st.sampled_from(
    ["X-Forwarded-For", "x-forwarded-proto", "X-Forwarded-Host", "Forwarded", "X-Real-IP", "Host",
     "X-data-parallel-rank", "x-DATA-parallel-rank", "X-Vllm-Priority", "X-Warmroute-Arm",
     "x-warmroute-cached", "Connection", "X-Session-ID", "Accept"]
)  # fmt: skip
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=8).map(CIMultiDict)


@given(ADDRESSES, HEADERS, st.sampled_from([(), ("10.0.0.0/8", "127.0.0.1")]))
def test_a_client_has_an_address_that_is_one(
    peer: str, headers: CIMultiDict[str], proxies: tuple[str, ...]
) -> None:
    """The connection's own, unless a trusted proxy says another; and only then it is believed."""
    client = Clients(proxies=proxies).find(peer, CIMultiDictProxy(headers), "http")

    ipaddress.ip_address(client.address.partition("%")[0])
    assert client.hops.endswith(peer)
    assert client.proto in ("http", "https")
    if not proxies:
        assert client.hops == client.address == peer
    if client.sees_details:
        assert ipaddress.ip_address(client.address).is_loopback or client.address == "::ffff:7f00:1"


@given(st.lists(ADDRESSES, min_size=1, max_size=6))
def test_no_chain_of_hops_puts_a_stranger_on_loopback(hops: list[str]) -> None:
    """What a client writes in front of its own address changes nothing."""
    clients = Clients(proxies=["10.0.0.0/8"])
    headers = CIMultiDict({"X-Forwarded-For": ", ".join([*hops, "203.0.113.9", "10.7.7.7"])})

    client = clients.find("10.0.0.1", CIMultiDictProxy(headers), "http")

    assert client.address == "203.0.113.9"
    assert not client.sees_details


@given(HEADERS)
def test_what_is_withheld_does_not_arrive(headers: CIMultiDict[str]) -> None:
    """In no spelling."""
    drop = Withheld().headers | FORWARDED

    left = end_to_end(headers.items(), drop=drop, drop_prefix=PREFIX)

    for name in left:
        assert name.lower() not in drop | HOP_BY_HOP
        assert not name.lower().startswith(PREFIX)
