"""Prompts that change near their beginning in every turn: said once, and without their text.

Sessions without names, through a whole router: said once, and routing stays as it is.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from click.testing import CliRunner

from policies.view import CandidateId
from router.api.digests import PartDigests, parts_of
from router.cli import main
from router.observers.sessions.bookkeeper import (
    LEAST_IN_ROW,
    WINDOW,
    Findings,
    SessionFinding,
    SessionNames,
)
from router.observers.sessions.session_ledger import Match, Thread
from router.records.record import Change, Part
from tests.faults.stage import SECRET, Engines, Json, Stage, chat, on_stage, words
from tests.faults.stage import streamed as answered


def body(system: str) -> bytes:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "at 9:15"}]
    return json.dumps({"messages": messages}).encode()


def note(
    findings: Findings,
    part: Part = "system",
    num_in_row: int = LEAST_IN_ROW,
    *,
    tenant: str | None = None,
    session: str = "s1",
    text: bytes | None = None,
) -> SessionFinding | None:
    change = Change(part=part, offset=16, num_in_row=num_in_row)
    return findings.note(change, 1_000, tenant=tenant, session=session, body=text)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (body("It is 12:04:31."), "time"),
        (body("Now: 1795852992"), "time"),
        (body("Today is 2026-11-28."), "date"),
        (body("Run 0b8cf5a2-9a3e-4c1c-8f4e-2f5d6a7b8c9d"), "id"),
        (body("You are an agent."), "unknown"),
        (b'{"system": [{"type": "text", "text": "It is 7:00."}]}', "time"),
        (b'{"instructions": "It is 7:00."}', "time"),
        (b'{"input": [{"role": "developer", "content": "7:00"}]}', "time"),
        (b'{"messages": [5]}', "unknown"),
        (b"[]", "unknown"),
        (b"\xff", "unknown"),
        (None, "unknown"),
    ],
)
def test_what_probably_changes_is_guessed(text: bytes | None, hint: str) -> None:
    """From the system prompt alone; a body that cannot be read gives no hint."""
    found = note(Findings(), text=text)

    assert found is not None
    assert found.hint == hint


def test_only_a_row_of_early_changes_is_a_finding() -> None:
    findings = Findings()
    assert note(findings, num_in_row=LEAST_IN_ROW - 1) is None
    for part in ("message", "compacted", "template", "text"):
        assert note(findings, part, 9) is None  # type: ignore[arg-type]
    assert list(findings) == []


def test_it_is_said_once_and_added_up(caplog: pytest.LogCaptureFixture) -> None:
    """For each tenant and part; sessions count when they come to it."""
    findings = Findings()
    with caplog.at_level(logging.WARNING):
        for session in ("s1", "s2"):
            for in_row in range(1, 6):
                note(findings, num_in_row=in_row, session=session, text=body("It is 12:04."))
        note(findings, tenant="t")
        note(findings, "tools")
    found: dict[Any, SessionFinding] = {(each.tenant, each.part): each for each in findings}

    assert len(caplog.records) == 3
    assert set(found) == {(None, "system"), ("t", "system"), (None, "tools")}
    mine = found[None, "system"]
    assert (mine.num_sessions, mine.num_turns, mine.num_again) == (2, 6, 6_000)
    assert "6,000 so far" in mine.text
    assert "12:04" not in mine.text


def test_findings_are_bounded() -> None:
    """The oldest goes first."""
    findings = Findings()
    for number in range(300):
        note(findings, tenant=str(number))

    assert next(iter(findings)).tenant == "299"
    assert len(list(findings)) == 100


NUM_TURNS = 4
MESSAGE = "prompts go on from each other without names"


async def converse(stage: Stage, number: int, headers: list[Json]) -> int:
    """Have a conversation, and return at how many replicas it was."""
    texts, replicas = [words(number, 40)], set()
    for turn in range(NUM_TURNS):
        reply = await stage.ask(
            answered(chat(*texts, max_tokens=1)), headers={"X-Session-ID": ""} | headers[turn]
        )
        assert reply.status == 200
        replicas.add(reply.replica)
        texts += ["yes", words(1_000 + number * NUM_TURNS + turn, 8)]
    return len(replicas)


async def fill(stage: Stage, name: str, *, start: int, changes: bool = False) -> list[int]:
    """Have conversations for a window of prompts; `name` "": they have none."""
    num = []
    for number in range(start, start + WINDOW // NUM_TURNS):
        names = [f"{SECRET}-{number}-{turn if changes else 0}" for turn in range(NUM_TURNS)]
        headers: list[Json] = [{name: each} if name else {} for each in names]
        num.append(await converse(stage, number, headers))
    return num


async def said(stage: Stage) -> list[Json]:
    found: list[Json] = (await stage.admin("/admin/findings")).json()["findings"]
    return found


async def test_conversations_without_names_are_said_once() -> None:
    """In the log; on the page and in `why` until clients name their sessions."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        spread = await fill(stage, "", start=0)
        (found,) = await said(stage)
        (row,) = (await stage.admin("/admin/state")).json()["findings"]
        why = await asyncio.to_thread(CliRunner().invoke, main, ["why", "--admin", stage.admin_url])
        await fill(stage, "", start=50)
        log = stage.log
        await fill(stage, "X-Correlation-ID", start=100)
        named = await said(stage)

    assert set(spread) == {1}  # each conversation stays at one replica
    assert "no client names its session, although 75 of the last 100 prompts" in found["text"]
    assert "X-Session-ID" in found["text"]
    assert row["text"] == found["text"]
    assert "no client names its session" in " ".join(why.stdout.split())
    assert log.count(MESSAGE) == 2  # in both forms
    assert named == []


