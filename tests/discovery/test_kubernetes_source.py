"""router.discovery.kubernetes_source: a Service watched through an API server with its failures.

router.discovery.kubernetes_source: slices as the control plane writes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.base.errors import ConfigError, DiscoveryError
from router.config import load
from router.config.hosts import HostRules
from router.discovery.endpoint_slices import COST_LABEL, POOL_LABEL, Slice, replicas_in
from router.discovery.kubernetes_source import KubernetesSource
from router.discovery.sources import why_refused
from router.replicas.replica import Found
from tests.discovery.fake_kubernetes import FakeKubernetes, endpoint, kubernetes, slice_of
from tests.faults.stage import Engines, chat, on_stage, words
from tests.waiting import until

A = slice_of(endpoint("10.0.0.1", "a"))
AB = slice_of(endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b"))
B = slice_of(endpoint("10.0.0.2", "b"))


class Watched:
    """A source that runs against a server; takes what it reports."""

    def __init__(self, server: FakeKubernetes, source: KubernetesSource) -> None:
        self.server = server
        self.source = source
        self.answers: list[list[str | None]] = []
        self.failures: list[str] = []

    def found(self, _: str, found: Sequence[Found]) -> None:
        self.answers.append([each.replica.name for each in found])

    def failed(self, _: str, reason: str) -> None:
        self.failures.append(reason)

    async def until(self, is_so: Callable[[], object]) -> None:
        await until(is_so)

    async def sees(self, *names: str) -> None:
        await self.until(lambda: self.answers and self.answers[-1] == list(names))


@asynccontextmanager
async def watched(
    folder: Path, *, watch_s: float = 120.0, answer_s: float = 60.0
) -> AsyncIterator[Watched]:
    """Run a source, with short pauses after failures."""
    files = ThreadPoolExecutor(1)
    async with kubernetes(folder) as server:
        server.set(A)
        source = KubernetesSource(
            "vllm:http",
            url=server.url,
            credentials=folder,
            files=files,
            watch_s=watch_s,
            answer_s=answer_s,
            pauses_s=(0.01, 0.02),
        )
        subject = Watched(server, source)
        async with asyncio.TaskGroup() as tg:
            task = tg.create_task(source.run(subject))
            yield subject
            task.cancel()
    files.shutdown()


async def test_changes_are_followed_as_they_come(tmp_path: Path) -> None:
    async with watched(tmp_path) as subject:
        await subject.sees("a")
        await subject.until(lambda: subject.server.num_watches)
        subject.server.set(AB)
        await subject.sees("a", "b")
        subject.server.set(AB, slice_of(endpoint("10.0.0.3", "c"), name="z"))
        await subject.sees("a", "b", "c")
        subject.server.send("BOOKMARK", {"metadata": {"resourceVersion": "99"}})
        subject.server.set(AB)
        await subject.sees("a", "b")
        line = b'{"type":"DELETED","object":{"metadata":{"name":"vllm-a"}}}\n'
        subject.server.write(line[:20])
        subject.server.write(line[20:])
        await subject.sees()

        assert (subject.server.num_lists, subject.failures) == (1, [])
        (query,) = subject.server.queries
        assert query["resourceVersion"] == "42"
        assert 90 <= int(query["timeoutSeconds"]) <= 120


async def _expired(server: FakeKubernetes) -> None:
    server.send("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})


async def _ended(server: FakeKubernetes) -> None:
    server.write(None)


async def _rotated(server: FakeKubernetes) -> None:
    """The token is another one, and is read again."""
    server.rotate("token-2")
    server.write(None)


@pytest.mark.parametrize("event", [_expired, _ended, _rotated])
async def test_a_watch_that_ends_is_no_failure(
    event: Callable[[FakeKubernetes], Awaitable[None]],
    tmp_path: Path,
) -> None:
    async with watched(tmp_path) as subject:
        await subject.until(lambda: subject.server.num_watches)
        subject.server.set(B, silently=True)
        await event(subject.server)
        await subject.sees("b")

        assert subject.failures == []


async def test_a_watch_that_has_gone_silent_is_left(tmp_path: Path) -> None:
    async with watched(tmp_path, watch_s=0.1, answer_s=0.3) as subject:
        await subject.until(lambda: subject.server.num_watches)
        subject.server.set(B, silently=True)
        await subject.sees("b")


async def test_a_watch_that_is_alive_and_has_lost_an_event_is_left_in_the_end(
    tmp_path: Path,
) -> None:
    async with watched(tmp_path, watch_s=0.1, answer_s=0.3) as subject:
        await subject.sees("a")
        subject.server.set(B, silently=True)
        async with asyncio.timeout(60):
            while subject.answers[-1] != ["b"]:
                subject.server.send("BOOKMARK", {"metadata": {"resourceVersion": "99"}})
                await asyncio.sleep(0.05)


FAILURES: list[tuple[str, Callable[[FakeKubernetes], object], str]] = [
    ("forbidden", lambda s: setattr(s, "status", 403), "`list` and `watch` on endpointslices"),
    ("watch", lambda s: setattr(s, "watch_status", 403), "`list` and `watch` on endpointslices"),
    ("busy", lambda s: setattr(s, "status", 429), "answered 429"),
    ("broken", lambda s: setattr(s, "status", 500), "answered 500"),
    ("elsewhere", lambda s: setattr(s, "status", 302), "answered 302"),
    ("token", lambda s: setattr(s, "token", "another"), "answered 401"),
    ("garbage", lambda s: setattr(s, "list_body", b"<html>"), "no list of EndpointSlices"),
    ("deep", lambda s: setattr(s, "list_body", b"[" * 9999), "no list of EndpointSlices"),
    ("silent", lambda s: setattr(s, "is_silent", True), "no answer in"),
    ("slow", lambda s: setattr(s, "list_end", "never"), "its list did not end in time"),
    ("cut", lambda s: setattr(s, "list_end", "cut"), "its list broke off"),
    ("pages", lambda s: setattr(s, "status", 410), "answered 410"),
    ("version", lambda s: setattr(s, "watch_status", 410), "answered 410"),
]


@pytest.mark.parametrize(
    ("spoil", "reason"), [case[1:] for case in FAILURES], ids=[case[0] for case in FAILURES]
)
async def test_a_server_that_fails_changes_nothing(
    spoil: Callable[[FakeKubernetes], object],
    reason: str,
    tmp_path: Path,
) -> None:
    async with watched(tmp_path, answer_s=1.0) as subject:
        server = subject.server
        await subject.sees("a")
        await subject.until(lambda: server.num_watches)
        before = {
            "status": 200,
            "watch_status": 200,
            "list_body": None,
            "list_end": None,
            "is_silent": False,
        }
        token, num_answers = server.token, len(subject.answers)
        server.set(B, silently=True)
        spoil(server)
        server.write(None)
        await subject.until(lambda: any(reason in each for each in subject.failures))
        assert not any(token in each for each in subject.failures)
        assert len(subject.answers) == num_answers

        for key, value in before.items():
            setattr(server, key, value)
        server.token = token
        await subject.sees("b")


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n",
        b'{"type":"LIED","object":{}}\n',
        b'{"type":"ADDED","object":[]}\n',
        b'{"type":"ADDED"}\n',
        b'{"type":"ERROR","object":{"code":500}}\n',
        pytest.param(b"x" * 5_000_000, id="endless"),
    ],
)
async def test_a_watch_that_says_nonsense_is_left(line: bytes, tmp_path: Path) -> None:
    async with watched(tmp_path) as subject:
        await subject.until(lambda: subject.server.num_watches)
        subject.server.set(B, silently=True)
        subject.server.write(line)
        await subject.sees("b")

        assert len(subject.failures) == 1


async def test_another_services_slices_are_not_taken(tmp_path: Path) -> None:
    other = {"labels": {"kubernetes.io/service-name": "other"}}
    async with watched(tmp_path) as subject:
        await subject.until(lambda: subject.server.num_watches)
        subject.server.set(A, slice_of(endpoint("10.0.0.9", "x"), name="z", **other))
        subject.server.set(B | {"metadata": A["metadata"] | other})
        await subject.sees()

        assert ["a", "x"] not in subject.answers


@pytest.mark.parametrize("name", ["token", "ca.crt", "namespace"])
async def test_credentials_that_are_missing_are_named(name: str, tmp_path: Path) -> None:
    async with kubernetes(tmp_path) as server:
        (tmp_path / name).unlink()
        with ThreadPoolExecutor(1) as files:
            source = KubernetesSource("vllm", url=server.url, credentials=tmp_path, files=files)
            with pytest.raises(DiscoveryError, match=rf"{name}: No such file"):
                await source.look()


async def test_a_server_of_another_authority_gets_no_token(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with kubernetes(tmp_path) as server, kubernetes(tmp_path / "other") as other:
        with ThreadPoolExecutor(1) as files:
            source = KubernetesSource("vllm", url=other.url, credentials=tmp_path, files=files)
            with pytest.raises(DiscoveryError, match="certificate"):
                await source.look()
        assert (server.num_lists, other.num_lists) == (0, 0)


async def test_pods_come_and_go_in_a_router(tmp_path: Path) -> None:
    async with Engines(1) as (engine,), kubernetes(tmp_path) as server:
        port = engine.url.rpartition(":")[2]
        server.set(slice_of(endpoint("127.0.0.1", "vllm-a", ready=True)))
        settings = {
            "discovery__kubernetes": [f"prod/vllm:{port}"],
            "discovery__kubernetes_api": server.url,
            "discovery__kubernetes_credentials": str(tmp_path),
        }
        async with on_stage(ready=False, **settings) as stage:
            await stage.ready()
            assert (await stage.ask(chat(words(1)))).replica == "vllm-a"
            server.set(slice_of(endpoint("127.0.0.1", "vllm-a", ready=False, terminating=True)))
            await stage.until(lambda: stage.metric("warmroute_discovery_failing") == 1)
            assert (await stage.ask(chat(words(1)))).replica == "vllm-a"  # it was the last one

            new = endpoint("127.0.0.1", "vllm-b", ready=True)
            server.set(slice_of(new))
            await stage.until(
                lambda: [r.name for r in stage.router.fleet.members.replicas] == ["vllm-b"]
            )
            await stage.ready()
            assert (await stage.ask(chat(words(1)))).replica == "vllm-b"

            server.set(slice_of(new, labels={"warmroute.io/role": "decode"}))
            await stage.until(
                lambda: [r.role for r in stage.router.fleet.members.replicas] == ["decode"]
            )
            await stage.ready()
            assert (await stage.ask(chat(words(1)))).headers["x-warmroute-prefill"] == "local"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"kubernetes": ["a/b/c"]}, r"discovery.kubernetes\[0\]: 'a/b/c' is not"),
        ({"kubernetes": ["vllm?x=1"]}, r"\[NAMESPACE/\]SERVICE\[:PORT\]"),
        ({"kubernetes_api": "http://10.0.0.1"}, "the token is sent there"),
        ({"kubernetes_api": "https://user@host"}, "is not https://HOST:PORT"),
    ],
)
def test_what_cannot_be_watched_is_refused_at_the_start(
    flags: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(flags={("discovery", key): value for key, value in flags.items()})


IPV6: dict[str, Any] = {"name": "vllm-6", "addressType": "IPv6"}


def found(*slices: dict[str, Any], port: str | None = None) -> dict[str, str]:
    """Name each replica's state by its address."""
    read = [msgspec.convert(each, Slice) for each in slices]
    return {
        each.replica.url.removeprefix("http://"): (each.replica.name or "-")
        + ("" if each.is_ready else " not ready")
        for each in replicas_in(read, port)
    }


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([slice_of()], {}),
        ([slice_of(endpoint("10.0.0.1", "a"))], {"10.0.0.1:8000": "a"}),  # conditions unknown
        ([slice_of(endpoint("10.0.0.1", "a", ready=True))], {"10.0.0.1:8000": "a"}),
        ([slice_of(endpoint("10.0.0.1", "a", ready=False))], {"10.0.0.1:8000": "a not ready"}),
        (
            [slice_of(endpoint("10.0.0.1", "a", ready=False, serving=True, terminating=True))],
            {},
        ),
        ([slice_of(endpoint("10.0.0.1", "a", ready=False, terminating=True))], {}),
        ([slice_of(endpoint("10.0.0.1"))], {"10.0.0.1:8000": "-"}),  # no pod: written by hand
        ([slice_of(endpoint("10.0.0.1", "a" * 70))], {"10.0.0.1:8000": "-"}),
        (  # two slices
            [slice_of(endpoint("10.0.0.2", "b")), slice_of(endpoint("10.0.0.1", "a"), name="z")],
            {"10.0.0.1:8000": "a", "10.0.0.2:8000": "b"},
        ),
        (  # one endpoint in two while they are rearranged: the ready one counts
            [
                slice_of(endpoint("10.0.0.1", "a", ready=False)),
                slice_of(endpoint("10.0.0.1", "a", ready=True), name="z"),
            ],
            {"10.0.0.1:8000": "a"},
        ),
        (  # both families: one replica
            [slice_of(endpoint("fd00::1", "a"), **IPV6), slice_of(endpoint("10.0.0.1", "a"))],
            {"10.0.0.1:8000": "a"},
        ),
        ([slice_of(endpoint("fd00::1", "a"), **IPV6)], {"[fd00::1]:8000": "a"}),
        ([slice_of(endpoint("engine.example"), addressType="FQDN")], {}),
        ([slice_of({"addresses": [], "conditions": {}})], {}),
        ([slice_of({"addresses": ["10.0.0.1", "10.0.0.2"]})], {"10.0.0.1:8000": "-"}),
    ],
)
def test_slices_are_merged(slices: list[dict[str, Any]], expected: dict[str, str]) -> None:
    assert found(*slices) == expected


