"""The sessions of the live page's state."""

from __future__ import annotations

import time
from heapq import nlargest
from itertools import islice
from typing import Any, Final

from router.api.sessions import engine_name
from router.observers.sessions.describe import session_fields
from router.observers.sessions.findings import Findings
from router.observers.sessions.session_ledger import Session, SessionLedger
from router.observers.sessions.session_names import SessionNames
from router.observers.sessions.turns import Turn
from router.records.computed import Cause

MAX_SESSIONS: Final = 12
MAX_RECENT: Final = 24  # turns of a session
MAX_FINDINGS: Final = 5
MAX_TITLES: Final = 100

_SORT_AGAIN_S: Final = 5.0  # 20,000 sessions take 5 ms


class SessionRows:
    """The sessions that cost most, and what is wrong with prompts."""

    def __init__(self, ledger: SessionLedger, findings: Findings, names: SessionNames) -> None:
        self._ledger = ledger
        self._findings = findings
        self._names = names
        self._keys: list[int] = []
        self._sorted_s = 0.0

    def describe(self) -> dict[str, Any]:
        """Describe the sessions with the most engine-seconds."""
        now_s = time.monotonic()
        if len(self._keys) < MAX_SESSIONS or now_s - self._sorted_s >= _SORT_AGAIN_S:
            top = nlargest(MAX_SESSIONS, self._ledger, key=lambda each: each.totals.gpu_s)
            self._keys, self._sorted_s = [each.key for each in top], now_s
        found = [self._ledger.get(key) for key in self._keys]
        return {
            "total": len(self._ledger),
            "forgotten": self._ledger.num_forgotten,
            "shown": [_session_row(each) for each in found if each is not None],
            "titles": self._titles(),
        }

    def _titles(self) -> dict[str, str]:
        """Return the clients' own ids of the sessions that were active last, by ours."""
        active = islice(self._ledger, MAX_TITLES)
        return {engine_name(each.key): each.title for each in active if each.title}

    def describe_findings(self) -> list[dict[str, Any]]:
        """Describe sessions without names, then prompts that change in every turn, newest first."""
        unnamed = self._names.found
        rows = [{**unnamed.row, "tokens": 0}] if unnamed is not None else []
        return rows + [
            {
                "tenant": each.tenant,
                "session": each.session,
                "part": each.part,
                "tokens": each.num_again,
                "text": each.text,
            }
            for each in islice(self._findings, MAX_FINDINGS)
        ]


def _session_row(session: Session) -> dict[str, Any]:
    """Describe a session, and where the tokens of its last turns came from, or why not."""
    recent = [
        [turn.candidate, turn.num_gpu, turn.num_cpu, turn.num_pool, _by_cause(turn)]
        for turn in session.last_turns(MAX_RECENT)
    ]
    return {**session_fields(session), "recent": recent}


def _by_cause(turn: Turn) -> dict[Cause, int]:
    """Return the tokens that a turn had computed, as new ones if their causes are not known."""
    if turn.computed is not None:
        return turn.computed.tokens
    num_computed = turn.num_tokens - turn.num_gpu - turn.num_cpu - turn.num_pool
    return {"new": num_computed} if num_computed > 0 else {}
