"""router.config.hosts: where a replica may be that is added while the router runs."""

from __future__ import annotations

import pytest

from router.config import AdminConfig
from router.config.hosts import HostRules

DEFAULT = HostRules(AdminConfig().replica_hosts)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.8.8.8", "::1", "10.0.0.5", "172.31.0.1", "192.168.1.1", "100.64.0.9",
        "fd00::5", "localhost", "replica-1", "LOCALHOST", "r1.ns.svc", "r1.ns.svc.cluster.local",
    ],
)  # fmt: skip
def test_a_replica_may_be_on_this_machine_and_in_private_networks(host: str) -> None:
    """And under names of a compose network or a Kubernetes cluster."""
    assert DEFAULT.allows(host)


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518",
        "::ffff:169.254.169.254", "::ffff:a9fe:a9fe", "fe80::1", "fe80::1%eth0", "0.0.0.0", "0",
        "::", "224.0.0.1", "ff02::1", "8.8.8.8", "2001:db8::1", "example.com", "engine.internal",
        "metadata.google.internal", "１６９.254.169.254", "169。254。169。254", "a b", "",
        "a..svc\n", "-x.svc",
    ],
)  # fmt: skip
def test_no_replica_is_added_elsewhere(host: str) -> None:
    """Link-local in every spelling that connects there, public addresses, unknown domains."""
    assert not DEFAULT.allows(host)


def test_link_local_is_never_allowed() -> None:
    """Not even by a pattern that covers it."""
    everything = HostRules(["0.0.0.0/0", "::/0", "169.254.169.254"])

    assert everything.allows("8.8.8.8")
    assert not everything.allows("169.254.169.254")
    assert not everything.allows("0.0.0.0")
    assert not everything.allows("fe80::1")


def test_names_match_as_written() -> None:
    """A whole name, or a suffix with its dot."""
    rules = HostRules(["gpu.example.com", ".engines.example"])

    assert rules.allows("gpu.example.com")
    assert rules.allows("gpu.example.com.")
    assert rules.allows("a.b.engines.example")
    assert not rules.allows("gpu.example.com.evil.org")
    assert not rules.allows("notengines.example")
    assert not rules.allows("localhost")


@pytest.mark.parametrize(
    "pattern", ["10.0.0.0/33", "10.0.0.1/8", "http://x", "a b", "", "*.x", "1.2.3"]
)
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    """With what one looks like."""
    with pytest.raises(ValueError, match="is not loopback, private, a network"):
        HostRules([pattern])


def test_the_first_host_that_is_not_allowed_is_named() -> None:
    """Of URLs and of event endpoints."""
    assert DEFAULT.refused(["http://10.0.0.1:8000", "tcp://10.0.0.1:5557"]) is None
    assert DEFAULT.refused(["http://10.0.0.1", "tcp://169.254.1.1:5557"]) == "169.254.1.1"
    assert DEFAULT.refused(["ipc:///run/engine"]) == "ipc:///run/engine"
