"""docs/troubleshooting.md has the messages that `check`, the banner and the router have."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from msgspec.structs import replace

from router import config
from router.check import Report
from router.check.events import Publisher, events_flag
from router.check.finding import Finding
from router.check.host import HostSeen, PortSeen
from router.check.host import judge as judge_host
from router.check.replica import ReplicaSeen, judge
from router.cli.banner import banner
from router.index.candidate_stream import StreamReason
from router.tokens.id_probe import of_chat
from tests.check.samples import REPLICA, model, rank
from tests.docs_blocks import ROOT, blocks
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import chat, on_stage, words

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
MESSAGES = [block.code.strip() for block in blocks(PAGE) if block.language == "text"]

CLOSED = {"reach": "refused", "has_handshake": False}
REFUSED = "http://10.0.0.5:8000/v1/models refused the connection"
REPLICAS: list[ReplicaSeen] = [
    replace(REPLICA, error=REFUSED, failure="no answer"),
    replace(REPLICA, ranks=()),
    replace(REPLICA, ranks=(), silent_publishers=(Publisher(False, "zmq"),)),
    rank(**CLOSED, connects=True, reported="tcp://0.0.0.0:5557"),
    rank(**CLOSED),
    rank(replay_endpoint=None, state="degraded", reason=StreamReason.PARTIAL),
    replace(REPLICA, prefix_caching=False),
    replace(REPLICA, takes_tools=False),
    model(engine_only="OSError: no files"),
    model(difference=of_chat(range(21), [0, 1, 2, *range(4, 21)], None)),
]
PORT = PortSeen(key="listen", host="0.0.0.0", port=8080, error="Address already in use")


def complaints(findings: Iterator[Finding]) -> list[Finding]:
    return Report(findings=tuple(findings)).complaints()


FOUND = [
    complaints(judge_host(HostSeen(ports=(PORT,)), config=config.load(), replicas=()))[0],
    *(complaints(judge(seen))[0] for seen in REPLICAS),
]


@pytest.mark.parametrize("finding", FOUND, ids=lambda finding: finding.about)
def test_a_finding_is_on_the_page_in_its_own_words(finding: Finding) -> None:
    """And what the page says to do has the flags of its hint."""
    assert finding.text in MESSAGES
    flags = re.findall(r"(?<![\w-])--[a-z][a-z-]+", finding.hint)
    section = next(part for part in PAGE.split("\n## ") if finding.text in part)
    assert [flag for flag in flags if flag not in section] == []


def test_the_banner_has_the_words_of_the_check() -> None:
    """As many as it shows."""
    for finding in FOUND:
        lines = banner(config.load(), Report(findings=(finding,)), data_url="http://h")

        assert finding.text in click.unstyle("\n".join(lines))


async def test_every_other_message_is_the_routers_own() -> None:
    """What a client, an operator or the log reads."""
    others = {events_flag()}
    async with FakeEngine() as engine:
        engine.pages["/v1/models"] = {"data": [{"id": "Qwen/Qwen3-8B"}]}
        async with on_stage(engine) as stage:
            asked = await stage.ask({**chat(words(1)), "model": "claude-haiku"})
            others.add(asked.json()["error"]["message"])
        engine.pages["/v1/models"] = (401, "")
        async with on_stage(engine, ready=False) as stage:
            await stage.until(lambda: "answered 401" in stage.log)
            (waiting,) = stage.router.watches._waiting.values()
            others.add(waiting.replace(engine.url, "http://10.0.0.5:8000"))
    others.add("admin token missing or wrong")  # tests/cli/test_commands.py

    assert set(MESSAGES) - {finding.text for finding in FOUND} == others


def test_every_log_line_on_the_page_exists() -> None:
    """Under the router's packages."""
    source = "\n".join(path.read_text() for path in (ROOT / "router").rglob("*.py"))
    named = [
        text
        for line in PAGE.splitlines()
        if line.startswith("In the router's log: ")
        for text in re.findall(r'"([^"]+)"', line.partition(": ")[2])
        if not text.startswith("no: ")
    ]

    assert len(named) == 4
    assert [text for text in named if f'"{text}"' not in source] == []


def test_the_page_is_short() -> None:
    """It is a list of symptoms; the reasons are on other pages."""
    assert len(PAGE.split()) <= 1200
