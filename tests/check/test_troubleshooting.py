"""docs/operate/troubleshooting.md has the messages that `check`, the banner and the router have."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from msgspec.structs import replace

from router import config
from router.base.listening import cannot_listen
from router.check import Report
from router.check.finding import Finding, Subject
from router.check.replica import judge
from router.check.seen import ReplicaSeen
from router.cli.banner import banner
from router.index.candidate_stream import StreamReason
from router.kv_events.subscriber import EventSource
from router.tokens.trust import of_chat
from tests.check.samples import REPLICA, facts, gone, model, rank, status
from tests.docs_blocks import ROOT

PAGE = (ROOT / "docs/operate/troubleshooting.md").read_text()
ROWS = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", PAGE, re.MULTILINE))  # message -> what to do

CLOSED = {"reach": "refused", "is_publisher": False}
OFF = EventSource("tcp://*:5557", enable_kv_cache_events=False)
REFUSED = "http://10.0.0.5:8000/v1/models refused the connection"
REPLICAS: list[ReplicaSeen] = [
    gone(REFUSED, "no answer"),
    replace(REPLICA, ranks=()),
    replace(REPLICA, ranks=(), publishers=(OFF,)),
    rank(**CLOSED, source=EventSource("tcp://0.0.0.0:5557")),
    rank(**CLOSED),
    rank(replay_endpoint=None, status=status("degraded", StreamReason.PARTIAL)),
    facts(prefix_caching=False),
    replace(REPLICA, takes_tools=False),
    model(engine_only="OSError: no files"),
    model(difference=of_chat(range(21), [0, 1, 2, *range(4, 21)])),
]
PORT = Subject("router").error(
    "listen port",
    cannot_listen("0.0.0.0", 8080, "Address already in use"),
    "end the other process, or choose another port: --port PORT",
)


def complaints(findings: Iterator[Finding]) -> list[Finding]:
    return Report(findings=tuple(findings)).complaints()


FOUND = [
    PORT,
    *(complaints(judge(seen, config.load()))[0] for seen in REPLICAS),
]


@pytest.mark.parametrize("finding", FOUND, ids=lambda finding: finding.about)
def test_a_finding_is_on_the_page_in_its_own_words(finding: Finding) -> None:
    """The page names the flags of its hint, there or in the section that it links."""
    text = ROWS[finding.text]
    if linked := re.search(r"\(#([a-z-]+)\)", text):
        heading = linked[1].replace("-", " ").capitalize()
        text += PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    flags = re.findall(r"(?<![\w-])--[a-z][a-z-]+", finding.hint)

    assert [flag for flag in flags if flag not in text] == []


def test_every_message_in_the_section_about_check_is_a_finding() -> None:
    section = PAGE.partition("## What the start banner and `check` say")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE))

    assert set(rows) == {finding.text for finding in FOUND[1:]}


def test_the_banner_uses_the_words_of_the_check() -> None:
    for finding in FOUND:
        lines = banner(config.load(), Report(findings=(finding,)), urls=("http://h", "http://a"))

        assert finding.text in click.unstyle("\n".join(lines))
