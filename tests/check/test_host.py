"""router.check.host: ports, files, and a router that runs already."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence

import pytest
from aiohttp import web
from msgspec.structs import replace

from router import config
from router.base.addresses import place_digest
from router.check.deadline import Deadline
from router.check.finding import Finding
from router.check.host import (
    FileSeen,
    HostSeen,
    PortSeen,
    ask_router,
    judge,
    look,
    why_not_free,
)
from router.check.running import of_listing, of_metrics
from tests.check.samples import REPLICA, named, wrong
from tests.conftest import Serve
from tests.ports import free_port

# -- look ----------------------------------------------------------------------------------------


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


async def test_a_router_is_recognized_by_its_pages(serve: Serve) -> None:
    """Behind a token, too."""
    answers = {"/metrics": (200, 'warmroute_x_total{a="b"} 2.0\nwarmroute_x_total 1\n')}

    async def answer(request: web.Request) -> web.Response:
        status, text = answers.get(request.path, (401, '{"error": "admin token missing"}'))
        return web.Response(status=status, text=text)

    url = await serve(answer)
    page = await ask_router(f"{url}/metrics", timeout_s=10)
    admin = await ask_router(f"{url}/admin/replicas", timeout_s=10)
    answers["/metrics"] = (403, "allowed only from loopback or listen.trusted\n")
    hidden = await ask_router(f"{url}/metrics", timeout_s=10)
    answers["/metrics"] = (200, "<html>")
    other = await ask_router(f"{url}/metrics", timeout_s=10)
    closed = await ask_router(f"http://127.0.0.1:{free_port()}/metrics", timeout_s=10)

    assert page is not None
    assert admin is not None
    assert hidden is not None
    assert (other, closed) == (None, None)


async def test_the_collector_of_traces_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not listen; but without OpenTelemetry a router does not start."""
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


async def tracing(endpoint: str) -> Finding:
    """What is found of a collector."""
    settings = {"tracing__endpoint": endpoint, "listen__port": 0, "admin__port": 0}
    flags = {tuple(key.split("__")): value for key, value in settings.items()}
    seen = await look(config.load(flags=flags), Deadline(10))
    return next(finding for finding in judged(seen, **settings) if finding.about == "tracing")


# -- judge ---------------------------------------------------------------------------------------

FREE = PortSeen(key="listen", host="0.0.0.0", port=8080, error=None)
TAKEN = PortSeen(key="admin", host="127.0.0.1", port=8081, error="Address already in use")


def judged(seen: HostSeen, **settings: object) -> list[Finding]:
    """Judge with a configuration: dots as double underscores."""
    flags = {tuple(key.split("__")): value for key, value in settings.items()}
    return list(judge(seen, config=config.load(flags=flags), replicas=[REPLICA]))


def test_an_ipv6_host_is_written_with_brackets() -> None:
    port = replace(FREE, host="::")

    assert next(f.text for f in judged(HostSeen(ports=(port,)))) == "[::]:8080 is free"


def test_free_ports_and_good_files_are_well() -> None:
    """Port 0 means any port."""
    seen = HostSeen(
        ports=(FREE, replace(TAKEN, port=0, error=None)),
        files=(FileSeen("forward.ca_file", "ca.pem", None),),
        num_answered=100,
        num_audited=90,
    )

    findings = judged(seen)

    assert wrong(findings) == []
    assert {"0.0.0.0:8080 is free", "127.0.0.1, any port is free", "ca.pem"} < {
        f.text for f in findings
    }


def test_taken_ports_and_bad_files_are_errors() -> None:
    """A port of a router is a note, or all is well if it is the one that is meant."""
    seen = HostSeen(
        ports=(replace(FREE, error="in use", is_router=True), TAKEN),
        files=(FileSeen("admin.token_file", "t", "it is empty"),),
    )

    findings = judged(seen)

    assert wrong(findings)[:3] == [
        (
            "note",
            "listen port",
            "0.0.0.0:8080 is in use by a router that does not say which replicas it has",
        ),
        ("error", "admin port", "cannot listen on 127.0.0.1:8081: Address already in use"),
        ("error", "admin.token_file", "t: it is empty"),
    ]


def test_who_can_send_requests_without_a_key_is_noted() -> None:
    """On loopback nobody else can; with a tenants file all need a key."""
    quiet = HostSeen(num_answered=0, num_audited=0)

    (found,) = judged(quiet, listen__host="0.0.0.0")

    assert (found.level, found.about) == ("note", "clients")
    assert found.text.startswith("every host that can reach this machine")
    assert "--tenants-file" in found.hint
    assert judged(quiet) == judged(quiet, listen__host="0.0.0.0", tenants__file="t.yaml") == []


OTHER = named("r2", url="http://10.0.0.6:8000")


def listing(*urls: str) -> str:
    """What the admin port says of its replicas."""
    replicas = [{"name": f"r{number}", "url": url} for number, url in enumerate(urls, 1)]
    return json.dumps({"replicas": replicas, "sharing": None})


