"""What is said once of prompts and sessions.

Prompts that change near their beginning in every turn are named with what probably changes.

Sessions without names are found by prompts that go on from each other. Gateways drop headers that
they do not know, or set one that is another in each request. Nothing fails then. Prompts go to
their cache all the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import orjson
from msgspec import Struct

from router.api.digests import SYSTEM_ROLES, PartDigests
from router.base.bounded import Bounded
from router.observers.sessions.session_ledger import Match
from router.records.record import Change, Part
from router.records.words import LEAST_IN_ROW, advice_on, change_in_words

logger = logging.getLogger(__name__)


_EARLY: Final[tuple[Part, ...]] = ("tools", "tool_order", "system", "later_system")
_MAX_FINDINGS: Final = 100
_MAX_BYTES: Final = 1 << 20  # of a body that is looked at once more: 3 ms
_FIELDS: Final = ("system", "instructions", "messages", "input")

Hint = Literal["time", "date", "id", "order", "unknown"]

_SIGNS: Final[tuple[tuple[Hint, re.Pattern[str]], ...]] = (
    ("time", re.compile(r"\b\d{1,2}:\d{2}(?::\d{2})?\b|\b1[6-9]\d{8}\b")),
    ("id", re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")),
    ("date", re.compile(r"\b\d{4}-\d{2}-\d{2}\b")),
)


class SessionFinding(Struct, kw_only=True):
    """A part that changes in every turn of some sessions.

    num_again: Tokens that were computed again for it, of all turns since it was found.
    session: The last one, 16 hex digits.
    """

    tenant: str | None
    part: Part
    hint: Hint
    offset: int
    session: str
    num_sessions: int = 1
    num_turns: int = 0
    num_again: int = 0

    @property
    def what(self) -> str:
        """Return what changes, in words."""
        return _CAUSES[self.part, self.hint]

    @property
    def text(self) -> str:
        """Return the finding in words for the agent's user, with what to do."""
        each = f"{self.num_again // max(1, self.num_turns):,} tokens are computed again each time"
        so_far = f", {self.num_again:,} so far" if self.num_turns > 1 else ""
        return f"{self.what}: {each}{so_far}. {advice_on(self.part)}"


_WHAT: Final[dict[Hint, str]] = {
    "time": "the system prompt contains a time of day and changes in every turn",
    "id": "the system prompt contains a random id and changes in every turn",
    "date": "the system prompt contains a date and changes in every turn",
    "order": "the same tools come in another order in every turn",
    "unknown": "the system prompt changes in every turn",
}
_TOOLS: Final = "the tools change in every turn"
_CAUSES: Final[dict[tuple[Part, Hint], str]] = {
    **{("system", hint): text for hint, text in _WHAT.items()},
    **{("tools", hint): _TOOLS for hint in _WHAT},
    **{("later_system", hint): change_in_words("later_system") for hint in _WHAT},
    **{("tool_order", hint): _WHAT["order"] for hint in _WHAT},
}


class Findings:
    """What was found, by tenant and part; the oldest goes first."""

    def __init__(self) -> None:
        self._found: Bounded[tuple[str | None, Part], SessionFinding] = Bounded(_MAX_FINDINGS)

    def __iter__(self) -> Any:
        """Yield the findings, the newest first."""
        return reversed(self._found.values())

    def note(
        self,
        change: Change,
        num_again: int,
        *,
        tenant: str | None,
        session: str,
        body: bytes | None,
    ) -> SessionFinding | None:
        """Record a change; return the finding if it is a new one."""
        if change.part not in _EARLY or change.num_in_row < LEAST_IN_ROW:
            return None
        key = tenant, change.part
        finding, is_new = self._found.get(key), False
        if finding is None:
            is_new = True
            finding = SessionFinding(
                tenant=tenant,
                part=change.part,
                hint=_hint(change.part, body),
                offset=change.offset,
                session=session,
            )
            self._found.put(key, finding)
        elif finding.session != session and change.num_in_row == LEAST_IN_ROW:
            finding.num_sessions += 1
        finding.session = session
        finding.num_turns += 1
        finding.num_again += num_again
        if not is_new:
            return None
        logger.warning(
            "a prompt changes near its beginning in every turn",
            extra={"tenant": tenant, "session": session, "what": finding.text},
        )
        return finding


