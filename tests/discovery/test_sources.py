"""router.discovery.sources: which answers are followed, and what of them.

What a router does with replicas that a source found: the test speaks for the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from router.config import DiscoveryConfig, ReplicaConfig
from router.config.hosts import HostRules
from router.discovery.sources import MAX_REPLICAS, Sources
from router.discovery.status import UNDISCOVERED, Waiting
from router.replicas.replica import Found
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import Engines, Stage, chat, on_stage, words
from tests.redis_servers import Start

SOURCE = "file x"


def found(*hosts: str, is_ready: bool = True) -> list[Found]:
    return [
        Found(replica=ReplicaConfig(url=f"http://{host}:8000"), is_ready=is_ready) for host in hosts
    ]


class Followed:
    """Sources over a registry that takes everything, at a time that tests set."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.answers: list[list[str]] = []
        self.results: list[str] = []
        self.waiting: Waiting = {}
        self.sources = Sources(
            [SOURCE],
            hosts=HostRules(DiscoveryConfig().hosts),
            follow=self._follow,
            waiting=self.waiting,
            count=lambda _, result: self.results.append(result),
            clock=lambda: self.now_s,
        )

    def _follow(self, _: str, answer: Sequence[Found]) -> dict[str, str]:
        self.answers.append([each.replica.url.split("/")[2].split(":")[0] for each in answer])
        return {}

    def take(self, answer: Sequence[Found]) -> None:
        self.sources.found(SOURCE, answer)

    @property
    def reason(self) -> str:
        return self.sources.states()[0].reason


def test_an_empty_answer_after_a_full_one_is_kept_out_for_a_while() -> None:
    subject = Followed()
    subject.take(found("a", "b"))
    subject.take([])
    subject.now_s += 59
    subject.take([])
    subject.sources.sweep()
    assert (subject.answers, subject.reason != "") == ([["a", "b"]], True)

    subject.now_s += 1
    subject.sources.sweep()
    assert (subject.answers[1:], subject.reason) == ([[]], "")
    assert subject.results == ["ok", "empty", "empty"]


def test_an_empty_answer_that_is_taken_back_changes_nothing() -> None:
    subject = Followed()
    for between in (found("a"), None):
        subject.take(found("a"))
        subject.take([])
        subject.now_s += 50
        if between is None:
            subject.sources.failed(SOURCE, "gone")
        else:
            subject.take(between)
        subject.now_s += 50
        subject.take([])
        subject.sources.sweep()

    assert [] not in subject.answers


def test_an_answer_without_ready_replicas_counts_as_empty() -> None:
    subject = Followed()
    subject.take(found("a"))
    subject.take(found("a", is_ready=False))

    assert (subject.answers, subject.results) == ([["a"]], ["ok", "empty"])


def test_a_first_answer_may_be_empty() -> None:
    subject = Followed()
    assert subject.waiting == {SOURCE: UNDISCOVERED}
    subject.take([])

    assert (subject.answers, subject.waiting) == ([[]], {})


def test_a_failure_changes_nothing_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    subject = Followed()
    for reason in ("refused", "refused", "silent"):
        subject.sources.failed(SOURCE, reason)
        assert (subject.reason, subject.waiting[SOURCE]) == (reason, reason)
    subject.take(found("a"))

    assert [record.message for record in caplog.records].count(
        "source of replicas is not followed; its last replicas stay"
    ) == 2
    assert (subject.reason, subject.results) == ("", ["failed"] * 3 + ["ok"])


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://169.254.169.254:80", "url: '169.254.169.254' is not in discovery.hosts"),
        ("http://8.8.8.8:80", "url: '8.8.8.8' is not in discovery.hosts"),
        ("ftp://a", "not a base URL"),
        ("http://u:wr-pass@a", "no user or password"),
    ],
)
def test_found_replicas_outside_the_allowed_hosts_are_left_out(url: str, reason: str) -> None:
    subject = Followed()
    subject.take([*found("a"), Found(replica=ReplicaConfig(url=url))])
    ((shown, why),) = subject.sources.states()[0].not_followed.items()

    assert subject.answers == [["a"]]
    assert reason in why
    assert "wr-pass" not in shown + why


def test_too_many_are_refused_as_a_whole() -> None:
    subject = Followed()
    subject.take(found("a"))
    subject.take(found(*(f"h{i}" for i in range(MAX_REPLICAS + 1))))

    assert subject.answers == [["a"]]
    assert "more than 1024" in subject.reason


NAMED: dict[str, Any] = {
    "ready": False,
    "discovery__hosts": ["loopback"],
    "discovery__dns": ["replicas.x:1"],
    "discovery__dns_servers": ["127.0.0.1:9"],  # nothing is there
}


def find(stage: Stage, *urls: str) -> None:
    """Have the source name these replicas."""
    sources = stage.router.discovery.sources
    (source,) = sources.states()
    sources.found(source.name, [Found(replica=ReplicaConfig(url=url)) for url in urls])


def urls_of(stage: Stage) -> set[str]:
    return {replica.url for replica in stage.router.fleet.members.replicas}


async def test_routers_that_see_a_change_at_different_times_undo_nothing(
    start_redis: Start,
) -> None:
    redis = start_redis()
    async with (
        Engines(2) as (a, b),
        on_stage(redis=redis, **NAMED) as early,
        on_stage(redis=redis, **NAMED) as late,
    ):
        find(early, a.url, b.url)  # this router has seen b come, that one has not yet
        find(late, a.url)
        for stage, known in ((early, {a.url, b.url}), (late, {a.url})):
            await stage.until(lambda stage=stage, known=known: urls_of(stage) == known)  # type: ignore[misc]
            await stage.until(lambda stage=stage: stage.metric("warmroute_routers") == 2)  # type: ignore[misc]
        (name,) = (r.name for r in early.router.fleet.members.replicas if r.url == b.url)
        await early.admin(f"/admin/replicas/{name}/drain", {"draining": True})
        await late.until(lambda: late.router.registry.records)
        assert urls_of(late) == {a.url}

        find(late, a.url, b.url)
        await late.until(lambda: urls_of(late) == {a.url, b.url})
        assert not late.router.discovery.watches.is_offered(name)
        await late.admin(f"/admin/replicas/{name}/drain", {"draining": False})
        await early.until(lambda: early.router.discovery.watches.is_offered(name))

        find(early, a.url)
        await early.until(lambda: urls_of(early) == {a.url})
        assert urls_of(late) == {a.url, b.url}
        assert (await late.ask(chat(words(1)))).status == 200


@pytest.mark.parametrize("key_hosts", [[], ["loopback"]])
async def test_a_found_replica_gets_the_key_only_where_it_may(
    tmp_path: Path, key_hosts: list[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("wr-engine-key")
    settings = {"engine__api_key_file": key, "engine__key_hosts": key_hosts}
    async with FakeEngine() as engine, on_stage(**settings, **NAMED) as stage:
        find(stage, engine.url)
        await stage.until(lambda: urls_of(stage))

        assert bool(stage.router.engine_key.headers(engine.url)) is bool(key_hosts)
