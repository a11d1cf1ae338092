"""router.discovery.sources: which answers are followed, and what of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.config import DiscoveryConfig, ReplicaConfig
from router.config.hosts import HostRules
from router.discovery.sources import MAX_REPLICAS, Sources
from router.discovery.status import UNDISCOVERED, Waiting
from router.replicas.entry import Found

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