def _hint(part: Part, body: bytes | None) -> Hint:
    """Guess what changes from known signs. Nothing of the text is kept."""
    if part == "tool_order":
        return "order"
    if part != "system" or body is None or len(body) > _MAX_BYTES:
        return "unknown"
    try:
        text = _system_text(orjson.loads(body))
    except (ValueError, TypeError, AttributeError):
        return "unknown"
    return next((hint for hint, sign in _SIGNS if sign.search(text)), "unknown")


def _system_text(body: Mapping[str, Any]) -> str:
    texts = []
    for field in _FIELDS:
        value = body.get(field)
        if field in ("messages", "input"):
            items = value if isinstance(value, list) else []
            value = [item for item in items if item.get("role") in SYSTEM_ROLES]
        texts.append(orjson.dumps(value).decode())
    return "\n".join(texts)


WINDOW: Final = 100
"""Prompts that are judged together."""

PART: Final = "session_names"
"""Stands in a list of findings where others have the part of a prompt."""

_LEAST_SHARE: Final = 0.5

Problem = Literal["none", "changing"]
"""No prompt names a session; or each names another one, although it goes on an earlier prompt."""

_UNNAMED: Final[dict[Problem, str]] = {
    "none": "no client names its session",
    "changing": "clients name another session in each request",
}
_NAMING: Final[dict[Problem, str]] = {
    "none": "Have the gateway pass on or set a header, such as X-Session-ID, that stays the same "
    "during a conversation.",
    "changing": "Have the gateway keep the header of the session (such as X-Correlation-ID) the "
    "same during a conversation, or read only others: --set session.known_headers=false "
    "--set session.headers=X-Session-ID.",
}
_ADDS: Final = (
    "Prompts go to their cache without names, too. With names, conversations with the same "
    "beginning are distinguished, and one that ends makes room at once."
)


class Unnamed(Struct, frozen=True, kw_only=True):
    """What is wrong with the names of the last prompts; `num_going_on` of them go on others."""

    problem: Problem
    num_going_on: int

    @property
    def text(self) -> str:
        """Write it for the operator of the gateway, with what to do."""
        problem, share = self.problem, f"{self.num_going_on} of the last {WINDOW} prompts"
        return f"{_UNNAMED[problem]}, although {share} go on others. {_NAMING[problem]} {_ADDS}"

    @property
    def row(self) -> dict[str, Any]:
        """Describe it as one of the findings."""
        return {"tenant": None, "session": None, "part": PART, "text": self.text}


class SessionNames:
    """Counts the names of prompts, in windows of `WINDOW`."""

    def __init__(self) -> None:
        self.found: Unnamed | None = None
        """What the last whole window showed; None: all is well, or there was none."""
        self._said: set[Problem] = set()
        self._num_prompts = 0
        self._num_named = 0
        self._num_unnamed_going_on = 0
        self._num_renamed = 0

    def note(self, match: Match, parts: PartDigests | None, *, is_named: bool) -> None:
        """Count a prompt of a session.

        Args:
            match: What was there of it.
            parts: Of the prompt; None: it is no chat.
            is_named: Whether its client named the session.
        """
        self._num_prompts += 1
        self._num_named += is_named
        if parts is None or parts.has_answers:
            if not is_named:
                self._num_unnamed_going_on += match.thread is not None
            elif parts is not None and match.thread is None and match.source is not None:
                self._num_renamed += 1
        if self._num_prompts >= WINDOW:
            self._judge()

    def _judge(self) -> None:
        """Judge a window, and begin another."""
        least = _LEAST_SHARE * self._num_prompts
        self.found = None
        if not self._num_named and self._num_unnamed_going_on > least:
            self.found = Unnamed(problem="none", num_going_on=self._num_unnamed_going_on)
        elif self._num_renamed > least:
            self.found = Unnamed(problem="changing", num_going_on=self._num_renamed)
        self._num_prompts = self._num_named = 0
        self._num_unnamed_going_on = self._num_renamed = 0
        if self.found is not None and self.found.problem not in self._said:
            self._said.add(self.found.problem)
            logger.warning(
                "prompts go on from each other without names", extra={"what": self.found.text}
            )
