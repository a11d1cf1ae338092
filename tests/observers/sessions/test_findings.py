"""Prompts that change near their beginning in every turn: said once, and without their text."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from router.observers.sessions.findings import LEAST_IN_ROW, Findings, SessionFinding
from router.records.computed import Change, Part


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
