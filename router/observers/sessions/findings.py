"""Prompts that change near their beginning in every turn: said once, with what probably changes."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import orjson
from msgspec import Struct

from router.api.part_digests import SYSTEM_ROLES
from router.base.bounded import Bounded
from router.records.computed import Change, Part
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
