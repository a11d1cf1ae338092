"""router.check.host: ports, files, and who can reach the router."""

from __future__ import annotations

import socket
import sys

import pytest
from msgspec.structs import replace

from router import config
from router.check.deadline import Deadline
from router.check.finding import Finding
from router.check.host import judge, look, why_not_free
from tests.check.samples import REPLICA, named, wrong


def settings(**given: object) -> config.Config:
    """Make a configuration: dots as double underscores."""
    return config.load(flags={tuple(key.split("__")): value for key, value in given.items()})


def judged(**given: object) -> list[Finding]:
    """Judge a configuration; the note that every check has is left out."""
    found = judge(settings(**given), [REPLICA])
    return [each for each in found if each.about != "audit"]


def test_a_free_port_is_left_free() -> None:
    """A taken port is not free, nor is any port of an unknown host."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert why_not_free("127.0.0.1", port) == "Address already in use"
    assert why_not_free("127.0.0.1", port) is None
    assert why_not_free("127.0.0.1", port) is None
    assert (why_not_free("nowhere.invalid", port) or "").startswith("unknown host")
    assert why_not_free("203.0.113.1", port) is not None
    assert why_not_free("::1", port) in (None, "no address of this machine")


async def test_the_collector_of_traces_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not listen; but without OpenTelemetry a router does not start."""

    async def tracing(endpoint: str) -> Finding:
        tree = settings(tracing__endpoint=endpoint, listen__port=0, admin__port=0)
        return next(each for each in await look(tree, Deadline(10)) if each.about == "tracing")

    found = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1/traces"
        found.append(await tracing(url))
    found.append(await tracing(url))
    monkeypatch.setitem(sys.modules, "router.observers.tracing.otlp", None)
    found.append(await tracing(url))

    assert [finding.level for finding in found] == ["ok", "warning", "error"]
    assert found[1].text == f"{url}: refused; spans are lost"
    assert found[2].text.startswith("OpenTelemetry is not installed")


def test_who_can_send_requests_without_a_key_is_noted() -> None:
    """On loopback nobody else can; with a tenants file all need a key."""
    (found,) = judged(listen__host="0.0.0.0")

    assert (found.level, found.about) == ("note", "clients")
    assert found.text.startswith("every host that can reach this machine")
    assert "--tenants-file" in found.hint
    assert judged() == judged(listen__host="0.0.0.0", tenants__file="t.yaml") == []


def test_one_port_for_clients_and_admin_is_an_error() -> None:
    same = judged(listen__port=9000, admin__port=9000)

    assert wrong(same) == [("error", "ports", "listen.port and admin.port are the same")]
    assert judged(listen__port=0, admin__port=0) == []


def test_unnamed_replicas_on_loopback_are_noted_if_routers_share() -> None:
    """Every machine has its own 127.0.0.1."""
    url = "http://127.0.0.1:8000"
    local = named("r1", url=url)
    local = replace(local, entry=replace(local.entry, identity=url))
    tree = settings(redis__url="redis://10.0.0.6:6379/0")

    _, found = judge(tree, [local])

    assert (found.level, found.about) == ("note", "names")
    assert len(list(judge(tree, [REPLICA]))) == len(list(judge(settings(), [local]))) == 1


def test_a_ca_file_without_encryption_is_a_warning(tmp_path: object) -> None:
    file = f"{tmp_path}/ca.pem"
    plain = judged(redis__url="redis://10.0.0.6:6379/0", redis__ca_file=file)
    encrypted = judged(redis__url="rediss://10.0.0.6:6379/0", redis__ca_file=file)

    assert ("warning", "redis.ca_file") in [(each.level, each.about) for each in plain]
    assert "warning" not in [each.level for each in encrypted]
