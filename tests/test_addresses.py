"""One spelling for each address of a replica, and which of them are the same place."""

from __future__ import annotations

import pytest

from router.base.addresses import base_url, endpoint_place, host_port, own_url_host, place_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h:8000/v1", "http://h:8000"),
        ("http://h:8000/v1/", "http://h:8000"),
        ("HTTP://Engine.Example:8000", "http://engine.example:8000"),
        ("http://h:80", "http://h"),
        ("https://h:443/v1", "https://h"),
        ("https://h:80", "https://h:80"),
        ("http://h/engines/one/v1", "http://h/engines/one"),
        ("http://h:8000/v10", "http://h:8000/v10"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
        ("http://u:p@h:8000/v1", "http://u:p@h:8000/v1"),  # refused later: as it was written
        ("http://h:8000/v1?a=b", "http://h:8000/v1?a=b"),
        ("http://h:99999", "http://h:99999"),
        ("http://[::1", "http://[::1"),
        ("h:8000", "h:8000"),
        ("", ""),
    ],
)
def test_a_base_url_has_one_spelling(text: str, expected: str) -> None:
    assert base_url(text) == expected
    assert base_url(base_url(text)) == expected


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("http://localhost:8000", "http://127.0.0.1:8000", True),
        ("http://localhost:8000", "http://[::1]:8000/v1", True),
        ("http://0.0.0.0:8000", "http://localhost:8000", True),
        ("http://h", "http://H:80/", True),
        ("http://10.0.0.5:8000", "http://0xa000005:8000", True),
        ("http://h:8000", "https://h:8000", True),  # one port speaks one of them
        ("http://h.:8000", "http://h:8000", True),
        ("http://127.0.0.1:8000", "http://127.0.0.2:8000", False),
        ("http://h:8000", "http://h:8001", False),
        ("http://h/one", "http://h/two", False),
        ("http://h", "https://h", False),
    ],
)
def test_two_urls_may_be_one_place(one: str, other: str, is_same: bool) -> None:
    assert (place_of(one) == place_of(other)) is is_same


@pytest.mark.parametrize(
    ("endpoint", "url", "expected"),
    [
        ("tcp://*:5557", "http://h:8000", "h:5557"),
        ("tcp://0.0.0.0:5557", "http://127.0.0.1:8000", "localhost:5557"),
        ("tcp://[::]:5557", "http://[::1]:8000", "localhost:5557"),
        ("tcp://localhost:05557", "http://h:8000", "localhost:5557"),
        ("tcp://H:5557", "http://elsewhere:8000", "h:5557"),
        ("ipc:///run/e1", "http://h:8000", "ipc:///run/e1"),
    ],
)
def test_an_endpoint_is_at_a_place(endpoint: str, url: str, expected: str) -> None:
    assert endpoint_place(endpoint, url) == expected


def test_hosts_are_written_as_urls_have_them() -> None:
    assert host_port("::", 8080) == "[::]:8080"
    assert host_port("[::1]", 8080) == "[::1]:8080"
    assert host_port("0.0.0.0", 8080) == "0.0.0.0:8080"
    assert [own_url_host(host) for host in ("", "0.0.0.0", "::", "[::]")] == ["127.0.0.1"] * 4
    assert own_url_host("::1") == own_url_host("[::1]") == "[::1]"
    assert own_url_host("engine.example") == "engine.example"