@pytest.mark.parametrize(
    ("has", "level", "said"),
    [
        ((REPLICA.url, OTHER.url), "ok", "the router of these replicas"),
        ((REPLICA.url + "/v1", OTHER.url, "http://x:1"), "ok", "the router of these replicas"),
        ((OTHER.url,), "note", f"some of these replicas, which lacks {REPLICA.url}"),
        (("http://x:1", "http://x:2"), "note", "of other replicas (http://x:1, http://x:2)"),
        ([f"http://x:{n}" for n in range(1, 6)], "note", "http://x:3, and 2 more)"),
    ],
)
def test_a_router_is_told_by_its_replicas(has: Sequence[str], level: str, said: str) -> None:
    """What it says about prompts counts only if it has all that are checked."""
    seen = HostSeen(
        ports=(replace(TAKEN, is_router=True, router=of_listing(listing(*has))),), prompts=("p",)
    )

    found = {f.about: f for f in judge(seen, config=config.load(), replicas=[REPLICA, OTHER])}

    assert found["admin port"].level == level
    assert said in found["admin port"].text
    assert ("prompts" in found) == (level == "ok")


@pytest.mark.parametrize("page", [None, "", "[]", '{"replicas": []}', "warmroute_x_total 1\n"])
def test_what_says_nothing_of_replicas_is_not_guessed(page: str | None) -> None:
    assert of_listing(page) is None
    assert of_metrics(page) is None


def test_only_requests_of_the_checked_replicas_count() -> None:
    """By address, for a name is another one's at another router; ranks are of their replica."""
    places = {"r1": place_digest(OTHER.url), "east": place_digest(REPLICA.url)}
    lines = [
        *(f'warmroute_replica_info{{place="{p}",replica="{n}"}} 1.0' for n, p in places.items()),
        'warmroute_requests_total{outcome="ok",replica="r1"} 90.0',
        'warmroute_requests_total{outcome="ok",replica="east#0"} 20.0',
        'warmroute_requests_total{outcome="replica_failed",replica="east#1"} 1.0',
        'warmroute_audited_total{replica="r1",result="exact"} 90.0',
        'warmroute_audited_total{replica="east#0",result="exact"} 7.0',
    ]
    router = of_metrics("\n".join(lines) + "\n")
    seen = HostSeen(ports=(replace(FREE, error="in use", is_router=True, router=router),))
    stranger = named("r3", url="http://x:1")

    texts = {f.about: f.text for f in judged(seen)}
    others = {f.about: f.text for f in judge(seen, config=config.load(), replicas=[stranger])}

    assert texts["audit"] == "7 predictions audited so far"
    assert "the first request will show" in others["audit"]


def test_one_port_for_clients_and_admin_is_an_error() -> None:
    same = judged(HostSeen(), listen__port=9000, admin__port=9000)
    any_two = judged(HostSeen(), listen__port=0, admin__port=0)

    assert ("error", "ports", "listen.port and admin.port are the same") in wrong(same)
    assert "ports" not in {f.about for f in any_two}


def test_answers_without_cached_tokens_are_a_warning() -> None:
    """Of a running router, if they are enough. Without a router it is a note."""
    silent = HostSeen(num_answered=20, num_audited=0)

    (found,) = judged(silent)
    (unasked,) = judged(HostSeen())

    assert (found.level, unasked.level) == ("warning", "note")
    assert "--enable-prompt-tokens-details" in found.hint
    assert "--enable-prompt-tokens-details" in unasked.hint
    assert judged(replace(silent, num_answered=19)) == []


def test_what_a_router_says_about_prompts_is_noted() -> None:
    """The first few; a router that was not asked says nothing."""
    quiet = HostSeen(num_answered=0, num_audited=0)
    many = judged(replace(quiet, prompts=tuple(f"p{n}" for n in range(7))))
    (well,) = judged(replace(quiet, prompts=()))

    assert [f.text for f in many] == ["p0", "p1", "p2", "p3", "p4", "2 more: `warmroute why`"]
    assert {f.level for f in many} == {"note"}
    assert well.level == "ok"
    assert judged(quiet) == []


def test_what_a_router_says_about_names_of_sessions_is_noted() -> None:
    """Once, and not as a prompt."""
    found = judged(HostSeen(num_answered=0, num_audited=0, prompts=(), names=("no names",)))

    assert [(f.level, f.about, f.text) for f in found] == [
        ("ok", "prompts", "none changes near its beginning in every turn"),
        ("note", "sessions", "no names"),
    ]


def test_unnamed_replicas_on_loopback_are_noted_if_routers_share() -> None:
    """Every machine has its own 127.0.0.1."""
    quiet = HostSeen(num_answered=0, num_audited=0)
    flags = {("redis", "url"): "redis://10.0.0.6:6379/0"}
    url = "http://127.0.0.1:8000"
    local = named("r1", url=url)
    local = replace(local, entry=replace(local.entry, identity=url))
    tree = config.load(flags=flags)

    (found,) = judge(quiet, config=tree, replicas=[local])

    assert (found.level, found.about) == ("note", "names")
    assert list(judge(quiet, config=tree, replicas=[REPLICA])) == []
    assert list(judge(quiet, config=config.load(), replicas=[local])) == []


def test_a_ca_file_without_encryption_is_a_warning() -> None:
    quiet = HostSeen(num_answered=0, num_audited=0)

    (found,) = judged(quiet, redis__url="redis://10.0.0.6:6379/0", redis__ca_file="ca.pem")

    assert (found.level, found.about) == ("warning", "redis.ca_file")
    assert judged(quiet, redis__url="rediss://10.0.0.6:6379/0", redis__ca_file="ca.pem") == []