PORTS = [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9000}]


@pytest.mark.parametrize(
    ("ports", "port", "number"),
    [
        (PORTS, "metrics", 9000),
        (PORTS, "8080", 8080),
        (None, "8080", 8080),
        (PORTS[:1], None, 8000),
    ],
)
def test_the_port_is_named_or_the_only_one(ports: object, port: str | None, number: int) -> None:
    assert list(found(slice_of(endpoint("10.0.0.1"), ports=ports), port=port)) == [
        f"10.0.0.1:{number}"
    ]


@pytest.mark.parametrize(
    ("fields", "port", "reason"),
    [
        ({"ports": PORTS}, None, r"not one port but several.*http \(8000\), metrics \(9000\)"),
        ({"ports": PORTS}, "grpc", "no port 'grpc'"),
        ({"ports": None}, None, "it has: none"),
        ({"ports": [{"name": "http"}]}, "http", "no port 'http'"),
        ({"endpoints": [endpoint("10.0.0.1/x@y")]}, None, "is not an address"),
        ({"labels": {"warmroute.io/role": "cook"}}, None, "'cook' is not both, prefill or decode"),
        ({"labels": {COST_LABEL: "dear"}}, None, "cost-per-hour: 'dear' is not a number above 0"),
        ({"labels": {COST_LABEL: "0"}}, None, "cost-per-hour: '0' is not a number above 0"),
    ],
)
def test_senseless_slices_are_refused(fields: Any, port: str | None, reason: str) -> None:
    with pytest.raises(DiscoveryError, match=reason):
        found(slice_of(endpoint("10.0.0.1"), **fields), port=port)


HOSTS = HostRules(("10.0.0.0/8",))


def test_a_label_of_the_service_says_the_pool() -> None:
    labelled = slice_of(endpoint("10.0.0.1"), labels={POOL_LABEL: "east"})
    (each,) = replicas_in([msgspec.convert(labelled, Slice)], None)

    assert each.replica.pool == "east"
    assert why_refused(each, HOSTS, ("east", "west")) is None
    assert why_refused(each, HOSTS, ("west",)) == (
        "pool: unknown pool 'east'; write west, or false"
    )


@pytest.mark.parametrize(
    ("labels", "role", "cost"),
    [({"warmroute.io/role": "prefill"}, "prefill", None), ({COST_LABEL: "2.5"}, "both", 2.5)],
)
def test_labels_of_the_service_say_the_role_and_what_an_hour_costs(
    labels: dict[str, str], role: str, cost: float | None
) -> None:
    labelled = slice_of(endpoint("10.0.0.1"), labels=labels)
    (each,) = replicas_in([msgspec.convert(labelled, Slice)], None)

    assert (each.replica.role, each.replica.cost_per_hour) == (role, cost)
