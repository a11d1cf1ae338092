"""Whether clients name their sessions: said once if prompts go on from each other without names.

Gateways drop headers that they do not know, or set one that is another in each request. Nothing
fails then. Prompts go to their cache all the same.
"""

from __future__ import annotations

import logging
from typing import Any, Final, Literal

from msgspec import Struct

from router.api.part_digests import PartDigests
from router.observers.sessions.threads import Match

logger = logging.getLogger(__name__)

WINDOW: Final = 100
"""Prompts that are judged together."""

PART: Final = "session_names"
"""Stands in a list of findings where others have the part of a prompt."""

_LEAST_SHARE: Final = 0.5

Problem = Literal["none", "changing"]
"""No prompt names a session; or each names another one, although it goes on an earlier prompt."""

_WHAT: Final[dict[Problem, str]] = {
    "none": "no client names its session",
    "changing": "clients name another session in each request",
}
_ADVICE: Final[dict[Problem, str]] = {
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
        return f"{_WHAT[problem]}, although {share} go on others. {_ADVICE[problem]} {_ADDS}"

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
