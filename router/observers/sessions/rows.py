"""The sessions of the live page's state."""

from __future__ import annotations

import time
from heapq import nlargest
from itertools import islice
from typing import Any, Final

from router.observers.sessions.describe import session_fields
from router.observers.sessions.findings import Findings
from router.observers.sessions.session_ledger import Session, SessionLedger
from router.observers.sessions.session_names import SessionNames

MAX_SESSIONS: Final = 12
MAX_RECENT: Final = 24  # turns of a session
MAX_FINDINGS: Final = 5

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
            top = nlargest(MAX_SESSIONS, self._ledger, key=lambda each: each.totals.engine_s)
            self._keys, self._sorted_s = [each.key for each in top], now_s
        found = [self._ledger.get(key) for key in self._keys]
        return {
            "total": len(self._ledger),
            "forgotten": self._ledger.num_forgotten,
            "shown": [_session_row(each) for each in found if each is not None],
        }

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
    """Describe a session and where the tokens of its last turns came from."""
    recent = [
        [
            turn.candidate,
            turn.num_gpu,
            turn.num_cpu,
            turn.num_pool,
            max(0, turn.num_tokens - turn.num_gpu - turn.num_cpu - turn.num_pool),
        ]
        for turn in session.last_turns(MAX_RECENT)
    ]
    return {**session_fields(session), "recent": recent}
