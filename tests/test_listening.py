"""Listening on every address of a host, and what is said where that cannot be."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from router.base.listening import listen, why_not


@contextmanager
def listening(host: str, port: int = 0) -> Iterator[list[Any]]:
    sockets = listen(host, port)
    try:
        yield [one.getsockname() for one in sockets]
    finally:
        for one in sockets:
            one.close()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@needs_ipv6
@pytest.mark.parametrize("host", ["::", "[::]", ""])
def test_all_addresses_are_those_of_both_kinds(host: str) -> None:
    """At one port; an IPv4 client comes with its own address."""
    with listening(host) as names:
        assert sorted(name[0] for name in names) == ["0.0.0.0", "::"]
        port = names[0][1]
        assert {name[1] for name in names} == {port}
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), timeout=10).close()


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_may_have_brackets(host: str) -> None:
    with listening(host) as names:
        assert [name[0] for name in names] == ["::1"]


def test_an_ipv4_address_is_that_alone() -> None:
    with listening("127.0.0.1") as names:
        assert [name[0] for name in names] == ["127.0.0.1"]


@pytest.fixture
def without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as a container whose kernel has no IPv6, though names resolve to such addresses."""
    real = socket.socket

    class NoIpv6(real):  # type: ignore[misc, valid-type]
        def __init__(self, family: int = -1, *args: Any, **kwargs: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *args, **kwargs)

    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "socket", NoIpv6)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


@pytest.mark.usefixtures("without_ipv6")
def test_a_name_is_listened_on_by_the_addresses_that_there_are() -> None:
    with listening("localhost") as names:
        assert [name[0] for name in names] == ["127.0.0.1"]


@pytest.mark.usefixtures("without_ipv6")
def test_all_ipv6_addresses_of_a_machine_without_any_are_refused() -> None:
    with pytest.raises(OSError, match="not supported") as error:
        listen("::", 0)

    assert why_not("::", error.value) == "this machine has no IPv6; write 0.0.0.0"


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("nowhere.invalid", "unknown host ("),
        ("203.0.113.1", "no address of this machine"),
    ],
)
def test_an_address_of_elsewhere_is_refused(host: str, said: str) -> None:
    with pytest.raises(OSError) as error:  # noqa: PT011 (what it says is the system's)
        listen(host, 0)

    assert why_not(host, error.value).startswith(said)


def test_a_port_that_is_taken_is_refused_and_nothing_stays_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use") as error:
            listen("127.0.0.1", port)
    assert why_not("127.0.0.1", error.value) == "Address already in use"
    with listening("127.0.0.1", port):
        pass