async def test_a_name_that_is_another_one_in_each_request_is_said() -> None:
    """As some gateways set X-Correlation-ID."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        spread = await fill(stage, "X-Correlation-ID", start=0, changes=True)
        (found,) = await said(stage)
        log = stage.log

    assert set(spread) == {1}
    assert "another session in each request, although 75 of the last 100" in found["text"]
    assert "--set session.known_headers=false" in found["text"]
    assert log.count(MESSAGE) == 2


async def test_completions_without_names_are_seen() -> None:
    """Their tokens and causes count, they are sessions, and the finding comes."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        for number in range(WINDOW // NUM_TURNS):
            prompt = words(number, 40)
            for turn in range(NUM_TURNS):
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
                reply = await stage.ask(body, "/v1/completions", headers={"X-Session-ID": ""})
                assert reply.status == 200
                prompt += " " + words(1_000 + number * NUM_TURNS + turn, 20)
            await stage.settled(*engines)
        (found,) = await said(stage)
        counted = {
            cause: stage.metric("warmroute_prompt_tokens_total", cause=cause)
            for cause in ("cached", "new", "unknown")
        }
        sessions = (await stage.admin("/admin/sessions")).json()["sessions"]

    assert "no client names its session" in found["text"]
    assert counted["cached"] > 0
    assert counted["new"] > 0
    assert counted["unknown"] == 0
    assert len(sessions) > 1


CHAT = "/v1/chat/completions"
ONE = parts_of(CHAT, chat("a"))
LATER = parts_of(CHAT, chat("a", "yes", "b"))
THREAD = Thread(
    space=1,
    contract=None,
    keys=[],
    num_tokens=9,
    parts=None,
    candidate=CandidateId("r1"),
    num_emptied=0,
    at_s=0.0,
)
GOES_ON, IS_FORK, IS_NEW = Match(thread=THREAD), Match(source=THREAD), Match()


@pytest.mark.parametrize(
    ("match", "parts", "is_named", "problem"),
    [
        (GOES_ON, LATER, False, "none"),
        (GOES_ON, LATER, True, None),
        (IS_FORK, LATER, True, "changing"),
        (IS_FORK, LATER, False, None),
        (IS_NEW, LATER, False, None),
        (GOES_ON, ONE, False, None),  # the same question again
        (GOES_ON, None, False, "none"),
    ],
)
@pytest.mark.parametrize("num_others", [40, 60])
def test_most_prompts_decide(
    match: Match, parts: PartDigests | None, is_named: bool, problem: str | None, num_others: int
) -> None:
    """The others are first turns."""
    names = SessionNames()
    for number in range(WINDOW):
        assert names.found is None
        if number < num_others:
            names.note(IS_NEW, ONE, is_named=is_named)
        else:
            names.note(match, parts, is_named=is_named)

    found = names.found.problem if names.found is not None else None
    assert found == (problem if num_others < WINDOW / 2 else None)


def test_one_name_among_many_is_enough() -> None:
    """Then clients can name their sessions: it is not the gateway."""
    names = SessionNames()
    for number in range(WINDOW):
        names.note(GOES_ON, LATER, is_named=number == 0)

    assert names.found is None
