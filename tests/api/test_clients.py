"""router.api.sessions: whose request it is, and whom to believe."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from router.api.sessions import Client, Clients


def found(clients: Clients, peer: str | None, **headers: str) -> Client:
    """Find who asks; underscores in names are hyphens."""
    named = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
    return clients.find(peer, CIMultiDictProxy(named), "http")


@pytest.mark.parametrize(
    ("peer", "sees"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("::ffff:127.0.0.1", True),
     (None, True), ("10.1.2.3", False), ("fe80::1%eth0", False), ("::ffff:10.0.0.1", False)],
)  # fmt: skip
def test_details_are_for_this_machine(peer: str | None, sees: bool) -> None:
    """Only clients on loopback see them, unless the configuration names other networks."""
    assert found(Clients(), peer).sees_details is sees
    assert found(Clients(details="always"), peer).sees_details
    assert not found(Clients(details="never"), peer).sees_details


def test_networks_can_be_trusted() -> None:
    """Clients in a configured network are treated as if they were on loopback."""
    clients = Clients(trusted=["10.0.0.0/8", "fe80::1"])

    assert found(clients, "10.1.2.3").sees_details
    assert found(clients, "fe80::1%eth0").sees_details
    assert not found(clients, "11.1.2.3").sees_details


@pytest.mark.parametrize("header", ["X_Forwarded_For", "Forwarded", "X_Real_IP"])
def test_behind_an_unknown_proxy_no_client_is_on_loopback(header: str) -> None:
    """A proxy on this machine passes on requests of clients elsewhere."""
    client = found(Clients(), "127.0.0.1", **{header: "127.0.0.1"})

    assert not client.sees_details
    assert client.hops == client.address == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "address", "sees"),
    [
        ("203.0.113.9", "203.0.113.9", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1, 203.0.113.9", "203.0.113.9", False),  # the first one is the client's word
        ("203.0.113.9, 10.0.0.7", "203.0.113.9", False),  # two proxies
        ("evil, 10.0.0.7", "10.0.0.7", False),
        ("203.0.113.9:4711", "203.0.113.9", False),
        ("[2001:db8::1]:80", "2001:db8::1", False),
        ("2001:db8::1", "2001:db8::1", False),
        ("unknown", "10.0.0.1", False),
        (",,,", "10.0.0.1", False),
        ("10.0.0.9," * 5000, "10.0.0.1", False),
    ],
)
def test_a_trusted_proxy_is_believed(given: str, address: str, sees: bool) -> None:
    """Forwarded addresses count from the end of the chain, as long as the proxies are trusted."""
    client = found(Clients(proxies=["10.0.0.0/8"]), "10.0.0.1", X_Forwarded_For=given)

    assert client.address == address
    assert client.sees_details is sees
    assert client.hops == f"{given}, 10.0.0.1"


def test_no_other_proxy_is_trusted() -> None:
    """What a client claims about itself is replaced."""
    headers = CIMultiDict({"Host": "api"})
    client = found(
        Clients(proxies=["10.0.0.0/8"]), "192.0.2.1", Host="api", X_Forwarded_For="127.0.0.1",
        X_Forwarded_Proto="https", X_Forwarded_Host="evil",
    )  # fmt: skip
    client.write(headers)

    assert client.address == "192.0.2.1"
    assert headers["X-Forwarded-For"] == "192.0.2.1"
    assert headers["X-Forwarded-Proto"] == "http"
    assert headers["X-Forwarded-Host"] == "api"


def test_a_proxy_that_adds_nothing_is_not_the_client() -> None:
    """Without a forwarded address the request may come from any client."""
    client = found(Clients(proxies=["127.0.0.1"]), "127.0.0.1", X_Forwarded_Proto="HTTPS")

    assert not client.sees_details
    assert client.proto == "https"
